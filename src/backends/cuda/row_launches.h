// The sweeps' kernels over some rows, by the kernel that their format and options have.
#ifndef TILELOSS_BACKENDS_CUDA_ROW_LAUNCHES_H_
#define TILELOSS_BACKENDS_CUDA_ROW_LAUNCHES_H_

#include <algorithm>

#include "backends/cuda/runtime.h"
#include "backends/cuda/sweep_job.h"

namespace tileloss::impl::cuda {

// Threads of a block that sweeps a row: whole warps, each thread with some groups of columns if there are enough.
inline int threads_of_row(std::int64_t columns, tileloss_dtype storage) {
  const std::int64_t of_a_warp = kWarp * 4 * (storage == TILELOSS_FLOAT32 ? 4 : 8);
  return kWarp * static_cast<int>(std::clamp<std::int64_t>((columns + of_a_warp - 1) / of_a_warp, 1, kMaxThreads / kWarp));
}

// Of any logits of the problem's format; `has_softcap`: theirs.
void launch_forward(Queue& queue, const Problem& problem, std::int64_t rows, int threads, const SweepJob& job, bool has_softcap);
void launch_backward(Queue& queue, const Problem& problem, std::int64_t rows, int threads, const SweepJob& job,
                     const RowStates& states);

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_ROW_LAUNCHES_H_
