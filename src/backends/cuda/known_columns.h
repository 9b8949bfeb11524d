// The columns that a sparse teacher knows of a row. They are computed one by one in double; the mass of the others is a sum over
// them, and not what 1 has left.
#pragma once

#include "backends/cuda/row_forward.h"
#include "core/columns.h"
#include "losses/inputs.h"

namespace tileloss::impl::cuda {

struct KnownRow {
  KnownColumns columns;
  double max = 0;       // of the row, to all digits
  double log_mass = 0;  // of the columns that are not known: the logarithm of their sum of exp(z - max)
};

// The rows' maximum and their other columns' mass, by a block a row that reads it once: piece by piece, for each of which it is
// first marked which columns are known.
template <class T, bool kIsPlain>
__global__ void __launch_bounds__(kMaxThreads, 1) sweep_other_columns(SweepJob job, tileloss_matrix ids, KnownRow* known) {
  begin_kernel();
  constexpr int kCount = Group<T>::kCount;
  constexpr std::int64_t kPiece = 16384;
  using Marks = int[kPiece / 32];  // a bit a column
  using Parts = float[kWarp];
  TILELOSS_SHARED(Marks, marks);
  TILELOSS_SHARED(Parts, parts);
  const std::int64_t i = blockIdx.x;
  const std::int64_t label = job.rows.label_columns[i];
  if (label == kIgnoredRow || label == kBadLabel) return;
  const T* const row = job.logits.row<T>(i);
  const LogitTransform transform = *job.transform;
  const Exponents<T, kIsPlain> exponents(transform);
  Seen<T, kIsPlain> seen(exponents);
  const AllowedColumns<true> allowed(job, i);
  allowed.prefetch(0, job.columns);
  float largest = -kInfinity;  // of the known ones
#pragma unroll 1
  for (std::int64_t start = 0; start < job.columns; start += kPiece) {
    const std::int64_t n = job.columns - start < kPiece ? job.columns - start : kPiece;
    __syncthreads();
    for (std::int64_t j = threadIdx.x; j < kPiece / 32; j += blockDim.x) marks[j] = 0;
    __syncthreads();
    for (std::int64_t k = threadIdx.x; k < ids.cols; k += blockDim.x) {
      const std::int64_t at = integer_at(ids, i, k) - start;
      if (at < 0 || at >= n || !allowed.has(start + at)) continue;
      atomicOr(&marks[at / 32], static_cast<int>(1u << (at % 32)));
      largest = max_nan(largest, to_float(load(row + start + at)));
    }
    __syncthreads();
    const auto add = [&](int g, const Group<T>& x, int count) {
      const int first = g * kCount;
      const unsigned known_ones = static_cast<unsigned>(marks[first / 32]) >> (first % 32);
      const unsigned in = allowed.template bits<kCount>(static_cast<int>(start / kCount) + g) & ~known_ones;
#pragma unroll
      for (int q = 0; q < kCount; ++q) {
        if (q >= count || (in >> q & 1) == 0) continue;
        const float max = max_nan(seen.max, x.values[q]);
        if (!(max == seen.max)) seen.move_to(max, exponents);
        seen.sum += exponents.power(x.values[q], seen.top).e;
      }
    };
    for_each_group<T>(
        row + start, n, is_aligned_to_16(row), [&](int g, const Group<T>& x) { add(g, x, kCount); }, add);
  }
  const auto max_of = [&](float x) { return reduce_block(x, parts, -kInfinity, [](float a, float b) { return max_nan(a, b); }); };
  const float max = max_of(seen.max);
  largest = max_nan(max, max_of(largest));
  if (!(max == seen.max)) seen.move_to(max, exponents);
  const float sum = reduce_block(static_cast<float>(seen.sum), parts, 0.0f, [](float a, float b) { return a + b; });
  if (threadIdx.x != 0) return;
  known[i].max = transform.exact_value(largest);
  known[i].log_mass = transform.exact_value(max) - known[i].max + std::log(static_cast<double>(sum));
}

// The divergence from the known columns, with what the gradient needs of them.
struct Diverge {
  device::RowArrays rows;
  RowMatrix logits;
  tileloss_dtype storage;
  tileloss_matrix ids, logprobs;
  const LogitTransform* transform;
  TargetOptions options;
  AllowedRows allowed;
  KnownColumn* columns;  // [rows, K]
  KnownRow* known;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    if (rows.label_columns[i] == kIgnoredRow || rows.label_columns[i] == kBadLabel) return;
    KnownColumn* const first = columns + i * ids.cols;
    std::int64_t count = 0;
    for (std::int64_t k = 0; k < ids.cols; ++k) {
      const std::int64_t id = integer_at(ids, i, k);
      if (id < 0 || !allowed.has(i, id)) continue;  // one that is not has no p, and counts as if the teacher had no q
      const float logit = load_number(logits.data, storage, logits.offset(i) + id);
      KnownColumn& c = first[count++] = {};
      c.column = id;
      c.z = transform->exact_value(logit);
      c.derivative = transform->derivative(logit);
      c.log_q = number_at(logprobs, i, k);
    }
    KnownRow& row = known[i];
    row.columns = {first, count};
    TargetStats& stats = rows.stats[i];
    row.columns.diverge(options, row.max, stats, [&] { return row.log_mass - stats.log_sum; });
  }
};

}  // namespace tileloss::impl::cuda
