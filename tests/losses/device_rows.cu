// Every loss's row maths as a device would run it: compiled by nvcc, not run. What a kernel calls is plain data and functions.
#include "core/number_formats.h"
#include "losses/cross_entropy.h"
#include "losses/distillation.h"
#include "losses/logprobs.h"
#include "losses/policy_loss.h"
#include "losses/row_arrays.h"
#include "losses/row_outputs.h"
#include "losses/soft_cross_entropy.h"
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
template <class Loss>
__global__ void pair_stage(Loss loss, const RowState* students, const RowState* teachers, impl::PairSums* sums, double* losses,
                           impl::PairCoefficients* coefficients, std::int64_t rows) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows) return;
  const impl::RowStats student = impl::make_row_stats(students[i]);
  impl::PairStats stats{student, impl::make_row_stats(teachers[i]), student, sums[i]};
  coefficients[i] = loss.pair_coefficients(i);
  const impl::DivergenceTerm label = impl::label_term({}, stats.student, stats.teacher);
  stats.sums.divergence += label.value;
  losses[i] = loss.pair_loss(i, stats);
}

template __global__ void pair_stage(impl::Distillation, const RowState*, const RowState*, impl::PairSums*, double*,
                                    impl::PairCoefficients*, std::int64_t);
template __global__ void pair_stage(impl::SparseDistillation, const RowState*, const RowState*, impl::PairSums*, double*,
                                    impl::PairCoefficients*, std::int64_t);
template __global__ void pair_stage(impl::SoftCrossEntropy, const RowState*, const RowState*, impl::PairSums*, double*,
                                    impl::PairCoefficients*, std::int64_t);

// The steps of a loss, each a kernel.
template <auto kStep, class Loss, class With = void>
struct Step {
  Loss* loss;
  With with;
  Step(Loss* l, const With& w) : loss(l), with(w) {}
  template <class Index>
  TILELOSS_HOST_DEVICE auto operator()(Index i) const {
    return (loss->*kStep)(i, with);
  }
};
template <auto kStep, class Loss>
struct Step<kStep, Loss, void> {
  Loss* loss;
  explicit Step(Loss* l) : loss(l) {}
  template <class Index>
  TILELOSS_HOST_DEVICE auto operator()(Index i) const {
    return (loss->*kStep)(i);
  }
};

template <class S>
__global__ void each(S step, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) step(i);
}
template <class Term, class Take>
__global__ void sum(Term term, Take take, std::int64_t count) {
  double total = 0;
  for (std::int64_t i = 0; i < count; ++i) total += term(i);
  take(total);
}

template <class Loss>
class DeviceSteps {
 public:
  explicit DeviceSteps(Loss* loss) : loss_(loss) {}
  template <auto kStep, class... With>
  void each(std::int64_t count, const With&... with) {
    test::each<<<1, 32>>>(Step<kStep, Loss, With...>(loss_, with...), count);
  }
  template <auto kTerm, auto kTake, class... With>
  void sum(std::int64_t count, const With&... with) {
    test::sum<<<1, 1>>>(Step<kTerm, Loss, With...>(loss_, with...), Step<kTake, Loss>(loss_), count);
  }
  void sort(double*, std::int64_t) {}

 private:
  Loss* loss_;
};

template <class Loss>
void all_steps(const Loss& loss, Loss* on_device) {
  DeviceSteps<Loss> steps(on_device);
  if constexpr (requires { loss.prepare(steps); }) loss.prepare(steps);
  if constexpr (requires { loss.couple(steps, impl::RowStates{}); }) loss.couple(steps, impl::RowStates{});
  if constexpr (requires { loss.finish(steps); }) loss.finish(steps);
}
template void all_steps(const impl::CrossEntropy&, impl::CrossEntropy*);
template void all_steps(const impl::PolicyLoss&, impl::PolicyLoss*);
template void all_steps(const impl::Distillation&, impl::Distillation*);
template void all_steps(const impl::SparseDistillation&, impl::SparseDistillation*);
template void all_steps(const impl::SoftCrossEntropy&, impl::SoftCrossEntropy*);
template void all_steps(const FocalLoss&, FocalLoss*);

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
