// The rows of an LM head whose target is labels: what a forward leaves of a block of the vocabulary, a row a block of threads,
// and a chunk's gradient straight into the format that products see. Their serial parts are not here: blocks are merged, and a
// row's gradient is made of its statistics, once a call, a row a thread.
#ifndef TILELOSS_BACKENDS_CUDA_LINEAR_ROWS_H_
#define TILELOSS_BACKENDS_CUDA_LINEAR_ROWS_H_

#include "backends/cuda/linear_kernels.h"
#include "backends/cuda/linear_plan.h"
#include "backends/cuda/row_backward.h"

namespace tileloss::impl::cuda {

// A row's label as one of some columns from `first` on.
__device__ __forceinline__ std::int64_t label_from(std::int64_t label, std::int64_t first, std::int64_t columns) {
  if (label < 0) return label;
  return label >= first && label < first + columns ? label - first : kLabelElsewhere;
}

// A block of a loss that wants no other sums of rows without softcap. job.rows.label_columns are those of the call here.
static __global__ void __launch_bounds__(kMaxRowThreads, 2)
    forward_block(SweepJob job, std::int64_t first, BlockSums* sums, float* label_logits) {
  using Parts = float[kWarp * Seen<float, true>::kNumbers];
  TILELOSS_SHARED(Parts, parts);
  const std::int64_t i = blockIdx.x, label = label_from(job.rows.label_columns[i], first, job.columns);
  if (label == kIgnoredRow) return;
  const RowInMemory<float> row(job.logits.row<float>(i), job.columns);
  const Exponents<float, true> exponents(*job.transform);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  Seen<float, true> seen = see_slice(row, row, all_of<float>(job), label, exponents, job);
  seen.add_lanes(exponents);
  if (lane == 0) seen.save(parts + warp * seen.kNumbers);
  __syncthreads();
  if (warp > 0) return;
  seen = Seen<float, true>(exponents);
  if (lane < static_cast<int>(blockDim.x) / kWarp) seen.load(parts + lane * seen.kNumbers, exponents);
  seen.add_lanes(exponents);
  if (lane > 0) return;
  sums[i] = {seen.max, seen.sum};
  if (label >= 0) label_logits[i] = load(row.data + label);
}

// Each row's state, of those of its blocks in the order of the vocabulary.
struct MergeBlocks {
  const LogitTransform* transform;
  const std::int64_t* labels;
  RowState* to;
  std::int64_t rows, columns, vocab_block;
  const BlockSums* sums;  // [blocks, rows]; null: `states` are
  const float* label_logits;
  const RowState* states;
  const double* weights;  // of all columns before each block, and of all; null: a column weighs 1

  __device__ RowState block(std::int64_t b, std::int64_t i, std::int64_t first, std::int64_t count) const {
    if (sums == nullptr) return states[b * rows + i];
    const std::int64_t label = label_from(labels[i], first, count);
    Seen<float, true> seen{Exponents<float, true>(*transform)};
    const BlockSums& own = sums[b * rows + i];
    seen.max = own.max;
    seen.sum = own.sum;
    return or_nan(finish_state(seen, label >= 0, label >= 0 ? label_logits[i] : 0, 0, *transform), label);
  }
  __device__ void operator()(std::int64_t i) const {
    RowState all;
    for (std::int64_t first = 0, b = 0; labels[i] != kIgnoredRow && first < columns; first += vocab_block, ++b) {
      const std::int64_t count = min(vocab_block, columns - first);
      const double before = weights == nullptr ? static_cast<double>(first) : weights[b];
      const double own = weights == nullptr ? static_cast<double>(count) : weights[b + 1] - weights[b];
      const RowState next = block(b, i, first, count);
      all = b == 0 ? next : merge(all, before, next, own);
    }
    to[i] = all;
  }
};

// What a row's gradient is made of in every chunk. Without softcap: there the row's own largest logit would be asked for.
struct MakeGradients {
  SweepJob job;  // of all columns
  RowStates states;
  GradientRow* to;

  __device__ void operator()(std::int64_t i) const {
    if (job.rows.label_columns[i] == kIgnoredRow) return;
    const RowCoefficients c = job.rows.results[i].coefficients;
    const RowStats stats = make_row_stats(states[i], c.prob_logp != 0);
    to[i] = make_gradient<false>(c, job.rows.label_columns[i], 0, job, *job.transform, stats, -kInfinity);
  }
};

// dz of a chunk, of any of its columns. T: what it is rounded to, which decides how exact 2^t has to be.
template <class T, bool kIsPlain>
struct ChunkSlopes {
  SweepJob job;                  // job.rows.label_columns: the call's
  const GradientRow* gradients;  // of the job's rows
  std::int64_t first;            // the chunk's first column

  struct Row {
    GradientRow gradient;
    std::int64_t label;
    Exponents<T, kIsPlain> exponents;
    const float* z;
  };
  __device__ __forceinline__ Row row(std::int64_t i) const {
    const std::int64_t label = label_from(job.rows.label_columns[i], first, job.columns);
    Row row = {{}, label, Exponents<T, kIsPlain>(*job.transform), job.logits.row<float>(i)};
    if (label != kIgnoredRow) row.gradient = gradients[i];
    return row;
  }
  __device__ __forceinline__ float slope(const Row& row, float z, std::int64_t j) const {
    return j == row.label ? row.gradient.label : column_slope(row.gradient, z, j, row.exponents, job);
  }
  // As sum_columns reads it.
  __device__ __forceinline__ float at(std::int64_t i, std::int64_t j) const {
    const Row own = row(i);
    return own.label == kIgnoredRow ? 0 : slope(own, load(own.z + j), j);
  }
};

// Eight columns a thread at a time: rows of z, and of what is written, begin at multiples of 32 and 16 bytes.
template <class T, bool kIsPlain>
__global__ void __launch_bounds__(kMaxRowThreads, 2) backward_chunk(ChunkSlopes<T, kIsPlain> slopes, Rows<T> to) {
  constexpr int kColumns = 8;
  const SweepJob& job = slopes.job;
  T* const out = to.row(blockIdx.x);
  const auto row = slopes.row(blockIdx.x);
  if (row.label == kIgnoredRow) return write_zeros(out, 0, job, 0, 1);
  for (std::int64_t j = std::int64_t{threadIdx.x} * kColumns; j < job.columns; j += std::int64_t{blockDim.x} * kColumns) {
    const int count = static_cast<int>(min(job.columns - j, std::int64_t{kColumns}));
    float z[kColumns];
#pragma unroll
    for (int k = 0; k < kColumns; k += 4) {
      Group<float> x;
      if (count == kColumns) {
        x = Group<float>::unpacked(load(reinterpret_cast<const uint4*>(row.z + j + k)));
      } else {
        x = Group<float>::load_some(row.z + j + k, count - k);
      }
#pragma unroll
      for (int q = 0; q < 4; ++q) z[k + q] = k + q < count ? slopes.slope(row, x.values[q], j + k + q) : 0;
    }
#pragma unroll
    for (int k = 0; k < kColumns; k += Group<T>::kCount) {
      Group<T> x;
#pragma unroll
      for (int q = 0; q < Group<T>::kCount; ++q) x.values[q] = z[k + q];
      if (count == kColumns) {
        x.store(out + j + k);
      } else {
        x.store_some(out + j + k, count - k);
      }
    }
  }
}

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_LINEAR_ROWS_H_
