// Rows compared with class probabilities, which lie as floats where a teacher's exps would. Of each row a column is left out of
// the sweeps, as a label is, and added in double: its label's, or where there are none that of the heaviest class, of which a
// sure row is made.
#pragma once

#include <algorithm>
#include <limits>

#include "backends/cpu/sweep/row_worker.h"

namespace tileloss::impl::cpu {

class ProbabilityRows : public RowWorker {
 public:
  ProbabilityRows(const SweepJob& job, RowVisitor& visitor, const SweepScratch& scratch) : RowWorker(job, visitor, scratch) {}

  void row(std::int64_t i) {
    if (is_done(i)) return;
    const std::byte* const x = logits(i);
    const std::optional<TargetStats> known = visitor_.known(i);
    const RowClasses classes = known ? known->classes : RowClasses();
    added_ = target_.options.label_smoothing / classes.count_of(static_cast<double>(target_.classes));
    const std::int64_t heaviest = weigh(i);
    const bool has_column = known || job_.label_columns[i] >= 0 || job_.allowed.has_labels;
    const std::int64_t column = has_column ? job_.label_columns[i] : heaviest;
    const TargetStats own(make_row_stats(sweep(x, column, job_.columns, job_.transform, scratch_.own, !is_capped())));
    TargetStats stats = known ? *known : own;
    TargetRow row = make_target_row(i, x, stats);
    row.label_column = column;
    bool is_finite = std::isfinite(stats.max);
    if (is_finite) {
      if (column >= 0) weigh_block(i, column / kTargetBlock * kTargetBlock, column);
      kernels().add_probabilities(row);
      if (column >= 0) add_column(probability_term(weight_of(i, column), stats.logp), row.sums);
      const TargetSums others = sums_outside(target_.outside);
      row.sums.divergence += others.divergence;
      row.sums.mean += others.mean;
      is_finite = std::isfinite(row.sums.mean);
    }
    if (!is_finite) row.sums.divergence = kNan;
    const TargetSums merged = stats.sums;
    stats.sums = row.sums;
    const RowResult result = visitor_.visit(i, stats);
    if (!wants_gradient()) return;
    if (known) {
      row.sums = merged;
      is_finite = is_finite && std::isfinite(row.sums.mean);
    }
    is_finite ? write(i, x, stats, result.form, row) : fill_with_nan(i);
    finish(i, job_.columns);
  }

 private:
  // kept() q + added_ is (1 - s) q + s / classes, by the class's weight.
  double kept() const { return 1 - target_.options.label_smoothing; }

  // Returns the heaviest class.
  std::int64_t weigh(std::int64_t i) const {
    std::int64_t begin = 0, heaviest = 0;
    float most = -std::numeric_limits<float>::infinity();
    for (std::int64_t start = 0; start < job_.columns; start += kTargetBlock) {
      if (const float found = weigh_block(i, start, -1); found > most) begin = start, most = found;
    }
    double weight = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = begin; j < std::min(job_.columns, begin + kTargetBlock); ++j) {
      if (weight_of(i, j) > weight) heaviest = j, weight = weight_of(i, j);
    }
    return heaviest;
  }
  // A block of the columns, but for the one left out; returns the largest weight.
  float weigh_block(std::int64_t i, std::int64_t start, std::int64_t left_out) const {
    const std::byte* const probs = target_row(i);
    float* const q = scratch_.teacher.stash + start;
    const std::int64_t n = std::min(job_.columns - start, kTargetBlock);
    const bool is_other = target_.storage != job_.storage;
    for (std::int64_t j = 0; is_other && j < n; ++j) q[j] = load_element(target_.storage, probs, start + j);
    return kernels().weigh(is_other ? nullptr : probs + start * kElementBytes[job_.storage], n, left_out - start,
                           static_cast<float>(kept()), static_cast<float>(added_),
                           job_.class_weights == nullptr ? nullptr : job_.class_weights + start, q);
  }
  static void add_column(const DivergenceTerm<double>& column, TargetSums& sums) {
    sums.divergence += column.value;
    sums.mean += column.form;
  }
  double weight_of(std::int64_t i, std::int64_t column) const {
    const double q = load_element(target_.storage, target_row(i), column);
    const double weight = job_.class_weights == nullptr ? 1 : job_.class_weights[column];
    return weight * (kept() * q + added_);
  }

  // The column that is left out has no exp in the stash.
  void write(std::int64_t i, const std::byte* x, const RowStats& stats, double form, TargetRow& row) const {
    const std::int64_t label = row.label_column;
    row.form = form;
    double slope = 0, weight = 0;
    if (label >= 0) {
      slope = job_.transform.derivative(load_element(job_.storage, x, label));
      weight = weight_of(i, label);
    }
    kernels().gradient(row);
    if (label < 0) return;
    const double dz = form * probability_slope(weight, stats.p, stats.one_minus_p, row.sums.mean);
    store_element(job_.storage, row.dx, label, static_cast<float>(dz * slope));
  }

  double added_ = 0;  // s / classes, of the row
};

}  // namespace tileloss::impl::cpu
