// LogitsCase's judgement: oracle, error metric, verdict.
#include <cmath>

#include "tests/shared/logits_case.h"
#include "tests/shared/row_output_check.h"

namespace tileloss::test {
namespace {

void append_dlogits_gates(const LogitsCase& c, const tools::GradientMetric& metric, CheckResult& result) {
  if (!c.spec().dlogits) return;
  const std::vector<tools::Gate> gates = metric.gates();
  result.gates.insert(result.gates.end(), gates.begin(), gates.end());
  result.mistrusted = metric.mistrusted();
}

void append_surroundings_gate(const LogitsCase& c, CheckResult& result) {
  result.gates.push_back(tools::make_gate("surroundings_written", c.surroundings_intact() ? 0.0 : 1.0, 0.0));
}

}  // namespace

CheckResult check_cross_entropy(const LogitsCase& c, const tileloss_cross_entropy_options& options) {
  const reference::CrossEntropyOptions oracle_options = make_oracle_options(options);
  const reference::CrossEntropy oracle(oracle_options, c.labels(), c.token_weights(), c.class_weights(), c.loss_grad());
  const tileloss_args& args = c.args();
  const bool per_row = oracle_options.reduction == reference::Reduction::kNone;
  RowOutputCheck outputs(args);
  tools::OutputMetric loss_metric("loss");
  tools::GradientMetric gradient_metric(c.spec().format);
  reference::SoftmaxRow softmax;
  reference::GradientRow gradient;
  std::vector<reference::RowLoss> losses, magnitudes;
  for (std::int64_t i = 0; i < c.spec().rows; ++i) {
    const bool ignored = oracle.is_ignored(i);
    if (!ignored) softmax.compute(oracle_options.transform, c.logits_row(i), c.labels()[static_cast<std::size_t>(i)]);
    outputs.add(i, ignored ? nullptr : &softmax);
    losses.push_back(oracle.row_loss(i, softmax));
    magnitudes.push_back({ignored ? 0.0 : tools::loss_magnitude(softmax, losses.back()), 0.0});
    if (present(args.loss) && per_row)
      loss_metric.add(i, output_at(args.loss, i), losses.back().total(), magnitudes.back().total());
    if (!c.spec().dlogits) continue;
    if (ignored) {
      gradient_metric.add_ignored_row(i, c.dlogits_row(i), c.spec().vocab);
    } else {
      oracle.row_gradient(i, softmax, gradient);
      gradient_metric.add_row(i, c.dlogits_row(i), c.spec().vocab, tools::make_row_reference(softmax, gradient));
    }
  }
  if (present(args.loss) && !per_row)
    loss_metric.add(-1, output_at(args.loss, 0), oracle.reduce(losses), oracle.reduce(magnitudes));
  CheckResult result;
  if (present(args.loss)) result.gates = loss_metric.gates();
  outputs.append_gates(result.gates);
  append_dlogits_gates(c, gradient_metric, result);
  append_surroundings_gate(c, result);
  return result;
}

CheckResult check_logprobs(const LogitsCase& c, const tileloss_logprobs_options& options) {
  const reference::Transform transform = make_transform(options.logit);
  RowOutputCheck outputs(c.args());
  tools::GradientMetric gradient_metric(c.spec().format);
  reference::SoftmaxRow softmax;
  reference::GradientRow gradient;
  for (std::int64_t i = 0; i < c.spec().rows; ++i) {
    const std::int64_t label = c.labels()[static_cast<std::size_t>(i)];
    const bool ignored = label == options.logit.ignore_index;
    if (!ignored) softmax.compute(transform, c.logits_row(i), label);
    outputs.add(i, ignored ? nullptr : &softmax);
    if (!c.spec().dlogits) continue;
    if (ignored) {
      gradient_metric.add_ignored_row(i, c.dlogits_row(i), c.spec().vocab);
    } else {
      reference::logprobs_gradient(softmax, c.upstream(i), gradient);
      gradient_metric.add_row(i, c.dlogits_row(i), c.spec().vocab, tools::make_row_reference(softmax, gradient));
    }
  }
  CheckResult result;
  outputs.append_gates(result.gates);
  append_dlogits_gates(c, gradient_metric, result);
  append_surroundings_gate(c, result);
  return result;
}

testing::AssertionResult agrees(const CheckResult& result) {
  auto failure = testing::AssertionFailure();
  for (const tools::Gate& gate : result.gates) {
    if (!gate.pass) failure << gate.name << ": " << gate.value << " > " << gate.limit << "\n";
  }
  if (result.gates.empty()) return testing::AssertionFailure() << "nothing was checked";
  return tools::all_pass(result.gates) ? testing::AssertionSuccess() : failure;
}

}  // namespace tileloss::test
