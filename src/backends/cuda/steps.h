// The row stage's steps as kernels: a step an index, sums in a fixed order, a sort.
#ifndef TILELOSS_BACKENDS_CUDA_STEPS_H_
#define TILELOSS_BACKENDS_CUDA_STEPS_H_

#include "backends/cuda/device_api.h"
#include "backends/cuda/runtime.h"

namespace tileloss::impl::cuda {

template <class Step>
__global__ void each_index(Step step, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) step(i);
}

template <class Step>
void launch_each(Queue& queue, std::int64_t count, const Step& step) {
  constexpr int kThreads = 128;
  queue.launch(each_index<Step>, (count + kThreads - 1) / kThreads, count > kWarp ? kThreads : kWarp, step, count);
}

// By one block; the order of the terms depends on their number alone.
template <class Term, class Take>
__global__ void __launch_bounds__(kMaxThreads) sum_terms(Term term, Take take, std::int64_t count) {
  using Parts = double[kWarp];
  TILELOSS_SHARED(Parts, parts);
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += term(i);
  sum = reduce_block(sum, parts, 0.0, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) take(sum);
}

// take(the first i for which test(i)), if there is any; by one block.
template <class Test, class Take>
__global__ void __launch_bounds__(kMaxThreads) find_first(Test test, Take take, std::int64_t count) {
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

#endif  // TILELOSS_BACKENDS_CUDA_STEPS_H_
