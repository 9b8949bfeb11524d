// Every loss's row maths as a device would run it: compiled by nvcc, not run. What a kernel calls is plain data and functions.
#include "core/number_formats.h"
#include "losses/cross_entropy.h"
#include "losses/distillation.h"
#include "losses/logprobs.h"
#include "losses/policy_loss.h"
#include "losses/row_arrays.h"
#include "losses/row_outputs.h"
#include "tests/losses/focal_loss.h"

namespace tileloss::test {

using impl::RowState;

// The row stage of one thread a row.
template <class Loss>
__global__ void row_stage(Loss loss, impl::RowOutputs outputs, const RowState* states, double* losses,
                          impl::RowCoefficients* coefficients, std::int64_t rows) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows) return;
  if (!outputs.labels.is_used(i)) {
    outputs.write_ignored(i);
    losses[i] = 0;
    return;
  }
  const impl::RowStats stats = impl::make_row_stats(states[i]);
  const impl::RowResult result = loss.row(i, stats);
  losses[i] = result.loss;
  coefficients[i] = result.coefficients;
  outputs.write(i, stats);
}

template __global__ void row_stage(impl::Logprobs, impl::RowOutputs, const RowState*, double*, impl::RowCoefficients*,
                                   std::int64_t);
template __global__ void row_stage(impl::CrossEntropy, impl::RowOutputs, const RowState*, double*, impl::RowCoefficients*,
                                   std::int64_t);
template __global__ void row_stage(impl::PolicyLoss, impl::RowOutputs, const RowState*, double*, impl::RowCoefficients*,
                                   std::int64_t);
template __global__ void row_stage(FocalLoss, impl::RowOutputs, const RowState*, double*, impl::RowCoefficients*, std::int64_t);

// A loss over two rows: its coefficients, the label's term, its share.
__global__ void pair_stage(impl::Distillation loss, const RowState* students, const RowState* teachers, impl::PairSums* sums,
                           double* losses, impl::PairCoefficients* coefficients, std::int64_t rows) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows) return;
  const impl::RowStats student = impl::make_row_stats(students[i]);
  impl::PairStats stats{student, impl::make_row_stats(teachers[i]), student, sums[i]};
  coefficients[i] = loss.pair_coefficients(i);
  const impl::DivergenceTerm label = impl::label_term({}, stats.student, stats.teacher);
  stats.sums.divergence += label.value;
  losses[i] = loss.pair_loss(i, stats);
}

// Merging the states of a row's slices.
__global__ void merge_states(tileloss_row_state into, tileloss_row_state from) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= into.rows) return;
  impl::save_row(into, i,
                 impl::merge(impl::load_row(into, i), into.smoothing_weight, impl::load_row(from, i), from.smoothing_weight));
}

}  // namespace tileloss::test

#ifdef TILELOSS_PLANT_HOST_CALL
namespace tileloss::test {

// What the compiler must refuse, so that the compilation above says something.
inline double host_only(double x) { return x; }
TILELOSS_HOST_DEVICE inline double calls_the_host(double x) { return host_only(x); }
__global__ void planted(double* x) { *x = calls_the_host(*x); }

}  // namespace tileloss::test
#endif
