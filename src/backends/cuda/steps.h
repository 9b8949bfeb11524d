// The row stage's steps as kernels: a step an index, sums in a fixed order, a sort.
#pragma once

#include <algorithm>

#include "backends/cuda/device_api.h"
#include "backends/cuda/runtime.h"

namespace tileloss::impl::cuda {

// Threads of a block, for so many indices.
inline int step_threads(std::int64_t count) { return count > kWarp ? 128 : kWarp; }
inline std::int64_t step_blocks(std::int64_t count) { return (count + step_threads(count) - 1) / step_threads(count); }

template <class Step>
__global__ void each_index(Step step, std::int64_t count) {
  begin_kernel();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) step(i);
}

struct NoStep {
  TILELOSS_HOST_DEVICE void operator()(std::int64_t) const {}
};

template <class Step>
void launch_each(Queue& queue, std::int64_t count, const Step& step) {
  queue.launch(each_index<Step>, step_blocks(count), step_threads(count), step, count);
}

// What the blocks of a sum share.
struct SumParts {
  static constexpr std::int64_t kMostBlocks = 512;
  double* of_blocks;     // kMostBlocks of them
  std::uint32_t* ended;  // how many of them are there; 0 before and after
};

// step(i) for each i, then take(sum of term(i)), by the block that ends last. The order of the terms depends on their number
// alone.
template <class Step, class Term, class Take>
__global__ void each_then_sum(Step step, Term term, Take take, std::int64_t count, SumParts all) {
  begin_kernel();
  using Parts = double[kWarp];
  TILELOSS_SHARED(Parts, parts);
  TILELOSS_SHARED(bool, is_last);
  const auto add = [](double a, double b) { return a + b; };
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  double sum = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    step(i);
    sum += term(i);
  }
  sum = reduce_block(sum, parts, 0.0, add);
  if (threadIdx.x == 0) {
    all.of_blocks[blockIdx.x] = sum;
    __threadfence();
    is_last = atomicAdd(all.ended, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  sum = 0;
  for (unsigned k = threadIdx.x; k < gridDim.x; k += blockDim.x) sum += all.of_blocks[k];
  sum = reduce_block(sum, parts, 0.0, add);
  if (threadIdx.x != 0) return;
  *all.ended = 0;
  take(sum);
}

template <class Step, class Term, class Take>
void launch_each_then_sum(Queue& queue, std::int64_t count, const Step& step, const Term& term, const Take& take,
                          const SumParts& parts) {
  const std::int64_t blocks = std::clamp<std::int64_t>(step_blocks(count), 1, SumParts::kMostBlocks);
  queue.launch(each_then_sum<Step, Term, Take>, blocks, step_threads(count), step, term, take, count, parts);
}

// take(the first i for which test(i)), if there is any; by one block.
template <class Test, class Take>
__global__ void __launch_bounds__(kMaxThreads) find_first(Test test, Take take, std::int64_t count) {
  begin_kernel();
  using Parts = std::int64_t[kWarp];
  TILELOSS_SHARED(Parts, parts);
  std::int64_t first = threadIdx.x;
  while (first < count && !test(first)) first += blockDim.x;
  first = reduce_block(first, parts, count, [](std::int64_t a, std::int64_t b) { return a < b ? a : b; });
  if (threadIdx.x == 0 && first < count) take(first);
}

// Ascending, by one block: a bitonic sort whose comparisons all point one way, so that what is missing to a power of two counts
// as infinity and is never touched.
template <class Number>
__global__ void __launch_bounds__(kMaxThreads) sort_ascending(Number* values, std::int64_t count) {
  begin_kernel();
  const auto put_in_order = [&](std::int64_t low, std::int64_t high) {
    if (high >= count || !(values[high] < values[low])) return;
    const Number larger = values[low];
    values[low] = values[high];
    values[high] = larger;
  };
  std::int64_t size = 1;
  while (size < count) size *= 2;
  for (std::int64_t run = 2; run <= size; run *= 2) {
    for (std::int64_t reach = run / 2; reach > 0; reach /= 2) {
      __syncthreads();
      for (std::int64_t k = threadIdx.x; k < size / 2; k += blockDim.x) {
        const std::int64_t low = k / reach * 2 * reach + k % reach;
        // Two sorted runs are first compared from their outer ends inwards.
        const std::int64_t high = reach == run / 2 ? low / run * run + run - 1 - low % run : low + reach;
        put_in_order(low, high);
      }
    }
  }
}

}  // namespace tileloss::impl::cuda
