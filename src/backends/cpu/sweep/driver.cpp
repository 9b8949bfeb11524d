#include "backends/cpu/sweep/driver.h"

#include <cstring>

#include "backends/cpu/simd/storage_access.h"
#include "backends/cpu/sweep/row_blocks.h"

namespace tileloss::impl::cpu {
namespace {

// One thread's walk over the row blocks it gets hold of. A row's backward runs together with the next row's forward, so up to
// one row is pending.
class Worker {
 public:
  Worker(const SweepJob& job, RowVisitor& visitor, std::byte* scratch)
      : job_(job),
        visitor_(visitor),
        scratch_(scratch, job.schedule == TILELOSS_SCHEDULE_STASH, job.columns, job.vocab_block, job.transform.softcap > 0) {}

  void row(std::int64_t i) {
    if (job_.targets[i] == kIgnoredRow) {
      if (job_.dlogits != nullptr) clear(i, 0, job_.total_columns);
      visitor_.ignored(i);
      return;
    }
    if (job_.from_saved_state || job_.logits == nullptr) {
      const RowGradient g = visitor_.visit(i, visitor_.saved_state(i));
      if (job_.dlogits != nullptr) {
        set_pending(i, g);
        finish_pending(nullptr);
      }
      return;
    }
    ForwardRow forward = make_forward(i);
    if (pending_ >= 0 && job_.schedule == TILELOSS_SCHEDULE_STASH) {
      finish_pending(&forward);
    } else {
      job_.kernels->run[job_.storage](&forward, nullptr);
    }
    const RowGradient g = visitor_.visit(i, forward.state);
    if (job_.dlogits == nullptr) return;
    set_pending(i, g);
    if (job_.schedule != TILELOSS_SCHEDULE_STASH) finish_pending(nullptr);
  }

  void drain() {
    if (pending_ >= 0) finish_pending(nullptr);
  }

 private:
  const std::byte* logits(std::int64_t i) const {
    return static_cast<const std::byte*>(job_.logits) + offset(i, job_.logits_stride, job_.groups.logits_stride);
  }
  std::byte* dlogits(std::int64_t i) const {
    return static_cast<std::byte*>(job_.dlogits) + offset(i, job_.dlogits_stride, job_.groups.dlogits_stride);
  }
  std::int64_t offset(std::int64_t i, std::int64_t row_stride, std::int64_t group_stride) const {
    return row_offset(i, row_stride, job_.groups.rows, group_stride) * kElementBytes[job_.storage];
  }
  void clear(std::int64_t i, std::int64_t begin, std::int64_t end) const {
    const std::int64_t bytes = kElementBytes[job_.storage];
    if (end > begin) std::memset(dlogits(i) + begin * bytes, 0, static_cast<std::size_t>((end - begin) * bytes));
  }

  ForwardRow make_forward(std::int64_t i) const {
    ForwardRow f;
    f.x = logits(i);
    f.columns = job_.columns;
    f.target = job_.targets[i];
    f.vocab_block = scratch_.vocab_block;
    f.transform = job_.transform;
    f.sums = job_.sums;
    f.class_weights = job_.class_weights;
    f.stash = scratch_.stash;
    f.references = scratch_.references;
    f.operands = scratch_.operands;
    return f;
  }

  void set_pending(std::int64_t i, const RowGradient& g) {
    pending_ = i;
    const std::int64_t target = job_.targets[i];
    has_target_ = target >= 0;
    if (has_target_) {
      // Computed now: in place, the backward overwrites the logit.
      const double weight = job_.class_weights == nullptr ? 1 : job_.class_weights[target];
      const double slope = job_.transform.derivative(load_element(job_.storage, logits(i), target));
      target_gradient_ = static_cast<float>(target_gradient(g, weight) * slope);
    }
    backward_ = make_backward(g, job_.transform);
    backward_.x = logits(i);
    backward_.dx = dlogits(i);
    backward_.columns = job_.columns;
    backward_.vocab_block = scratch_.vocab_block;
    backward_.class_weights = job_.class_weights;
    backward_.stash = scratch_.stash;
    backward_.references = scratch_.references;
    backward_.operands = scratch_.operands;
    backward_.stream = job_.dlogits != job_.logits;
  }

  // The pending row's backward, with another row's forward in the same loop if there is one.
  void finish_pending(ForwardRow* next) {
    job_.kernels->run[job_.storage](next, &backward_);
    if (has_target_) store_element(job_.storage, dlogits(pending_), job_.targets[pending_], target_gradient_);
    clear(pending_, job_.columns, job_.total_columns);
    pending_ = -1;
  }

  const SweepJob& job_;
  RowVisitor& visitor_;
  const RowScratch scratch_;
  std::int64_t pending_ = -1;
  BackwardRow backward_;
  bool has_target_ = false;
  float target_gradient_ = 0;
};

}  // namespace

std::int64_t scratch_bytes(tileloss_schedule schedule, std::int64_t columns, std::int64_t vocab_block, bool has_softcap) {
  return RowScratch::bytes(schedule == TILELOSS_SCHEDULE_STASH, columns, vocab_block, has_softcap);
}

void run_sweeps(const SweepJob& job, RowVisitor& visitor, const tileloss_executor* executor) {
  const std::int64_t bytes = scratch_bytes(job.schedule, job.columns, job.vocab_block, job.transform.softcap > 0);
  walk_row_blocks(executor, job.threads, job.rows, job.row_block,
                  [&](std::int64_t slot) { return Worker(job, visitor, job.scratch + slot * bytes); });
}

}  // namespace tileloss::impl::cpu
