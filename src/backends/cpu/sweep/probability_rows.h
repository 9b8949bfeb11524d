// Rows compared with class probabilities, which lie as floats where a teacher's exps would.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_PROBABILITY_ROWS_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_PROBABILITY_ROWS_H_

#include "backends/cpu/sweep/row_worker.h"

namespace tileloss::impl::cpu {

class ProbabilityRows : public RowWorker {
 public:
  ProbabilityRows(const SweepJob& job, RowVisitor& visitor, const SweepScratch& scratch) : RowWorker(job, visitor, scratch) {}

  void row(std::int64_t i) {
    if (is_done(i)) return;
    const std::byte* const x = logits(i);
    const std::optional<TargetStats> known = visitor_.known(i);
    const TargetStats own(
        make_row_stats(sweep(x, job_.label_columns[i], job_.columns, job_.transform, scratch_.own, !is_capped())));
    TargetStats stats = known ? *known : own;
    TargetRow row = make_target_row(i, x, stats);
    bool is_finite = std::isfinite(stats.max);
    if (is_finite) {
      weigh(i);
      kernels().add_probabilities(row);
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
  // (1 - s) q + s / classes, by the class's weight.
  double kept() const { return 1 - target_.options.label_smoothing; }
  double added() const { return target_.options.label_smoothing / static_cast<double>(target_.classes); }

  void weigh(std::int64_t i) const {
    const std::byte* probs = target_row(i);
    float* const q = scratch_.teacher.stash;
    if (target_.storage != job_.storage) {
      for (std::int64_t j = 0; j < job_.columns; ++j) q[j] = load_element(target_.storage, probs, j);
      probs = nullptr;
    }
    kernels().weigh(probs, job_.columns, static_cast<float>(kept()), static_cast<float>(added()), job_.class_weights, q);
  }
  double weight_of(std::int64_t i, std::int64_t column) const {
    const double q = load_element(target_.storage, target_row(i), column);
    const double weight = job_.class_weights == nullptr ? 1 : job_.class_weights[column];
    return weight * (kept() * q + added());
  }

  // A label, which is there for the outputs alone, has no exp in the stash.
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
    const double dz = form * probability_slope(weight, stats.p, row.sums.mean);
    store_element(job_.storage, row.dx, label, static_cast<float>(dz * slope));
  }
};

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_PROBABILITY_ROWS_H_
