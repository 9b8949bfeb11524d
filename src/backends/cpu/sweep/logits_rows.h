// Rows compared with a teacher's logits: a forward over each of the two, their divergence, the row stage, the gradient, while all
// of it is in cache.
#pragma once

#include "backends/cpu/sweep/row_worker.h"

namespace tileloss::impl::cpu {

class LogitsRows : public RowWorker {
 public:
  LogitsRows(const SweepJob& job, RowVisitor& visitor, const SweepScratch& scratch) : RowWorker(job, visitor, scratch) {}

  void row(std::int64_t i) {
    if (is_done(i)) return;
    const std::byte* const x = logits(i);
    const std::byte* const teacher = target_row(i);
    const Divergence& divergence = target_.options.divergence;
    const std::optional<TargetStats> known = visitor_.known(i);
    const bool shifts = has_shift(divergence.kind) && wants_gradient() && !known;
    const RowStats own = sweep_side(i, x, job_.transform, scratch_.own, shifts ? kArgmax : kNoSums);
    const RowStats other = sweep_side(i, teacher, target_.transform, scratch_.teacher);
    TargetStats stats = known ? *known : TargetStats(own);
    if (!known) {
      stats.teacher = other;
      stats.label = label(i, x, own);
    }
    const bool is_finite = std::isfinite(stats.max) && std::isfinite(stats.teacher.max);
    TargetRow row = make_target_row(i, x, stats);
    row.teacher = side(teacher, target_.transform, stats.teacher, scratch_.teacher);
    row.divergence = divergence;
    row.has_mean = has_mean(divergence.kind);
    if (shifts && is_finite) {
      row.divergence.shift_for(probability(x, own.argmax, job_.transform, own),
                               probability(teacher, own.argmax, target_.transform, other));
    }
    const bool is_certain =
        is_finite && job_.columns == 1 && job_.label_columns[i] >= 0 && !known;  // p = q = 1, whatever exp rounds
    RowResult result;
    double slope = 0;
    const RowSide apart = label_side(x, stats.label);
    if (wants_gradient()) {
      result = visitor_.before_target_sweep(i, stats);
      row.form = result.form;
      row.target = result.coefficients.target;
      if (target_.label_transform && row.target != 0) row.label = &apart;
      // Read now: in place, the sweep overwrites the logit.
      if (row.label_column >= 0) slope = job_.transform.derivative(load_element(job_.storage, x, row.label_column));
    }
    DivergenceTerm<double> label;
    if (is_finite && !is_certain) {
      kernels().diverge(row);
      if (row.label_column >= 0) add_label(label = label_term(row.divergence, stats, stats.teacher), row);
    } else if (!is_finite) {
      row.sums.divergence = kNan;
    }
    const TargetSums merged = stats.sums;
    stats.sums = row.sums;
    visitor_.visit(i, stats);
    if (!wants_gradient()) return;
    if (known) row.sums = merged;
    if (!is_finite) {
      fill_with_nan(i);
    } else if (!is_certain) {
      if (!row.has_gradient) {
        result.has_divergence ? kernels().gradient(row) : write_cross_entropy(i, x, stats.label, result.coefficients);
      }
      if (row.label_column >= 0) write_label(stats, label, result, slope, row);
    }
    finish(i, is_certain ? 0 : job_.columns);
  }

 private:
  // The label is left out of both rows' sums in the same way, so that equal rows have the same bits.
  RowStats sweep_side(std::int64_t i, const std::byte* x, const LogitTransform& transform, const RowScratch& scratch,
                      std::uint32_t more_sums = kNoSums) const {
    return make_row_stats(sweep(x, job_.label_columns[i], job_.columns, transform, scratch, !(transform.softcap > 0), more_sums));
  }
  double probability(const std::byte* x, std::int64_t column, const LogitTransform& transform, const RowStats& stats) const {
    return std::exp(transform.exact_value(load_element(job_.storage, x, column)) - stats.max) / stats.sum;
  }

  // Without the divergence, which may be infinite.
  void write_cross_entropy(std::int64_t i, const std::byte* x, const RowStats& label, const RowCoefficients& c) const {
    const BackwardRow b = backward_row(i, x, {label, c}, label_transform());
    job_.kernels->run[job_.storage](nullptr, &b);
  }

  static void add_label(const DivergenceTerm<double>& label, TargetRow& row) {
    row.sums.divergence += label.value;
    if (row.has_mean) row.sums.mean += label.form;
  }

  void write_label(const TargetStats& stats, const DivergenceTerm<double>& label, const RowResult& result, double slope,
                   const TargetRow& row) const {
    double dz = result.coefficients.target * stats.label.one_minus_p * label_slope();
    if (result.has_divergence) {
      // Where g and the mean are both infinite the gradient is NaN.
      dz += result.form * divergence_slope(label, stats, row.sums.mean, row.has_mean);
    }
    store_element(job_.storage, row.dx, row.label_column, static_cast<float>(dz * slope));
  }
};

}  // namespace tileloss::impl::cpu
