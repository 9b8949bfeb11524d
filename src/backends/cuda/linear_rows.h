// The rows of an LM head whose target is labels: what a forward leaves of a block of the vocabulary, a row a block of threads,
// and a chunk's gradient straight into the format that products see. Their serial parts are not here: blocks are merged, and a
// row's gradient is made of its statistics, once a call, a row a thread.
#pragma once

#include "backends/cuda/kept_words.h"
#include "backends/cuda/label_slots.h"
#include "backends/cuda/linear_kernels.h"
#include "backends/cuda/linear_plan.h"
#include "backends/cuda/row_backward.h"

namespace tileloss::impl::cuda {

// A row's label as one of some columns from `first` on.
__device__ __forceinline__ std::int64_t label_from(std::int64_t label, std::int64_t first, std::int64_t columns) {
  if (label < 0) return label;
  return label >= first && label < first + columns ? label - first : kLabelElsewhere;
}

// Rows of the workspace are taken eight columns a thread at a time: they begin at multiples of 16 bytes.
inline constexpr int kColumnsAtOnce = 8;
// visit(j, how many)
template <class Visit>
__device__ __forceinline__ void for_each_eight(std::int64_t columns, Visit&& visit) {
  for (std::int64_t j = std::int64_t{threadIdx.x} * kColumnsAtOnce; j < columns; j += std::int64_t{blockDim.x} * kColumnsAtOnce)
    visit(j, static_cast<int>(min(columns - j, std::int64_t{kColumnsAtOnce})));
}
__device__ __forceinline__ void load_eight(const float* from, int count, float (&to)[kColumnsAtOnce]) {
#pragma unroll
  for (int k = 0; k < kColumnsAtOnce; k += 4) {
    const Group<float> x = count == kColumnsAtOnce ? Group<float>::unpacked(load(reinterpret_cast<const uint4*>(from + k)))
                                                   : Group<float>::load_some(from + k, count - k);
#pragma unroll
    for (int q = 0; q < 4; ++q) to[k + q] = x.values[q];
  }
}
__device__ __forceinline__ void load_eight(const std::uint16_t* from, int count, float (&to)[kColumnsAtOnce]) {
  if (count == kColumnsAtOnce) {
    const uint4 w = load(reinterpret_cast<const uint4*>(from));
    const std::uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int k = 0; k < kColumnsAtOnce; ++k) to[k] = static_cast<float>(words[k / 2] >> k % 2 * 16 & 0xffff);
  } else {
#pragma unroll
    for (int k = 0; k < kColumnsAtOnce; ++k) to[k] = k < count ? static_cast<float>(load(from + k)) : 0;
  }
}

// What is multiplied of a side of the head, where the caller has it. Without a side the width is 0.
struct Factors {
  AnyMatrix hidden, head;
  std::int64_t width;
};

// A slot's logit, by a warp: a hidden state times a row of the head, both as products see them, and of its low-rank part.
inline constexpr int kSlotWarps = 8;
template <class T>
__global__ void multiply_labels(LabelColumns labels, device::RowArrays rows, std::int64_t slots, Factors own, Factors low_rank,
                                AnyMatrix bias) {
  begin_kernel();
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t n = std::int64_t{blockIdx.x} * kSlotWarps + warp, i = n / rows.slots.count;
  if (n >= slots || !has_slots(rows, i)) return;
  const std::int64_t column = labels.at(i, n % rows.slots.count);
  if (column < 0) return;
  const auto as_seen = [](float x) { return to_float(from_float<T>(x)); };
  float part = 0;
  const auto add = [&](const Factors& side) {
    for (std::int64_t h = lane; h < side.width; h += kWarp)
      part += as_seen(side.hidden.get(i, h)) * as_seen(side.head.get(column, h));
  };
  add(own);
  add(low_rank);
  double sum = part;
#pragma unroll
  for (int k = kWarp / 2; k > 0; k /= 2) sum += __shfl_xor_sync(kAllLanes, sum, k);
  if (lane == 0) rows.slots.logits[n] = static_cast<float>(sum) + (bias.data == nullptr ? 0 : bias.get(column, 0));
}

