// What lies between the LM head's products and the sweeps: copies and roundings, a row a block; sums of columns.
#pragma once

#include "backends/cuda/device_api.h"
#include "core/row_state.h"
#include "losses/inputs.h"

namespace tileloss::impl::cuda {

// A matrix of the caller's, of any dtype and strides.
struct AnyMatrix {
  void* data = nullptr;
  tileloss_dtype dtype = TILELOSS_NONE;
  std::int64_t row_stride = 0, col_stride = 0;

  __device__ float get(std::int64_t i, std::int64_t j) const {
    const std::int64_t at = i * row_stride + j * col_stride;
    return visit_format(dtype, [&]<class T>(T /*format*/) { return to_float(load(static_cast<const T*>(data) + at)); });
  }
  // A row that is T's, side by side from a multiple of 16 bytes on; else null.
  template <class T>
  __device__ const T* row(std::int64_t i) const {
    const T* const at = static_cast<const T*>(data) + i * row_stride;
    const bool is_of_type = visit_format(dtype, []<class Own>(Own /*format*/) { return std::is_same_v<Own, T>; });
    return is_of_type && col_stride == 1 && reinterpret_cast<std::uintptr_t>(at) % 16 == 0 ? at : nullptr;
  }
  __device__ void set(std::int64_t i, std::int64_t j, float value) const {
    const std::int64_t at = i * row_stride + j * col_stride;
    visit_format(dtype, [&]<class T>(T /*format*/) { store(static_cast<T*>(data) + at, from_float<T>(value)); });
  }
};

// Rows of operands or sums, one after the other.
template <class T>
struct Rows {
  T* data = nullptr;
  std::int64_t stride = 0;

  __device__ T* row(std::int64_t i) const { return data + i * stride; }
};

// As the products see them; rows that are ignored are not read, and are 0. labels null: all are read.
template <class T>
__global__ void copy_rows(AnyMatrix from, Rows<T> to, std::int64_t columns, const std::int64_t* labels) {
  begin_kernel();
  const std::int64_t i = blockIdx.x;
  const bool is_read = labels == nullptr || labels[i] != kIgnoredRow;
  const T* const row = is_read ? from.row<T>(i) : nullptr;
  constexpr std::int64_t kAtOnce = 16 / sizeof(T);
  const std::int64_t at_once = row == nullptr ? 0 : columns / kAtOnce * kAtOnce;
  for (std::int64_t j = std::int64_t{threadIdx.x} * kAtOnce; j < at_once; j += std::int64_t{blockDim.x} * kAtOnce)
    store_16_bytes(to.row(i) + j, load(reinterpret_cast<const uint4*>(row + j)));
  for (std::int64_t j = at_once + threadIdx.x; j < columns; j += blockDim.x)
    store(to.row(i) + j, from_float<T>(is_read ? from.get(i, j) : 0.0f));
}

// The bias of the columns from `first` on, which products are added to.
static __global__ void fill_rows(AnyMatrix bias, std::int64_t first, Rows<float> to, std::int64_t columns) {
  begin_kernel();
  float* const row = to.row(blockIdx.x);
  for (std::int64_t j = threadIdx.x; j < columns; j += blockDim.x) store(row + j, bias.get(first + j, 0));
}

template <class T>
__global__ void round_rows(Rows<float> from, Rows<T> to, std::int64_t columns) {
  begin_kernel();
  const float* const row = from.row(blockIdx.x);
  for (std::int64_t j = threadIdx.x; j < columns; j += blockDim.x) store(to.row(blockIdx.x) + j, from_float<T>(load(row + j)));
}

// Sums to where the caller has them, or added to what is there: rounded once. 0 where a row is ignored; labels null: none is.
// from.data null: all are 0.
template <class T>
__global__ void store_rows(Rows<T> from, AnyMatrix to, std::int64_t columns, const std::int64_t* labels, bool adds) {
  begin_kernel();
  const std::int64_t i = blockIdx.x;
  const bool is_zero = from.data == nullptr || (labels != nullptr && labels[i] == kIgnoredRow);
  for (std::int64_t j = threadIdx.x; j < columns; j += blockDim.x) {
    const float sum = is_zero ? 0 : to_float(load(from.row(i) + j));
    to.set(i, j, adds ? to.get(i, j) + sum : sum);
  }
}

// sum_term(from, i, j), of what columns are added up of.
static __device__ __forceinline__ float sum_term(const Rows<float>& rows, std::int64_t i, std::int64_t j) {
  return load(rows.row(i) + j);
}

// sums[j] = the sum over i of sum_term(from, i, j), or added to what is there. Some warps share the rows of 32 columns: the order
// is that of the row's number.
inline constexpr int kSumWarps = 8;
template <class From>
__global__ void sum_columns(From from, std::int64_t rows, std::int64_t columns, double* sums, bool adds) {
  begin_kernel();
  using Parts = double[kSumWarps][kWarp];
  TILELOSS_SHARED(Parts, parts);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t j = std::int64_t{blockIdx.x} * kWarp + lane;
  double sum = 0;
  for (std::int64_t i = warp; j < columns && i < rows; i += kSumWarps) sum += sum_term(from, i, j);
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || j >= columns) return;
  double all = adds ? sums[j] : 0;
  for (int w = 0; w < kSumWarps; ++w) all += parts[w][lane];
  sums[j] = all;
}

struct StoreBias {
  const double* sums;  // null: all are 0
  tileloss_vector to;
  std::int64_t first;
  bool adds;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t j) const {
    const std::int64_t at = (first + j) * to.stride;
    const double before = adds ? static_cast<double>(load_number(to.data, to.dtype, at)) : 0;
    store_number(to.data, to.dtype, at, static_cast<float>(before + (sums == nullptr ? 0 : sums[j])));
  }
};

// A row's label as a column of a chunk.
struct FindInChunk {
  const std::int64_t* labels;
  std::int64_t* in_chunk;
  std::int64_t first, columns;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    const std::int64_t label = labels[i];
    const bool is_here = label >= first && label < first + columns;
    in_chunk[i] = label < 0 ? label : is_here ? label - first : kLabelElsewhere;
  }
};

struct WeightTerm {
  const float* weights;
  TILELOSS_HOST_DEVICE double operator()(std::int64_t j) const { return static_cast<double>(weights[j]); }
};
struct TakeWeight {
  double* sums;  // of all columns before a block; the next block's follows
  TILELOSS_HOST_DEVICE void operator()(double sum) const { sums[1] = sums[0] + sum; }
};

}  // namespace tileloss::impl::cuda
