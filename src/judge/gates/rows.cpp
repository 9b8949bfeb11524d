#include "judge/gates/rows.h"

#include <cmath>
#include <iterator>

namespace tileloss::tools {
namespace {

std::optional<double> element(const std::vector<double>& values, int64_t row) {
  return values.empty() ? std::nullopt : std::optional(values[static_cast<size_t>(row)]);
}

void add_output(OutputMetric& metric, int64_t row, const float* output, double reference, double magnitude) {
  if (output != nullptr) metric.add(row, static_cast<double>(*output), reference, magnitude);
}

}  // namespace

RowView row_view(const CheckInputs& inputs, const KernelResults& results, int64_t row) {
  RowView view;
  for (const CheckedGradient& gradient : results.gradients) {
    if (!gradient.dlogits.empty())
      view.dlogits.push_back(gradient.dlogits.data() + inputs.row_offset(row, gradient.dlogits_format));
  }
  if (!results.per_loss.empty()) view.per_loss = &results.per_loss[static_cast<size_t>(row)];
  for (size_t o = 0; o < kOutputCount; ++o) {
    if (o != kLogp || inputs.slots.empty()) view.outputs[o] = element(results.outputs[o], row);
  }
  const std::vector<double>& logps = results.outputs[kLogp];
  if (!inputs.slots.empty() && !logps.empty()) view.logps = inputs.slots_of(std::span(logps), row);
  view.fused_logp = element(results.fused_logp, row);
  return view;
}

ExpectedRow expected_outputs(const OracleValues& values, const RowOutputValues& outputs) {
  ExpectedRow expected = values.outputs;
  if (outputs[kAgreement] && values.is_agreement_open) expected.agreement = *outputs[kAgreement] != 0;
  if (!outputs[kArgmax] || values.error_of_z == 0) return expected;
  const auto argmax = static_cast<int64_t>(*outputs[kArgmax]);
  if (argmax_agrees(*values.softmax, argmax, values.error_of_z)) {
    expected.own.argmax = argmax;
    expected.own.correct = argmax == values.softmax->label();
  }
  return expected;
}

void Checks::add_outputs(int64_t row, const RowView& view, const ExpectedRow& expected, const OutputMagnitudes& magnitudes) {
  for (size_t o = 0; o < kOutputCount; ++o) {
    if (view.outputs[o]) outputs[o].add(row, *view.outputs[o], checked_outputs()[o].expected(expected), magnitudes[o]);
  }
  if (!view.fused_logp) return;
  fused_logp_bits.add(row, bits_of(*view.fused_logp), bits_of(*view.outputs[kLogp]));
}

void Checks::add(const RowView& view, const OracleValues& values, int64_t cols) {
  ++rows;
  if (!std::isfinite(values.gradient.gradient[static_cast<size_t>(values.softmax->label())])) ++nonfinite_rows;
  for (size_t g = 0; g < gradients.size(); ++g) gradients[g].add_row(values.row, view.dlogits[g], cols, values.reference);
  add_output(per_loss, values.row, view.per_loss, values.loss.total(), values.loss_magnitude);
  add_outputs(values.row, view, expected_outputs(values, view.outputs), values.magnitudes);
  for (size_t k = 0; k < view.logps.size(); ++k)
    outputs[kLogp].add(values.row, view.logps[k], values.logps[k].value, values.logps[k].magnitude);
}

void Checks::add_ignored(int64_t row, const RowView& view, int64_t cols) {
  for (size_t g = 0; g < gradients.size(); ++g) gradients[g].add_ignored_row(row, view.dlogits[g], cols);
  add_output(per_loss, row, view.per_loss, 0, 0);
  add_outputs(row, view, {}, OutputMagnitudes{});
  for (const double logp : view.logps) outputs[kLogp].add(row, logp, 0, 0);
}

void Checks::merge(const Checks& other) {
  for (size_t g = 0; g < gradients.size(); ++g) gradients[g].merge(other.gradients[g]);
  per_loss.merge(other.per_loss);
  for (size_t o = 0; o < kOutputCount; ++o) outputs[o].merge(other.outputs[o]);
  fused_logp_bits.merge(other.fused_logp_bits);
  rows += other.rows;
  nonfinite_rows += other.nonfinite_rows;
}

std::vector<Gate> Checks::gates(const GradcheckConfig::Tolerances& tolerances) const {
  std::vector<Gate> gates;
  if (per_loss.count() > 0) append(gates, per_loss.gates());
  for (size_t o = 0; o < kOutputCount; ++o) {
    const OutputMetric& metric = outputs[o];
    if (metric.count() > 0) append(gates, o == kLogp ? metric.gates(tolerances.logp_max_abs) : metric.gates());
  }
  if (fused_logp_bits.count() > 0) append(gates, fused_logp_bits.gates());
  for (size_t g = 0; g < gradients.size(); ++g) {
    append(gates, prefixed(gradient_names[g], gradients[g].gates(gradient_tolerances(tolerances))));
  }
  return gates;
}

Checks checks_of(const KernelResults& results) {
  std::vector<std::string> names;
  std::vector<oracle::NumberFormat> formats;
  for (const CheckedGradient& gradient : results.gradients) {
    if (gradient.dlogits.empty()) continue;
    names.push_back(gradient.name);
    formats.push_back(gradient.dlogits_format);
  }
  return {names, formats};
}

GradientTolerances gradient_tolerances(const GradcheckConfig::Tolerances& limits) {
  return {limits.ulp, 1.0, limits.dlogits_max_abs, limits.dlogits_max_rel};
}

oracle::LinearGradients::NeedsGrad gradients_of(const KernelResults& results) {
  oracle::LinearGradients::NeedsGrad needs_grad{};
  for (const CheckedGradient& gradient : results.gradients) {
    for (const LinearGradient& one : gradient.linear) needs_grad[static_cast<size_t>(one.which)] = true;
  }
  return needs_grad;
}

std::vector<Gate> prefixed(const std::string& prefix, std::vector<Gate> gates) {
  for (Gate& gate : gates) gate.name = prefix + gate.name;
  return gates;
}

void append(std::vector<Gate>& gates, std::vector<Gate> more) {
  gates.insert(gates.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

}  // namespace tileloss::tools
