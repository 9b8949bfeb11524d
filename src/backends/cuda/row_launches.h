// The sweeps' kernels over some rows, by the kernel that their format and options have.
#ifndef TILELOSS_BACKENDS_CUDA_ROW_LAUNCHES_H_
#define TILELOSS_BACKENDS_CUDA_ROW_LAUNCHES_H_

#include <type_traits>

#include "backends/cuda/runtime.h"
#include "backends/cuda/sweep_job.h"
#include "backends/problem.h"
#include "losses/cross_entropy.h"
#include "losses/policy_loss.h"

namespace tileloss::impl::cuda {

// The losses that take a row as a whole: those of labels that have a value_and_grad.
template <class Loss>
inline constexpr bool kHasWholeRows = std::is_same_v<Loss, CrossEntropy> || std::is_same_v<Loss, PolicyLoss>;

// visit(T{}, is_plain) for the kernel of a dtype.
template <class Visit>
void visit_kernel(tileloss_dtype storage, bool is_plain, Visit&& visit) {
  visit_format(storage, [&](auto format) {
    if (is_plain) {
      visit(format, std::true_type{});
    } else {
      visit(format, std::false_type{});
    }
  });
}

// Of any logits of the problem's format; `has_softcap`: theirs.
void launch_forward(Queue& queue, const Problem& problem, std::int64_t rows, int threads, const SweepJob& job, bool has_softcap);
void launch_backward(Queue& queue, const Problem& problem, std::int64_t rows, int threads, const SweepJob& job,
                     const RowStates& states);
// By a cluster of job.slices blocks each.
template <class Loss>
void launch_whole(Queue& queue, const Problem& problem, int threads, const SweepJob& job,
                  const device::CoefficientsOf<Loss>& coefficients);

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_ROW_LAUNCHES_H_
