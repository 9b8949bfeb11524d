// Rows compared with their labels.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_LABEL_ROWS_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_LABEL_ROWS_H_

#include "backends/cpu/sweep/row_worker.h"

namespace tileloss::impl::cpu {

// A row's backward runs together with the next row's forward, so up to one row is pending.
class LabelRows : public RowWorker {
 public:
  LabelRows(const SweepJob& job, RowVisitor& visitor, const SweepScratch& scratch) : RowWorker(job, visitor, scratch) {}

  void row(std::int64_t i) {
    if (is_done(i)) return;
    if (const std::optional<TargetStats> known = visitor_.known(i)) {
      set_pending(i, *known);
      if (wants_gradient()) finish_pending(nullptr);
      return;
    }
    ForwardRow forward = make_forward(i);
    if (pending_ >= 0 && job_.shape.has_stash) {
      finish_pending(&forward);
    } else {
      job_.kernels->run[job_.storage](&forward, nullptr);
    }
    visitor_.swept(i, forward.state, {});
    set_pending(i, make_row_stats(forward.state));
    if (wants_gradient() && !job_.shape.has_stash) finish_pending(nullptr);
  }

  void drain() {
    if (pending_ >= 0) finish_pending(nullptr);
  }

 private:
  ForwardRow make_forward(std::int64_t i) const {
    ForwardRow f = forward_row(logits(i), job_.label_columns[i], job_.columns, job_.transform, scratch_.own);
    f.class_weights = job_.class_weights;
    f.stash = scratch_.own.stash;
    f.references = scratch_.own.references;
    return f;
  }

  // The row stage; the gradient is still to come.
  void set_pending(std::int64_t i, const TargetStats& stats) {
    const RowGradient g = {stats, visitor_.visit(i, stats).coefficients};
    if (!wants_gradient()) return;
    pending_ = i;
    const std::int64_t label_column = job_.label_columns[i];
    has_label_ = label_column >= 0;
    if (has_label_) {
      // Computed now: in place, the backward overwrites the logit.
      const double weight = job_.class_weights == nullptr ? 1 : job_.class_weights[label_column];
      const double slope = job_.transform.derivative(load_element(job_.storage, logits(i), label_column));
      label_gradient_ = static_cast<float>(label_gradient(g, weight) * slope);
    }
    backward_ = backward_row(i, logits(i), g, job_.transform);
    backward_.class_weights = job_.class_weights;
    backward_.stash = scratch_.own.stash;
    backward_.references = scratch_.own.references;
  }

  // The pending row's backward, with another row's forward in the same loop if there is one.
  void finish_pending(ForwardRow* next) {
    job_.kernels->run[job_.storage](next, &backward_);
    if (has_label_) store_element(job_.storage, dlogits(pending_), job_.label_columns[pending_], label_gradient_);
    finish(pending_, job_.columns);
    pending_ = -1;
  }

  std::int64_t pending_ = -1;
  BackwardRow backward_;
  bool has_label_ = false;
  float label_gradient_ = 0;
};

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_LABEL_ROWS_H_
