#include "judge/gates/judge.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "judge/inputs/checked_function.h"
#include "support/progress.h"
#include "support/timer.h"

namespace tileloss::tools {
namespace {

using oracle::RowLoss;

double sum(const std::vector<float>& values) {
  double total = 0;
  for (const float value : values) total += static_cast<double>(value);
  return total;
}

// The rows' losses and magnitudes, as the oracle reduces them.
struct Losses {
  explicit Losses(int64_t rows) : values(static_cast<size_t>(rows)), magnitudes(values.size()) {}
  std::vector<RowLoss> values, magnitudes;
};

void set_loss(const GradcheckConfig& config, const Oracle& oracle, const KernelResults& results, const Losses& losses,
              Verdict& verdict) {
  verdict.has_loss = !results.loss.empty();
  if (!verdict.has_loss) return;
  verdict.loss_kernel = sum(results.loss);
  if (config.per_row_loss()) {
    for (const RowLoss& loss : losses.values) verdict.loss_ref += loss.total();
  } else {
    verdict.loss_ref = oracle.reduce(losses.values);
    verdict.loss_magnitude = oracle.reduce_magnitudes(losses.magnitudes);
  }
}

// The loss's own metrics, of value_and_grad and of the forward.
void check_metrics(const GradcheckConfig& config, const std::vector<OracleMetric>& expected, const KernelResults& results,
                   Verdict& verdict) {
  const std::vector<std::string> names = config.function.metrics();
  for (const auto& [name, values] : {std::pair("metrics", &results.metrics), {"forward/metrics", &results.forward_metrics}}) {
    OutputMetric metric(name);
    for (size_t m = 0; m < values->size(); ++m) {
      const auto value = static_cast<double>((*values)[m]);
      metric.add(static_cast<int64_t>(m), value, expected[m].value, expected[m].magnitude);
      if (values == &results.metrics) verdict.metrics.push_back({names[m], value, expected[m].value});
    }
    if (!values->empty()) append(verdict.gates, metric.gates());
  }
}

// With reduction none value_and_grad's losses must be the forward's, row by row, to the bit.
Gate same_losses(const KernelResults& results) {
  OutputMetric metric("value_and_grad/loss_same_bits", true);
  for (size_t i = 0; i < results.loss.size(); ++i) {
    metric.add(static_cast<int64_t>(i), bits_of(results.loss[i]), bits_of(results.forward_loss[i]));
  }
  return metric.gates().front();
}

// NaN beside NaN passes every other gate: at least one row must have numbers to compare. Limit: all rows but one.
Gate finite_rows(const Checks& checks) {
  const auto rows = static_cast<double>(checks.rows);
  if (checks.rows == 0) return make_gate("inputs/nonfinite_fraction", 0, 0);
  return make_gate("inputs/nonfinite_fraction", static_cast<double>(checks.nonfinite_rows) / rows, (rows - 1) / rows);
}

// Of the rows that are nobody's, between the groups, those that the call has written to. All their bits were set.
Gate gaps_untouched(const CheckInputs& inputs, const CheckedGradient& gradient) {
  int64_t touched = 0;
  for (int64_t group = 1; group <= inputs.groups(); ++group) {
    const char* end = gradient.dlogits.data() + inputs.row_offset(group * inputs.group_rows);
    touched += std::any_of(end - inputs.row_bytes(), end, [](char byte) { return byte != '\xff'; }) ? 1 : 0;
  }
  return make_gate(gradient.name + "dlogits/written_between_groups", static_cast<double>(touched), 0);
}

// The oracle's pass over all rows, once for all that is judged.
void check_rows(const CheckInputs& inputs, const KernelResults& results, const Oracle& oracle, ThreadTeam& team, Losses& losses,
                Verdict& verdict) {
  const auto threads = static_cast<size_t>(team.size());
  // A fixed share of the rows for each thread, merged in order: the sums come out the same every time.
  std::vector<Checks> checks(threads, verdict.checks);
  std::vector<std::unique_ptr<OracleRow>> rows(threads);
  for (std::unique_ptr<OracleRow>& row : rows) row = oracle.new_row();
  team.run([&](int thread) {
    for (int64_t row = thread; row < inputs.rows; row += team.size()) {
      if (inputs.is_ignored(row))
        checks[static_cast<size_t>(thread)].add_ignored(row, row_view(inputs, results, row), inputs.cols);
    }
  });
  const std::vector<int64_t> used = inputs.used_rows();
  Progress progress("oracle", std::ssize(used));
  for_each_row(inputs, used, team, [&](const GivenRow& given, int thread) {
    const OracleValues& values = rows[static_cast<size_t>(thread)]->compute(given);
    const auto i = static_cast<size_t>(values.row);
    losses.values[i] = values.loss;
    losses.magnitudes[i].cross_entropy = values.loss_magnitude;
    checks[static_cast<size_t>(thread)].add(row_view(inputs, results, values.row), values, inputs.cols);
    if (verdict.linear) verdict.linear->add_row(given.logits, *values.softmax, values.gradient);
    progress.step();
  });
  for (const Checks& part : checks) verdict.checks.merge(part);
  if (verdict.linear) verdict.linear->finish();
}

void judge_gradients(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results, Verdict& verdict) {
  for (const CheckedGradient& gradient : results.gradients) {
    if (inputs.group_rows > 0) verdict.gates.push_back(gaps_untouched(inputs, gradient));
    for (const LinearGradient& one : gradient.linear) {
      append(verdict.gates, prefixed(gradient.name, verdict.linear->judge(one.which, one.view, one.before_view())));
    }
  }
  if (config.expect_mostly_zero || verdict.checks.gradients.empty()) return;
  const GradientMetric& gradient = verdict.checks.gradients.front();
  verdict.gates.push_back({"inputs/zero_fraction", 0.5, gradient.zero_fraction(), !gradient.mistrusted()});
}

}  // namespace

Verdict judge(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results, ThreadTeam& team) {
  const Timer timer;
  const std::unique_ptr<Oracle> oracle = make_oracle(config, inputs);
  Verdict verdict(checks_of(results));
  if (inputs.linear) {
    verdict.linear = std::make_shared<LinearOracleCase>(*inputs.linear->operands, *inputs.linear->norms, gradients_of(results));
  }
  Losses losses(inputs.rows);
  check_rows(inputs, results, *oracle, team, losses, verdict);
  set_loss(config, *oracle, results, losses, verdict);
  verdict.gates = loss_gates(config, "loss", verdict.loss_kernel, verdict);
  if (!results.forward_loss.empty()) {
    append(verdict.gates, loss_gates(config, "forward/loss", sum(results.forward_loss), verdict));
    if (config.per_row_loss()) verdict.gates.push_back(same_losses(results));
  }
  check_metrics(config, oracle->metrics(), results, verdict);
  verdict.margin = oracle->margin();
  append(verdict.gates, verdict.checks.gates(config.tolerances));
  verdict.gates.push_back(finite_rows(verdict.checks));
  judge_gradients(config, inputs, results, verdict);
  verdict.seconds = timer.seconds();
  return verdict;
}

std::vector<Gate> loss_gates(const GradcheckConfig& config, const std::string& name, double loss, const Verdict& verdict) {
  if (!verdict.has_loss || config.per_row_loss()) return {};
  OutputMetric metric(name);
  metric.add(-1, loss, verdict.loss_ref, verdict.loss_magnitude);
  std::vector<Gate> gates = metric.gates();
  if (std::isfinite(config.tolerances.loss_atol)) {
    gates.push_back(make_gate(name + "/atol", std::abs(loss - verdict.loss_ref), config.tolerances.loss_atol));
  }
  return gates;
}

std::vector<int64_t> first_used_rows(const CheckInputs& inputs) {
  std::vector<int64_t> rows = inputs.used_rows();
  rows.resize(std::min(rows.size(), static_cast<size_t>(kMutantRows)));
  return rows;
}

}  // namespace tileloss::tools
