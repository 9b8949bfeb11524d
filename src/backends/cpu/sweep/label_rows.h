// Rows compared with their labels.
#pragma once

#include "backends/cpu/sweep/row_worker.h"

namespace tileloss::impl::cpu {

// A row's backward runs together with the next row's forward, so up to one row is pending.
class LabelRows : public RowWorker {
 public:
  LabelRows(const SweepJob& job, RowVisitor& visitor, const SweepScratch& scratch) : RowWorker(job, visitor, scratch) {}
  LabelRows(const LabelRows&) = delete;
  LabelRows& operator=(const LabelRows&) = delete;

  void row(std::int64_t i) {
    if (is_done(i)) return;
    if (std::optional<TargetStats> known = visitor_.known(i)) {
      if (known->labels.z == nullptr) known->labels = find_labels(i);
      set_pending(i, *known);
      if (wants_gradient()) finish_pending(nullptr);
      return;
    }
    const SeveralLabels labels = find_labels(i);
    ForwardRow forward = make_forward(i, label_column(i, labels));
    if (pending_ >= 0 && job_.shape.has_stash) {
      finish_pending(&forward);
    } else {
      job_.kernels->run[job_.storage](&forward, nullptr);
    }
    visitor_.swept(i, forward.state, {}, labels);
    TargetStats stats(make_row_stats(forward.state));
    stats.labels = labels;
    set_pending(i, stats);
    if (wants_gradient() && !job_.shape.has_stash) finish_pending(nullptr);
  }

  void drain() {
    if (pending_ >= 0) finish_pending(nullptr);
  }

 private:
  SeveralLabels find_labels(std::int64_t i) const {
    const std::byte* const x = logits(i);
    for (std::int64_t k = 0; k < job_.labels_per_row; ++k) {
      const std::int64_t j = visitor_.label_column(i, k);
      if (j >= 0) __builtin_prefetch(x + j * kElementBytes[job_.storage]);  // each is a miss: all of them at once
    }
    return SeveralLabels::find(
        job_.labels_per_row, scratch_.label_z, [&](std::int64_t k) { return visitor_.label_column(i, k); },
        [&](std::int64_t j) { return job_.transform.value(load_element(job_.storage, x, j)); });
  }
  // That the sweeps know.
  std::int64_t label_column(std::int64_t i, const SeveralLabels& labels) const {
    return labels.likeliest < 0 ? job_.label_columns[i] : visitor_.label_column(i, labels.likeliest);
  }

  ForwardRow make_forward(std::int64_t i, std::int64_t label_column) const {
    ForwardRow f = forward_row(logits(i), label_column, job_.columns, job_.transform, scratch_.own);
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
    // Computed now: in place, the backward overwrites the logits.
    set_labels(i, stats.labels, g);
    backward_ = backward_row(i, logits(i), g, job_.transform);
    backward_.class_weights = job_.class_weights;
    backward_.stash = scratch_.own.stash;
    backward_.references = scratch_.own.references;
  }

  void set_labels(std::int64_t i, const SeveralLabels& labels, const RowGradient& g) {
    const auto slope = [&](std::int64_t column) {
      return job_.transform.derivative(load_element(job_.storage, logits(i), column));
    };
    if (labels.likeliest >= 0) {
      const auto column = [&](std::int64_t k) { return visitor_.label_column(i, k); };
      label_count_ = several_gradients(
          g, labels, job_.labels_per_row, column, [&](std::int64_t k) { return visitor_.logp_grad(i, k); },
          [&](std::int64_t k) { return slope(column(k)); }, labels_);
      return;
    }
    const std::int64_t column = job_.label_columns[i];
    label_count_ = column >= 0 ? 1 : 0;
    if (column < 0) return;
    const double weight = job_.class_weights == nullptr ? 1 : job_.class_weights[column];
    labels_[0] = {column, 0, static_cast<float>(label_gradient(g, weight) * slope(column))};
  }

  // The pending row's backward, with another row's forward in the same loop if there is one.
  void finish_pending(ForwardRow* next) {
    job_.kernels->run[job_.storage](next, &backward_);
    for (std::int64_t n = 0; n < label_count_; ++n)
      store_element(job_.storage, dlogits(pending_), labels_[n].column, labels_[n].dx);
    finish(pending_, job_.columns);
    pending_ = -1;
  }

  std::int64_t pending_ = -1;
  BackwardRow backward_;
  // Its labels, once each.
  LabelGradient one_;
  LabelGradient* labels_ = job_.labels_per_row > 0 ? scratch_.label_gradients : &one_;
  std::int64_t label_count_ = 0;
};

}  // namespace tileloss::impl::cpu