// Where a block's rows leave what they are; its first column.
struct ForwardPart {
  std::int64_t first;
  BlockSums* sums;
  float* label_logits;  // null: not wanted
};

// A block of rows without softcap. job.rows.label_columns are those of the call here. kKeeps: its words, too.
template <bool kKeeps, bool kMayBeMasked>
__global__ void __launch_bounds__(kMaxRowThreads, 2) forward_block(SweepJob job, ForwardPart part, Rows<std::uint16_t> words) {
  begin_kernel();
  using Parts = float[kWarp * Seen<float, true>::kNumbers];
  TILELOSS_SHARED(Parts, parts);
  const std::int64_t i = blockIdx.x, label = label_from(job.rows.label_columns[i], part.first, job.columns);
  if (label == kIgnoredRow) return;
  const RowInMemory<float, kMayBeMasked> row(job, i);
  const Exponents<float, true> exponents(*job.transform);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  Seen<float, true> seen = see_slice(row, row, all_of<float>(job), label, exponents, job);
  seen.add_lanes(exponents);
  if (lane == 0) seen.save(parts + warp * seen.kNumbers);
  __syncthreads();
  if (!kKeeps && warp > 0) return;
  seen = Seen<float, true>(exponents);
  if (lane < static_cast<int>(blockDim.x) / kWarp) seen.load(parts + lane * seen.kNumbers, exponents);
  seen.add_lanes(exponents);
  if (threadIdx.x == 0) {
    part.sums[i] = {seen.max, static_cast<float>(seen.sum)};
    if (label >= 0 && part.label_logits != nullptr) part.label_logits[i] = load(row.data + label);
  }
  if constexpr (kKeeps) {
    std::uint16_t* const to = words.row(i);
    const float steps = exponents.scale * kStepsOfExponent;
    for_each_eight(job.columns, [&](std::int64_t j, int count) {
      float z[kColumnsAtOnce];
      std::uint32_t all[kColumnsAtOnce];
      load_eight(row.data + j, count, z);
      const unsigned in = row.allowed.template bits<kColumnsAtOnce>(static_cast<int>(j / kColumnsAtOnce));
#pragma unroll
      for (int k = 0; k < kColumnsAtOnce; ++k) all[k] = (in >> k & 1) == 0 ? 0 : word_of(z[k], seen.max, steps);
      if (count == kColumnsAtOnce) {
        store_16_bytes(to + j, {all[0] | all[1] << 16, all[2] | all[3] << 16, all[4] | all[5] << 16, all[6] | all[7] << 16});
      } else {
#pragma unroll
        for (int k = 0; k < kColumnsAtOnce; ++k) {
          if (k < count) store(to + j + k, static_cast<std::uint16_t>(all[k]));
        }
      }
    });
  }
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
  const double* weights;      // of all columns before each block, and of all; null: a column weighs 1
  const RowClasses* classes;  // [blocks, rows]: the allowed columns of each block; null: all are, or nobody asks for weights

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
    double seen = 0;  // by weight, where there are classes
    for (std::int64_t first = 0, b = 0; labels[i] != kIgnoredRow && first < columns; first += vocab_block, ++b) {
      const std::int64_t count = min(vocab_block, columns - first);
      const double before = classes != nullptr ? seen : weights == nullptr ? static_cast<double>(first) : weights[b];
      const double own = classes != nullptr   ? classes[b * rows + i].weight
                         : weights == nullptr ? static_cast<double>(count)
                                              : weights[b + 1] - weights[b];
      seen += own;
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

// dz of a chunk, of any of its columns.
struct ChunkSlopes {
  SweepJob job;                       // job.rows.label_columns: the call's
  const GradientRow* gradients;       // of the job's rows
  std::int64_t first;                 // the chunk's first column
  const BlockSums* blocks = nullptr;  // of words: of the job's rows, in the block that the chunk is of
};

// From z. T: what it is rounded to, which decides how exact 2^t has to be.
template <class T, bool kIsPlain>
struct SlopesOfLogits : ChunkSlopes {
  using To = T;
  using From = float;
  struct Row {
    Exponents<T, kIsPlain> exponents;
    GradientRow gradient;
  };
  __device__ __forceinline__ Row row(std::int64_t i) const { return {Exponents<T, kIsPlain>(*job.transform), gradients[i]}; }
  __device__ __forceinline__ float slope(const Row& row, float z, std::int64_t j) const {
    return column_slope(row.gradient, z, j, row.exponents, job);
  }
};

// From words.
struct SlopesOfWords : ChunkSlopes {
  using To = Bfloat16;
  using From = std::uint16_t;
  struct Row {
    GradientRow gradient;
    float base, max, steps;
  };
  __device__ __forceinline__ Row row(std::int64_t i) const {
    const GradientRow& g = gradients[i];
    const float scale = job.transform->exponent_scale, max = blocks[i].max;
    return {g, base_of_words((max - static_cast<float>(g.top)) * scale), max, scale * kStepsOfExponent};
  }
  __device__ __forceinline__ float slope(const Row& row, float word, std::int64_t /*j*/) const {
    return exp2_approx(exponent_of(word, row.base)) * row.gradient.prob;
  }
};
// From z, as if it had been kept as words.
struct SlopesAsOfWords : SlopesOfWords {
  using From = float;
  __device__ __forceinline__ float slope(const Row& row, float z, std::int64_t j) const {
    return SlopesOfWords::slope(row, static_cast<float>(word_of(z, row.max, row.steps)), j);
  }
};

template <class Slopes>
__device__ __forceinline__ float sum_term(const Slopes& slopes, std::int64_t i, std::int64_t j) {
  const std::int64_t label = label_from(slopes.job.rows.label_columns[i], slopes.first, slopes.job.columns);
  if (label == kIgnoredRow) return 0;
  if (j == label) return slopes.gradients[i].label;
  if (!AllowedColumns<true>(slopes.job, i, true).has(j)) return 0;
  return slopes.slope(slopes.row(i), static_cast<float>(load(slopes.job.logits.template row<typename Slopes::From>(i) + j)), j);
}

template <class Slopes, bool kMayBeMasked>
__global__ void __launch_bounds__(kMaxRowThreads, 2) backward_chunk(Slopes slopes, Rows<typename Slopes::To> to) {
  begin_kernel();
  using T = typename Slopes::To;
  const SweepJob& job = slopes.job;
  const std::int64_t i = blockIdx.x, label = label_from(job.rows.label_columns[i], slopes.first, job.columns);
  T* const out = to.row(i);
  if (label == kIgnoredRow) return write_zeros(out, 0, job, 0, 1);
  const typename Slopes::From* const from = job.logits.template row<typename Slopes::From>(i);
  const auto row = slopes.row(i);
  const AllowedColumns<kMayBeMasked> allowed(job, i, true);
  for_each_eight(job.columns, [&](std::int64_t j, int count) {
    float x[kColumnsAtOnce];
    load_eight(from + j, count, x);
    const unsigned in = allowed.template bits<kColumnsAtOnce>(static_cast<int>(j / kColumnsAtOnce));
#pragma unroll
    for (int k = 0; k < kColumnsAtOnce; ++k) {
      if (k >= count) continue;
      x[k] = j + k == label ? row.gradient.label : slopes.slope(row, x[k], j + k);
      if ((in >> k & 1) == 0) x[k] = 0;
    }
#pragma unroll
    for (int k = 0; k < kColumnsAtOnce; k += Group<T>::kCount) {
      Group<T> all;
#pragma unroll
      for (int q = 0; q < Group<T>::kCount; ++q) all.values[q] = x[k + q];
      if (count == kColumnsAtOnce) {
        all.store(out + j + k);
      } else {
        all.store_some(out + j + k, count - k);
      }
    }
  });
}

}  // namespace tileloss::impl::cuda
