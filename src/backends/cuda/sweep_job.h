// What the sweeps' kernels are given.
#pragma once

#include "backends/cuda/device_api.h"
#include "backends/device/row_kernels.h"
#include "core/logit_transform.h"
#include "core/row_offset.h"

namespace tileloss::impl::cuda {

// Rows of logits or of their gradient.
struct RowMatrix {
  void* data = nullptr;
  std::int64_t row_stride = 0, group_rows = 0, group_stride = 0;

  // Elements before it.
  TILELOSS_HOST_DEVICE std::int64_t offset(std::int64_t i) const { return row_offset(i, row_stride, group_rows, group_stride); }
  template <class T>
  __device__ T* row(std::int64_t i) const {
    return static_cast<T*>(data) + offset(i);
  }
};

inline RowMatrix row_matrix(const tileloss_matrix& m, std::int64_t group_rows, std::int64_t group_stride) {
  return {m.data, m.row_stride, group_rows, group_stride};
}

struct SweepJob {
  RowMatrix logits, dlogits;
  std::int64_t columns = 0, total_columns = 0;  // valid ones, and with the padding, whose gradient is 0
  std::int64_t first_column = 0;                // of the whole vocabulary
  int slices = 1;                               // that a row is cut into: blocks of the cluster that could hold it
  std::uint32_t sums = 0;                       // RowSums that the forward gathers
  const LogitTransform* transform = nullptr;    // on the device
  const float* class_weights = nullptr;         // of column 0; null: 1
  device::RowArrays rows;
  float* largest = nullptr;  // not null: a row's largest logit, as it lies in memory, which the forward writes
  AllowedRows allowed;

  __device__ float weight(std::int64_t column) const { return class_weights == nullptr ? 1 : load(class_weights + column); }
};

}  // namespace tileloss::impl::cuda
