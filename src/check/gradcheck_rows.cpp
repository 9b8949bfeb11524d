#include "check/gradcheck_rows.h"

#include <bit>
#include <cmath>
#include <iterator>

namespace tileloss::tools {
namespace {

using reference::RowLoss;

std::optional<double> element(const std::vector<double>& values, int64_t row) {
  return values.empty() ? std::nullopt : std::optional(values[static_cast<size_t>(row)]);
}

void add_output(OutputMetric& metric, int64_t row, const float* output, double reference, double magnitude) {
  if (output != nullptr) metric.add(row, static_cast<double>(*output), reference, magnitude);
}

std::vector<Gate> prefixed(const std::string& prefix, std::vector<Gate> gates) {
  for (Gate& gate : gates) gate.name = prefix + gate.name;
  return gates;
}

}  // namespace

void check_outputs(int64_t row, const RowView& view, const ExpectedRow& expected, const OutputMagnitudes& magnitudes,
                   Checks& checks) {
  for (size_t o = 0; o < kOutputCount; ++o) {
    if (view.outputs[o]) checks.outputs[o].add(row, *view.outputs[o], checked_outputs()[o].expected(expected), magnitudes[o]);
  }
  if (view.fused_logp) {
    checks.fused_logp_bits.add(row, std::bit_cast<int64_t>(*view.fused_logp), std::bit_cast<int64_t>(*view.outputs[kLogp]));
  }
}

RowView row_view(const CheckInputs& inputs, const KernelResults& results, int64_t row) {
  RowView view;
  for (const CheckedGradient& gradient : results.gradients) {
    if (!gradient.dlogits.empty())
      view.dlogits.push_back(gradient.dlogits.data() + inputs.row_offset(row, gradient.dlogits_format));
  }
  if (!results.per_loss.empty()) view.per_loss = &results.per_loss[static_cast<size_t>(row)];
  for (size_t o = 0; o < kOutputCount; ++o) view.outputs[o] = element(results.outputs[o], row);
  view.fused_logp = element(results.fused_logp, row);
  return view;
}

void count_row(const Scratch& scratch, Checks& checks) {
  ++checks.rows;
  if (!std::isfinite(scratch.gradient.gradient[static_cast<size_t>(scratch.softmax.label())])) ++checks.nonfinite_rows;
}

RowReference row_reference(const Scratch& scratch) {
  if (scratch.pair) return scratch.pair->reference(scratch.gradient);
  return make_row_reference(scratch.sparse ? wider_row(scratch.sparse->values()) : scratch.softmax, scratch.gradient);
}

ExpectedRow expected_outputs(const Scratch& scratch, const RowOutputValues& outputs) {
  if (scratch.sparse) {
    ExpectedRow expected = scratch.sparse->expected();
    if (outputs[kAgreement] && is_argmax_open(scratch.softmax)) expected.agreement = *outputs[kAgreement] != 0;
    return expected;
  }
  if (!scratch.pair) return scratch.softmax.outputs();
  ExpectedRow expected = scratch.pair->expected();
  if (outputs[kAgreement] && scratch.pair->is_agreement_open()) expected.agreement = *outputs[kAgreement] != 0;
  return expected;
}

OutputMagnitudes expected_magnitudes(const Scratch& scratch) {
  if (scratch.sparse) return scratch.sparse->magnitudes();
  return scratch.pair ? scratch.pair->magnitudes() : output_magnitudes(scratch.softmax);
}

RowLoss compute_row(const LossOracle& oracle, const CheckInputs& inputs, int64_t row, Scratch& scratch) {
  scratch.logits.resize(static_cast<size_t>(inputs.valid));
  reference::decode_row(inputs.format, inputs.row(row), scratch.logits);
  scratch.softmax.compute(oracle.transform, scratch.logits, inputs.labels[static_cast<size_t>(row)]);
  if (const DistillationOracleCase* distillation = oracle.distillation()) {
    std::vector<double> teacher(scratch.logits.size());
    reference::decode_row(inputs.format, inputs.teacher_row(row), teacher);
    if (!scratch.pair) scratch.pair = std::make_unique<PairRow>();
    scratch.pair->compute(distillation->options(), scratch.logits, teacher, inputs.labels[static_cast<size_t>(row)]);
  }
  if (const SoftLabelsOracleCase* soft_labels = oracle.soft_labels()) {
    std::vector<double> probs(scratch.logits.size());
    reference::decode_row(inputs.probs_format, inputs.probs_row(row), probs);
    if (!scratch.soft) scratch.soft = std::make_unique<SoftRow>();
    scratch.soft->compute(soft_labels->options(), scratch.softmax, scratch.logits, probs);
  }
  if (const SparseOracleCase* sparse = oracle.sparse()) {
    const auto count = static_cast<size_t>(inputs.teacher_columns), first = static_cast<size_t>(row) * count;
    const auto log_q = std::span(inputs.teacher_logprobs).subspan(first, count);
    if (!scratch.sparse) scratch.sparse = std::make_unique<SparseRow>();
    scratch.sparse->compute(sparse->options(), scratch.logits, std::span(inputs.teacher_ids).subspan(first, count),
                            std::vector<double>(log_q.begin(), log_q.end()), inputs.labels[static_cast<size_t>(row)]);
  }
  oracle.row_gradient(row, scratch.oracle_row(), scratch.gradient);
  return oracle.row_loss(row, scratch.oracle_row());
}

void check_row(const CheckInputs& inputs, int64_t row, const RowView& view, const Scratch& scratch, const RowLoss& loss,
               double magnitude, Checks& checks) {
  const RowReference reference = row_reference(scratch);
  for (size_t g = 0; g < checks.gradients.size(); ++g) checks.gradients[g].add_row(row, view.dlogits[g], inputs.cols, reference);
  add_output(checks.per_loss, row, view.per_loss, loss.total(), magnitude);
  check_outputs(row, view, expected_outputs(scratch, view.outputs), expected_magnitudes(scratch), checks);
}

void check_ignored_row(const CheckInputs& inputs, int64_t row, const RowView& view, Checks& checks) {
  for (size_t g = 0; g < checks.gradients.size(); ++g) checks.gradients[g].add_ignored_row(row, view.dlogits[g], inputs.cols);
  add_output(checks.per_loss, row, view.per_loss, 0, 0);
  check_outputs(row, view, {}, OutputMagnitudes{}, checks);
}

GradientTolerances gradient_tolerances(const GradcheckConfig& config) {
  const GradcheckConfig::Tolerances& limits = config.tolerances;
  return {limits.ulp, 1.0, limits.dlogits_max_abs, limits.dlogits_max_rel};
}

void append(std::vector<Gate>& gates, std::vector<Gate> more) {
  gates.insert(gates.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

std::vector<Gate> row_gates(const GradcheckConfig& config, const KernelResults& results, const Checks& checks) {
  const GradcheckConfig::Tolerances& limits = config.tolerances;
  std::vector<Gate> gates;
  if (checks.per_loss.count() > 0) append(gates, checks.per_loss.gates());
  for (size_t o = 0; o < kOutputCount; ++o) {
    const RowOutputMetric& metric = checks.outputs[o];
    if (metric.count() > 0) append(gates, o == kLogp ? metric.gates(limits.logp_max_abs) : metric.gates());
  }
  if (!results.fused_logp.empty()) append(gates, checks.fused_logp_bits.gates());
  const GradientTolerances gradient_limits = gradient_tolerances(config);
  for (size_t g = 0; g < checks.gradients.size(); ++g) {
    append(gates, prefixed(results.gradients[g].name, checks.gradients[g].gates(gradient_limits)));
  }
  return gates;
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

void Checks::merge(const Checks& other) {
  for (size_t g = 0; g < gradients.size(); ++g) gradients[g].merge(other.gradients[g]);
  per_loss.merge(other.per_loss);
  for (size_t o = 0; o < kOutputCount; ++o) outputs[o].merge(other.outputs[o]);
  fused_logp_bits.merge(other.fused_logp_bits);
  rows += other.rows;
  nonfinite_rows += other.nonfinite_rows;
}

}  // namespace tileloss::tools
