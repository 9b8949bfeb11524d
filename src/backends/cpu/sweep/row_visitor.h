// What the drivers call between a row's forward and its backward.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_ROW_VISITOR_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_ROW_VISITOR_H_

#include <cstdint>

#include "backends/cpu/sweep/row_gradient.h"

namespace tileloss::impl::cpu {

// Called once for every row, by any thread, in any order.
class RowVisitor {
 public:
  virtual ~RowVisitor() = default;
  virtual void ignored(std::int64_t row) = 0;
  // With the state from this call's forward, or from an earlier one's.
  virtual RowGradient visit(std::int64_t row, const RowState& state) = 0;
  virtual RowState saved_state(std::int64_t row) const = 0;
  // Of a shard of the vocabulary, between forward and backward: each row's state, and once all of them are there the merge with
  // the others', after which saved_state() gives the whole vocabulary's. False: it failed, and the call is over.
  virtual void hand_over(std::int64_t row, const RowState& state) = 0;
  virtual bool merge_shards() = 0;
};

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_ROW_VISITOR_H_
