#include "backends/cpu/sweep/driver.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "backends/cpu/simd/storage_access.h"
#include "backends/cpu/threads/executor.h"
#include "backends/cpu/threads/floating_point.h"

namespace tileloss::impl::cpu {
namespace {

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }
std::int64_t stash_bytes(std::int64_t columns) { return round_up(columns, 64) * 4; }
// Of the whole row where that is shorter.
std::int64_t used_block(std::int64_t columns, std::int64_t vocab_block) { return std::min(vocab_block, round_up(columns, 64)); }
std::int64_t operand_bytes(std::int64_t columns, std::int64_t vocab_block, bool has_softcap) {
  return operand_floats(has_softcap, used_block(columns, vocab_block)) * 4;
}

// One thread's walk over the row blocks it gets hold of. A row's backward runs together with the next row's forward, so up to
// one row is pending.
class Worker {
 public:
  Worker(const SweepJob& job, RowVisitor& visitor, std::byte* scratch)
      : job_(job), visitor_(visitor), vocab_block_(used_block(job.columns, job.vocab_block)) {
    if (job.transform.softcap > 0) {
      operands_ = reinterpret_cast<float*>(scratch);
      scratch += operand_bytes(job.columns, job.vocab_block, true);
    }
    if (job.schedule == TILELOSS_SCHEDULE_STASH) {
      stash_ = reinterpret_cast<float*>(scratch);
      references_ = reinterpret_cast<double*>(scratch + stash_bytes(job.columns));
    }
  }

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
    const std::int64_t group = job_.groups.rows > 0 ? i / job_.groups.rows : 0;
    return (group * group_stride + (i - group * job_.groups.rows) * row_stride) * kElementBytes[job_.storage];
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
    f.vocab_block = vocab_block_;
    f.transform = job_.transform;
    f.sums = job_.sums;
    f.class_weights = job_.class_weights;
    f.stash = stash_;
    f.references = references_;
    f.operands = operands_;
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
    backward_.vocab_block = vocab_block_;
    backward_.class_weights = job_.class_weights;
    backward_.stash = stash_;
    backward_.references = references_;
    backward_.operands = operands_;
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
  const std::int64_t vocab_block_;
  float* operands_ = nullptr;
  float* stash_ = nullptr;
  double* references_ = nullptr;
  std::int64_t pending_ = -1;
  BackwardRow backward_;
  bool has_target_ = false;
  float target_gradient_ = 0;
};

struct Shared {
  const SweepJob* job;
  RowVisitor* visitor;
  std::atomic<std::int64_t> next{0};
};

void work(void* data, std::int64_t slot) {
  auto& shared = *static_cast<Shared*>(data);
  const SweepJob& job = *shared.job;
  const FloatingPointScope scope;
  const std::int64_t bytes = scratch_bytes(job.schedule, job.columns, job.vocab_block, job.transform.softcap > 0);
  Worker worker(job, *shared.visitor, job.scratch + slot * bytes);
  const std::int64_t blocks = (job.rows + job.row_block - 1) / job.row_block;
  for (std::int64_t b = shared.next.fetch_add(1); b < blocks; b = shared.next.fetch_add(1)) {
    const std::int64_t end = std::min(job.rows, (b + 1) * job.row_block);
    for (std::int64_t i = b * job.row_block; i < end; ++i) worker.row(i);
  }
  worker.drain();
}

}  // namespace

std::int64_t scratch_bytes(tileloss_schedule schedule, std::int64_t columns, std::int64_t vocab_block, bool has_softcap) {
  const std::int64_t operands = operand_bytes(columns, vocab_block, has_softcap);
  if (schedule != TILELOSS_SCHEDULE_STASH) return operands;
  const std::int64_t blocks = (columns + vocab_block - 1) / vocab_block;
  return operands + stash_bytes(columns) + round_up(blocks * 8, 64);
}

void run_sweeps(const SweepJob& job, RowVisitor& visitor, const tileloss_executor* executor) {
  Shared shared{&job, &visitor};
  parallel_for(executor, job.threads, &work, &shared);
}

}  // namespace tileloss::impl::cpu
