// Every loss's row maths as a device would run it: compiled by nvcc, not run. What a kernel calls is plain data and functions.
#include "backends/device/row_kernels.h"
#include "core/columns.h"
#include "core/number_formats.h"
#include "losses/all_losses.h"
#include "tests/losses/focal_loss.h"

namespace tileloss::test {

// The steps of a loss, each a kernel.
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
    test::each<<<1, 32>>>(impl::Step<kStep, Loss, With...>(loss_, with...), count);
  }
  template <auto kTerm, auto kTake, class... With>
  void sum(std::int64_t count, const With&... with) {
    test::sum<<<1, 1>>>(impl::Step<kTerm, Loss, With...>(loss_, with...), impl::Step<kTake, Loss>(loss_), count);
  }
  void sort(double*, std::int64_t) {}

 private:
  Loss* loss_;
};

// All of a call but the sweeps.
template <class Loss>
void all_steps(const Loss& loss, Loss* on_device, const impl::device::RowArrays& rows, const impl::RowOutputs& outputs) {
  DeviceSteps<Loss> steps(on_device);
  if constexpr (requires { loss.prepare(steps); }) loss.prepare(steps);
  if constexpr (requires { loss.couple(steps, impl::RowStates{}); }) loss.couple(steps, impl::RowStates{});
  if constexpr (requires { loss.finish(steps); }) loss.finish(steps);
  test::each<<<1, 32>>>(impl::device::RowStageOf<Loss>{on_device, rows, impl::RowStates{}, outputs, {}, true}, 1);
}
template void all_steps(const impl::Logprobs&, impl::Logprobs*, const impl::device::RowArrays&, const impl::RowOutputs&);
template void all_steps(const impl::Sweep&, impl::Sweep*, const impl::device::RowArrays&, const impl::RowOutputs&);
template void all_steps(const impl::CrossEntropy&, impl::CrossEntropy*, const impl::device::RowArrays&, const impl::RowOutputs&);
template void all_steps(const impl::PolicyLoss&, impl::PolicyLoss*, const impl::device::RowArrays&, const impl::RowOutputs&);
template void all_steps(const impl::Distillation&, impl::Distillation*, const impl::device::RowArrays&, const impl::RowOutputs&);
template void all_steps(const impl::SparseDistillation&, impl::SparseDistillation*, const impl::device::RowArrays&,
                        const impl::RowOutputs&);
template void all_steps(const impl::SoftCrossEntropy&, impl::SoftCrossEntropy*, const impl::device::RowArrays&,
                        const impl::RowOutputs&);
template void all_steps(const FocalLoss&, FocalLoss*, const impl::device::RowArrays&, const impl::RowOutputs&);

struct FindColumn {
  impl::LabelColumns labels;
  std::int64_t* columns;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const { columns[i] = labels[i]; }
};
void other_kernels(const FindColumn& target, const impl::device::LoadStats& load, const impl::device::GiveSums& give,
                   const impl::device::SaveState& save, const impl::device::LossTerm& term, const impl::device::TakeLoss& take) {
  test::each<<<1, 32>>>(target, 1);
  test::each<<<1, 32>>>(load, 1);
  test::each<<<1, 32>>>(give, 1);
  test::each<<<1, 32>>>(save, 1);
  test::sum<<<1, 1>>>(term, take, 1);
}

// A row's columns, and what the columns add up to of every target: each thread a row.
struct Logit {
  const float* x;
  TILELOSS_HOST_DEVICE float operator()(std::int64_t j) const { return x[j]; }
};
__global__ void columns(const float* x, float* dx, std::int64_t count, impl::TargetOptions options, impl::KnownColumn* listed,
                        impl::device::RowArrays rows) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  impl::Columns<Logit> row({x}, impl::LogitTransform::make(1, 0, 1), count, rows.label_columns[i]);
  rows.states[i] = row.gather(0, [](std::int64_t) { return 1.0; });
  impl::TargetStats& stats = rows.stats[i] = impl::make_row_stats(rows.states[i]);
  impl::KnownColumns known(listed, count);
  known.diverge(options, stats.max, stats, [] { return 0.0; });
  for (std::int64_t j = 0; j < count; ++j) {
    const impl::RowStats p = row.stats(j, stats), q = row.stats(j, stats.teacher);
    const impl::DivergenceTerm<double> term = impl::label_term(options.divergence, p, q),
                                       other = impl::probability_term(1, p.logp);
    const double dz = impl::divergence_slope(term, p, stats.sums.mean, impl::has_mean(options.divergence.kind)) +
                      impl::probability_slope(-other.form, p.p, p.one_minus_p, stats.sums.mean) + known.slope(listed[j]) +
                      known.slope_of_others(1) +
                      impl::column_gradient(rows.results[i].coefficients, p, j == rows.label_columns[i], 1);
    dx[j] = static_cast<float>(dz * row.derivative(j));
  }
}

// Merging the states of a row's slices.
__global__ void merge_states(tileloss_row_state into, tileloss_row_state from) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= into.rows) return;
  impl::merge_row(into, from, i);
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
