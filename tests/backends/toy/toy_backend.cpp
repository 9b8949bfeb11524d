#include "tests/backends/toy/toy_backend.h"

#include <cmath>
#include <cstring>
#include <memory>

#include "backends/host/checks.h"
#include "backends/host/loss.h"
#include "backends/host/row_state.h"
#include "core/number_formats.h"
#include "core/row_stats.h"
#include "losses/row_arrays.h"
#include "losses/row_outputs.h"

namespace tileloss::test {
namespace {

using impl::Bfloat16;
using impl::Float16;
using impl::LogitTransform;
using impl::Problem;
using impl::RowState;
using impl::Status;

const ToyPlan& own_part(const tileloss_plan& plan) { return *reinterpret_cast<const ToyPlan*>(plan.other); }

float read(const tileloss_matrix& m, std::int64_t row, std::int64_t column) {
  const std::int64_t at = row * m.row_stride + column;
  switch (m.dtype) {
    case TILELOSS_BFLOAT16: return impl::to_float(static_cast<const Bfloat16*>(m.data)[at]);
    case TILELOSS_FLOAT16: return impl::to_float(static_cast<const Float16*>(m.data)[at]);
    default: return static_cast<const float*>(m.data)[at];
  }
}

void write(const tileloss_matrix& m, std::int64_t row, std::int64_t column, float value) {
  const std::int64_t at = row * m.row_stride + column;
  switch (m.dtype) {
    case TILELOSS_BFLOAT16: static_cast<Bfloat16*>(m.data)[at] = impl::from_float<Bfloat16>(value); break;
    case TILELOSS_FLOAT16: static_cast<Float16*>(m.data)[at] = impl::from_float<Float16>(value); break;
    default: static_cast<float*>(m.data)[at] = value; break;
  }
}

// The forward sweep of a row.
RowState gather(const Problem& p, const LogitTransform& transform, std::int64_t row, std::int64_t target) {
  const float* const weights = impl::class_weights(p);
  RowState s;
  for (std::int64_t j = 0; j < p.columns; ++j) {
    const float z = transform.value(read(p.args.logits, row, j));
    if (z > s.max || s.argmax < 0) {
      s.max = z;
      s.argmax = p.logit.vocab_start + j;
    }
    if (j == target) s.target = z;
  }
  double sum = 0, entropy = 0, collision = 0, smoothing = 0;
  for (std::int64_t j = 0; j < p.columns; ++j) {
    const double shifted = static_cast<double>(transform.value(read(p.args.logits, row, j))) - s.max;
    if (j != target) sum += std::exp(shifted);
    entropy += shifted * std::exp(shifted);
    collision += std::exp(2 * shifted);
    smoothing += shifted * (weights == nullptr ? 1.0 : static_cast<double>(weights[j]));
  }
  s.sum = static_cast<float>(sum);
  s.entropy_sum = static_cast<float>(entropy);
  s.collision_sum = static_cast<float>(collision);
  s.smoothing_sum = static_cast<float>(smoothing);
  return s;
}

// The backward sweep of a row.
void apply(const Problem& p, const LogitTransform& transform, std::int64_t row, std::int64_t target, const impl::RowStats& stats,
           const impl::RowCoefficients& c) {
  const float* const weights = impl::class_weights(p);
  for (std::int64_t j = 0; j < p.total_columns; ++j) {
    if (j >= p.columns) {
      write(p.args.dlogits, row, j, 0);
      continue;
    }
    const float x = read(p.args.logits, row, j);
    const double log_p = static_cast<double>(transform.value(x)) - stats.lse, prob = std::exp(log_p);
    const double uniform = c.uniform * (weights == nullptr ? 1.0 : static_cast<double>(weights[j]));
    double dz = prob * (c.prob() + (c.prob_logp == 0 ? 0 : c.prob_logp * log_p)) + uniform;
    if (j == target) dz = c.target * stats.one_minus_p + stats.p * (c.prob_plus_target + c.prob_logp * stats.logp) + uniform;
    write(p.args.dlogits, row, j, static_cast<float>(dz * transform.derivative(x)));
  }
}

}  // namespace

Status ToyBackend::plan(const Problem& problem, const tileloss_plan_options& /*wishes*/, const tileloss_executor* /*executor*/,
                        tileloss_plan* plan) const {
  if (problem.loss->is_linear || problem.couples_rows || problem.merges_shards())
    return {TILELOSS_UNSUPPORTED, problem.loss->name + ": the toy device has no such sweep"};
  const ToyPlan own = {problem.rows, problem.columns};
  std::memcpy(plan->other, &own, sizeof own);
  return {};
}

Status ToyBackend::check_plan(const tileloss_plan& plan) const {
  if (own_part(plan).rows >= 0 && own_part(plan).columns >= 0) return {};
  return impl::expected("plan.toy", "rows and columns", "less than 0");
}

Status ToyBackend::run(const Problem& p, const tileloss_plan& /*plan*/, const tileloss_run& /*run*/) const {
  if (Status s = impl::host::check_numbers(p); !s.ok()) return s;
  std::vector<std::int64_t> targets(static_cast<std::size_t>(p.rows));
  impl::LossContext context = impl::make_context(p);
  if (Status s = impl::host::resolve_targets(p, context.labels, targets.data()); !s.ok()) return s;
  std::vector<std::byte> scratch(static_cast<std::size_t>(p.stage_bytes));
  context.scratch = scratch.data();
  const std::unique_ptr<impl::RowStage> stage = p.loss->info.make(context);
  stage->prepare();
  const impl::RowOutputs outputs(p.args, context);
  const LogitTransform transform = impl::make_transform(p);
  const bool writes = p.pass != TILELOSS_BACKWARD;
  std::vector<double> losses(static_cast<std::size_t>(p.rows));
  for (std::int64_t i = 0; i < p.rows; ++i) {
    const std::int64_t target = targets[static_cast<std::size_t>(i)];
    const bool is_used = target != impl::kIgnoredRow;
    const RowState state = !is_used          ? RowState{}
                           : p.needs_forward ? gather(p, transform, i, target)
                                             : impl::load_row(p.row_state, i);
    if (p.needs_forward && p.has_row_state) impl::save_row(p.row_state, i, state);
    if (!is_used) {
      if (writes) outputs.write_ignored(i);
      for (std::int64_t j = 0; p.needs_backward && j < p.total_columns; ++j) write(p.args.dlogits, i, j, 0);
      continue;
    }
    const impl::RowStats stats = impl::make_row_stats(state);
    const impl::RowResult result = stage->row(i, stats);
    losses[static_cast<std::size_t>(i)] = result.loss;
    if (writes) outputs.write(i, stats);
    if (p.needs_backward) apply(p, transform, i, target, stats, result.coefficients);
  }
  if (writes) stage->finish();
  impl::host::write_loss(p, losses.data());
  return {};
}

Status ToyBackend::set_identity(const tileloss_row_state& state) const {
  impl::host::set_identity(state);
  return {};
}

Status ToyBackend::merge(tileloss_row_state* into, const tileloss_row_state& from) const {
  impl::host::merge(into, from);
  return {};
}

std::vector<impl::PlanFact> ToyBackend::describe(const tileloss_plan& plan) const {
  return {{"rows", own_part(plan).rows}, {"columns", own_part(plan).columns}};
}

}  // namespace tileloss::test
