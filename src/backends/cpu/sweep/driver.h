// Rows to threads: runs the sweeps over all rows, with the visitor's row stage between a row's, while it is in cache. Knows no
// loss.
#pragma once

#include <tileloss/tileloss.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "backends/cpu/simd/storage_access.h"
#include "backends/cpu/sweep/allowed_set.h"
#include "backends/cpu/sweep/row_kernel.h"
#include "backends/cpu/sweep/row_visitor.h"

namespace tileloss::impl::cpu {

// What a sparse teacher knows of a row: columns, some of them perhaps negative, and their log q.
struct ColumnInput {
  const void* ids = nullptr;  // int64 or int32
  bool is_int64 = false;
  std::int64_t ids_row_stride = 0, ids_stride = 0;
  Operand logprobs;  // rows: rows
  std::int64_t count = 0;

  std::int64_t id(std::int64_t row, std::int64_t k) const {
    const std::int64_t at = row * ids_row_stride + k * ids_stride;
    return is_int64 ? static_cast<const std::int64_t*>(ids)[at] : static_cast<const std::int32_t*>(ids)[at];
  }
  float log_q(std::int64_t row, std::int64_t k) const {
    return load_element(logprobs.storage, logprobs.data, row * logprobs.row_stride + k * logprobs.k_stride);
  }
};

// What rows are compared with, besides their labels.
struct TargetInput {
  TargetKind kind = TargetKind::kLabels;
  TargetOptions options;
  std::optional<LogitTransform> label_transform;  // of the label's cross-entropy; none: the row's
  const void* data = nullptr;                     // a teacher's logits, or class probabilities
  std::int64_t stride = 0;                        // elements
  StorageType storage = kStorageFloat32;
  LogitTransform transform;            // of kLogits
  std::int64_t classes = 0;            // of kProbabilities: that label smoothing is over
  double outside = 0;                  // of kProbabilities: the weight of classes that are not allowed
  ColumnInput columns;                 // of kColumns
  const std::int64_t* rows = nullptr;  // those of the probabilities or columns that belong to the job's; null: the same
};

// What a thread's memory is to hold.
struct ScratchShape {
  TargetKind target = TargetKind::kLabels;
  bool has_stash = false;  // of a row compared with its label
  std::int64_t columns = 0, vocab_block = 0;
  bool has_softcap = false;  // of the rows or the teacher's
  std::int64_t known_columns = 0;
  std::int64_t labels_per_row = 0;  // where these are several
  // For rows of which some columns alone are allowed: elements of the rows and of what they are compared with.
  bool has_allowed = false, has_class_weights = false;
  std::int64_t element_bytes = 4, target_bytes = 0;

  std::int64_t bytes() const;  // a multiple of 64
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
  tileloss_row_groups groups{};  // groups.rows > 0: of rows, each group at a stride of its own
  LogitTransform transform;
  std::uint32_t sums = kNoSums;
  const float* class_weights = nullptr;         // of column 0; null: 1
  const std::int64_t* label_columns = nullptr;  // [rows], or kIgnoredRow or kLabelElsewhere
  AllowedSets allowed;
  std::int64_t labels_per_row = 0;  // where these are several: the row visitor has their columns
  TargetInput target;
  int threads = 1;
  std::int64_t row_block = 1;
  ScratchShape shape;
  std::byte* scratch = nullptr;  // shape.bytes() for each thread
};

void run_sweeps(const SweepJob& job, RowVisitor& visitor, const tileloss_executor* executor);

}  // namespace tileloss::impl::cpu
