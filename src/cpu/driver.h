// Rows to threads: runs the sweeps over all rows in one of the schedules. Knows no loss; what happens between a row's forward and
// its backward is the visitor's.
#ifndef TILELOSS_CPU_DRIVER_H_
#define TILELOSS_CPU_DRIVER_H_

#include <tileloss/tileloss.h>

#include <cstddef>
#include <cstdint>

#include "core/row_coefficients.h"
#include "core/row_stats.h"
#include "cpu/row_kernel.h"

namespace tileloss::cpu {

inline constexpr std::int64_t kIgnoredRow = -2;
inline constexpr std::int64_t kTargetElsewhere = -1;  // another shard of the vocabulary holds the label

struct RowGradient {
  RowStats stats;
  RowCoefficients coefficients;
};

// Called once for every row, by any thread, in any order.
class RowVisitor {
 public:
  virtual ~RowVisitor() = default;
  virtual void ignored(std::int64_t row) = 0;
  // With the state from this call's forward, or from an earlier one's.
  virtual RowGradient visit(std::int64_t row, const RowState& state) = 0;
  virtual RowState saved_state(std::int64_t row) const = 0;
};

struct SweepJob {
  const KernelTable* kernels = nullptr;
  StorageType storage = kStorageFloat32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;        // valid ones
  std::int64_t total_columns = 0;  // with padding: its gradient is 0
  const void* logits = nullptr;    // null: no forward, no backward (the row stage alone)
  std::int64_t logits_stride = 0;  // elements
  void* dlogits = nullptr;         // null: no backward
  std::int64_t dlogits_stride = 0;
  bool from_saved_state = false;
  LogitTransform transform;
  std::uint32_t sums = kNoSums;
  const float* class_weights = nullptr;   // of column 0; null: 1
  const std::int64_t* targets = nullptr;  // [rows] column of the label, kIgnoredRow or kTargetElsewhere
  tileloss_schedule schedule = TILELOSS_SCHEDULE_SWEEPS;
  int threads = 1;
  std::int64_t row_block = 1;
  std::int64_t vocab_block = 0;
  std::byte* scratch = nullptr;  // threads * scratch_bytes(...)
};

// Per thread, a multiple of 64.
std::int64_t scratch_bytes(tileloss_schedule schedule, std::int64_t columns, std::int64_t vocab_block);

void run_sweeps(const SweepJob& job, RowVisitor& visitor, const tileloss_executor* executor);

}  // namespace tileloss::cpu

#endif  // TILELOSS_CPU_DRIVER_H_
