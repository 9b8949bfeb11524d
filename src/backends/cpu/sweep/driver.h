// Rows to threads: runs the sweeps over all rows in one of the schedules. Knows no loss; what happens between a row's forward and
// its backward is the visitor's.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_DRIVER_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_DRIVER_H_

#include <tileloss/tileloss.h>

#include <cstddef>
#include <cstdint>

#include "backends/cpu/sweep/row_kernel.h"
#include "backends/cpu/sweep/row_visitor.h"

namespace tileloss::impl::cpu {

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
  tileloss_row_groups groups{};  // groups.rows > 0: of rows, each group at a stride of its own
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
std::int64_t scratch_bytes(tileloss_schedule schedule, std::int64_t columns, std::int64_t vocab_block, bool has_softcap);

void run_sweeps(const SweepJob& job, RowVisitor& visitor, const tileloss_executor* executor);

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_DRIVER_H_
