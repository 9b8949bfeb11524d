// A target that is not labels: what a call keeps of it on the device, and its sweeps over some rows.
#pragma once

#include "backends/cuda/row_launches.h"
#include "backends/cuda/target_sweep.h"

namespace tileloss::impl::cuda {

// [rows] each but for the transforms; null where the call has no such thing.
struct TargetArrays {
  LogitTransform *teacher_transform = nullptr, *label_transform = nullptr;
  RowState *teacher_states = nullptr, *label_states = nullptr;
  float *largest = nullptr, *teacher_largest = nullptr;  // logits
  double* shifts = nullptr;                              // Divergence::shift
  KnownColumn* known_columns = nullptr;                  // [rows, K]
  KnownRow* known = nullptr;

  template <class Allocator>
  TargetArrays(const Problem& p, Allocator& from) {
    if (p.loss->needs_target_sweep() && p.needs_forward) largest = from.template allocate<float>(p.rows);
    if (p.loss->target() == TargetKind::kLogits) {
      teacher_transform = from.template allocate<LogitTransform>(1);
      teacher_states = from.template allocate<RowState>(p.rows);
      if (p.needs_forward) teacher_largest = from.template allocate<float>(p.rows);
      if (p.needs_forward && p.needs_backward) shifts = from.template allocate<double>(p.rows);
    }
    if (p.loss->info.label_temperature != nullptr && is_given(p.loss->info.label_temperature(p.options.data()))) {
      label_transform = from.template allocate<LogitTransform>(1);
      label_states = from.template allocate<RowState>(p.rows);
    }
    if (p.loss->target() == TargetKind::kColumns) {
      known_columns = from.template allocate<KnownColumn>(p.rows * p.args.teacher_ids.cols);
      known = from.template allocate<KnownRow>(p.rows);
    }
  }
};

// Some rows of a call, and columns of them.
struct TargetPart {
  SweepJob own;              // the rows' logits and gradient, and their arrays
  RowMatrix teacher;         // their teacher's logits, if that is the target
  std::int64_t begin, rows;  // of the call's
};

class TargetSweeps {
 public:
  TargetSweeps(const Problem& problem, const LogitTransform* transform, const TargetArrays& arrays, int threads)
      : problem_(&problem),
        transform_(transform),
        arrays_(arrays),
        options_(problem.loss->info.make(make_context(problem))->target_options()),
        threads_(threads) {}

  // The rows' states, stats and sums, of all columns of the logits.
  void forward(Queue& queue, const TargetPart& part) const;
  // The sums, where the stats are there.
  void find_sums(Queue& queue, const TargetPart& part) const;
  // Of any columns.
  void backward(Queue& queue, const TargetPart& part) const;

 private:
  bool is_plain() const;
  TargetJob job(const TargetPart& part) const;
  void make_stats(Queue& queue, const TargetPart& part, const TargetJob& target) const;

  const Problem* problem_;
  const LogitTransform* transform_;
  TargetArrays arrays_;
  TargetOptions options_;
  int threads_;  // of a block that sweeps a row
};

}  // namespace tileloss::impl::cuda
