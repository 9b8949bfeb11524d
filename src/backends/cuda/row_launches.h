// The sweeps' kernels over some rows, by the kernel that their format and options have.
#pragma once

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

// Whether rows have words of allowed columns; these.
inline bool is_masked(const Problem& p) { return present(p.args.allowed); }
inline AllowedRows allowed_rows(const Problem& p) {
  return {static_cast<const std::uint32_t*>(p.args.allowed.data), p.args.allowed.row_stride};
}

// visit(T{}, is_plain, may_be_masked) for the kernel of a dtype. Those that are not plain look for words of allowed columns while
// they run.
template <class Visit>
void visit_kernel(tileloss_dtype storage, bool is_plain, bool is_masked, Visit&& visit) {
  visit_format(storage, [&](auto format) {
    if (!is_plain) {
      visit(format, std::false_type{}, std::true_type{});
    } else if (is_masked) {
      visit(format, std::true_type{}, std::true_type{});
    } else {
      visit(format, std::true_type{}, std::false_type{});
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
