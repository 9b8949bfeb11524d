#include "check/gradcheck_judge.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <utility>

#include "check/gradcheck_oracle.h"
#include "check/gradcheck_rows.h"
#include "support/progress.h"
#include "support/signals.h"
#include "support/timer.h"

namespace tileloss::tools {
namespace {

using reference::RowLoss;

double sum(const std::vector<float>& values) {
  double total = 0;
  for (const float value : values) total += static_cast<double>(value);
  return total;
}

void set_loss(const GradcheckConfig& config, const LossOracle& oracle, const KernelResults& results,
              const std::vector<RowLoss>& losses, const std::vector<RowLoss>& magnitudes, Verdict& verdict) {
  verdict.has_loss = !results.loss.empty();
  if (!verdict.has_loss) return;
  verdict.loss_kernel = sum(results.loss);
  if (config.per_row_loss()) {
    for (const RowLoss& loss : losses) verdict.loss_ref += loss.total();
  } else {
    verdict.loss_ref = oracle.reduce(losses);
    verdict.loss_magnitude = oracle.reduce_magnitudes(magnitudes);
  }
}

// The loss's own metrics, of value_and_grad and of the forward.
void check_metrics(const GradcheckConfig& config, const PolicyOracleCase& oracle_case, const KernelResults& results,
                   Verdict& verdict) {
  const std::vector<std::string> names = config.function.metrics();
  for (const auto& [name, values] : {std::pair("metrics", &results.metrics), {"forward/metrics", &results.forward_metrics}}) {
    OutputMetric metric(name);
    for (size_t m = 0; m < values->size(); ++m) {
      const auto value = static_cast<double>((*values)[m]);
      metric.add(static_cast<int64_t>(m), value, oracle_case.result().metrics[m], oracle_case.metric_magnitude(m));
      if (values == &results.metrics) verdict.metrics.push_back({names[m], value, oracle_case.result().metrics[m]});
    }
    if (!values->empty()) append(verdict.gates, metric.gates());
  }
  verdict.margin = oracle_case.margin();
}

// With reduction none value_and_grad's losses must be the forward's, row by row, to the bit.
Gate same_losses(const KernelResults& results) {
  ExactMetric metric("value_and_grad/loss_same_bits");
  for (size_t i = 0; i < results.loss.size(); ++i) {
    metric.add(static_cast<int64_t>(i), std::bit_cast<int32_t>(results.loss[i]), std::bit_cast<int32_t>(results.forward_loss[i]));
  }
  return metric.gates().front();
}

// NaN beside NaN passes every other gate: at least one row must have numbers to compare. Limit: all rows but one.
Gate finite_rows(const Checks& checks) {
  const auto rows = static_cast<double>(checks.rows);
  if (checks.rows == 0) return make_gate("mistrusted/nonfinite_fraction", 0, 0);
  return make_gate("mistrusted/nonfinite_fraction", static_cast<double>(checks.nonfinite_rows) / rows, (rows - 1) / rows);
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

}  // namespace

void judge_outputs(const GradcheckConfig& config, const LossOracle& oracle, const KernelResults& results,
                   const std::vector<RowLoss>& losses, const std::vector<RowLoss>& magnitudes, Verdict& verdict) {
  set_loss(config, oracle, results, losses, magnitudes, verdict);
  verdict.gates = loss_gates(config, "loss", verdict.loss_kernel, verdict);
  if (!results.forward_loss.empty()) {
    append(verdict.gates, loss_gates(config, "forward/loss", sum(results.forward_loss), verdict));
    if (config.per_row_loss()) verdict.gates.push_back(same_losses(results));
  }
  if (oracle.policy() != nullptr) check_metrics(config, *oracle.policy(), results, verdict);
  append(verdict.gates, row_gates(config, results, verdict.checks));
  verdict.gates.push_back(finite_rows(verdict.checks));
}

Verdict judge(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results, ThreadTeam& team) {
  const Timer timer;
  const std::unique_ptr<LossOracle> oracle = make_loss_oracle(config, inputs);
  std::vector<RowLoss> losses(static_cast<size_t>(inputs.rows));
  std::vector<RowLoss> magnitudes(static_cast<size_t>(inputs.rows));
  std::vector<reference::NumberFormat> dlogits;
  for (const CheckedGradient& gradient : results.gradients) dlogits.push_back(gradient.dlogits_format);
  std::vector<Checks> per_thread(static_cast<size_t>(team.size()), Checks(dlogits));
  // A fixed share of the rows for each thread, merged in order: the sums come out the same every time.
  Progress progress("oracle", inputs.rows);
  team.run([&](int thread) {
    Scratch scratch;
    Checks& checks = per_thread[static_cast<size_t>(thread)];
    for (int64_t row = thread; row < inputs.rows; row += team.size()) {
      check_stop();
      progress.step();
      const RowView view = row_view(inputs, results, row);
      if (inputs.is_ignored(row)) {
        check_ignored_row(inputs, row, view, checks);
        continue;
      }
      const RowLoss loss = compute_row(*oracle, inputs, row, scratch);
      count_row(scratch, checks);
      losses[static_cast<size_t>(row)] = loss;
      const double magnitude = oracle->row_magnitude(row, scratch.oracle_row(), loss);
      magnitudes[static_cast<size_t>(row)].cross_entropy = magnitude;
      check_row(inputs, row, view, scratch, loss, magnitude, checks);
    }
  });

  Verdict verdict(dlogits);
  for (const Checks& checks : per_thread) verdict.checks.merge(checks);
  judge_outputs(config, *oracle, results, losses, magnitudes, verdict);
  for (const CheckedGradient& gradient : results.gradients) {
    if (inputs.group_rows > 0) verdict.gates.push_back(gaps_untouched(inputs, gradient));
  }
  if (!config.expect_mostly_zero && !verdict.checks.gradients.empty()) {
    const GradientMetric& gradient = verdict.checks.gradients.front();
    verdict.gates.push_back({"mistrusted/zero_fraction", 0.5, gradient.zero_fraction(), !gradient.mistrusted()});
  }
  verdict.seconds = timer.seconds();
  return verdict;
}

}  // namespace tileloss::tools
