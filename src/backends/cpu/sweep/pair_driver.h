// Pairs of rows to threads, as backends/cpu/sweep/driver.h does rows: a forward over each of the two, their divergence, the
// visitor, the gradient, while all of it is in cache.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_PAIR_DRIVER_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_PAIR_DRIVER_H_

#include "backends/cpu/sweep/driver.h"

namespace tileloss::impl::cpu {

// Called once for every row, by any thread, in any order.
class PairVisitor {
 public:
  virtual ~PairVisitor() = default;
  virtual void ignored(std::int64_t row) = 0;
  virtual PairCoefficients coefficients(std::int64_t row) = 0;
  virtual void visit(std::int64_t row, const PairStats& stats) = 0;
  // Once its gradient is written, while it is in cache.
  virtual void finished(std::int64_t row) { static_cast<void>(row); }
};

// `student` says all but where and what the teacher's logits are. Its schedule, saved states and class weights are of no use.
struct PairJob {
  SweepJob student;
  const void* teacher_logits = nullptr;
  std::int64_t teacher_logits_stride = 0;  // elements
  LogitTransform teacher_transform;
  Divergence divergence;
};

// Per thread, a multiple of 64.
std::int64_t pair_scratch_bytes(std::int64_t columns, std::int64_t vocab_block, bool has_softcap);

void run_pairs(const PairJob& job, PairVisitor& visitor, const tileloss_executor* executor);

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_PAIR_DRIVER_H_
