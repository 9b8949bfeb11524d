// How many columns each row's softmax runs over: the kernel ahead of a call's sweeps, and of a forward's blocks.
#pragma once

#include "backends/cuda/allowed_columns.h"

namespace tileloss::impl::cuda {

// How many allowed columns each row has, and the sum of their class weights, where that is asked for; by a block a row. A label
// that is not among them is from now on as one of another shard: its logit is -inf, its own gradient 0.
static __global__ void __launch_bounds__(kMaxThreads) count_allowed(SweepJob job, bool sums_weights) {
  begin_kernel();
  using Counts = std::int32_t[kWarp];
  using Sums = double[kWarp];
  TILELOSS_SHARED(Counts, counts);
  TILELOSS_SHARED(Sums, sums);
  const std::int64_t i = blockIdx.x;
  const std::int64_t label = job.rows.label_columns[i];
  if (label == kIgnoredRow) {
    if (threadIdx.x == 0) job.rows.classes[i] = {0, 0};
    return;
  }
  const AllowedColumns<true> allowed(job, i);
  std::int32_t count = 0;
  double weight = 0;
  for (std::int64_t j = std::int64_t{threadIdx.x} * 32; j < job.columns; j += std::int64_t{blockDim.x} * 32) {
    std::uint32_t word = allowed.words == nullptr ? 0xffffffffu : load(allowed.words + j / 32);
    if (job.columns - j < 32) word &= (1u << (job.columns - j)) - 1;
    count += __popc(word);
    for (; sums_weights && word != 0; word &= word - 1) {
      const int lowest = __popc((word & -word) - 1);
      weight += static_cast<double>(job.weight(j + lowest));
    }
  }
  count = reduce_block(count, counts, 0, [](std::int32_t a, std::int32_t b) { return a + b; });
  if (sums_weights) weight = reduce_block(weight, sums, 0.0, [](double a, double b) { return a + b; });
  __syncthreads();  // all have read the label
  if (threadIdx.x != 0) return;
  job.rows.classes[i] = {static_cast<double>(count), sums_weights ? weight : static_cast<double>(count)};
  if (label >= 0 && !allowed.has(label)) job.rows.label_columns[i] = kLabelElsewhere;
}

}  // namespace tileloss::impl::cuda
