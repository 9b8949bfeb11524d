// A row of results beside the oracle's, and the gates over all rows: what the judge, the mutants, the trace of a row and the
// tests' cases share.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "judge/gates/error_metric.h"
#include "judge/gates/linear_metric.h"
#include "judge/inputs/call.h"
#include "judge/oracles/oracle.h"

namespace tileloss::tools {

// A row of results; null or absent: not asked for. Mutants have their own values in it.
struct RowView {
  std::vector<const void*> dlogits;
  const float* per_loss = nullptr;
  RowOutputValues outputs;
  std::span<const double> logps;  // of several labels, in place of the output
  std::optional<double> fused_logp;
};

RowView row_view(const CheckInputs& inputs, const KernelResults& results, int64_t row);

// What a row's outputs are compared with. `outputs`: the kernel's, which decide where rounding may make another column the
// largest.
ExpectedRow expected_outputs(const OracleValues& values, const RowOutputValues& outputs);

// Everything that is compared for each row.
struct Checks {
  // `names`: of the gradients, before those of their gates; none with the LM head, whose gradients are not of a row.
  Checks(std::vector<std::string> names, const std::vector<oracle::NumberFormat>& formats)
      : gradient_names(std::move(names)), gradients(formats.begin(), formats.end()) {}

  void add(const RowView& view, const OracleValues& values, int64_t cols);
  void add_ignored(int64_t row, const RowView& view, int64_t cols);
  void merge(const Checks& other);
  std::vector<Gate> gates(const GradcheckConfig::Tolerances& tolerances = {}) const;

  std::vector<std::string> gradient_names;
  std::vector<GradientMetric> gradients;
  OutputMetric per_loss{"per_loss"};
  std::vector<OutputMetric> outputs{checked_outputs().begin(), checked_outputs().end()};
  OutputMetric fused_logp_bits{"value_and_grad/logp_same_bits", true};
  int64_t rows = 0;            // not ignored
  int64_t nonfinite_rows = 0;  // of them, those whose gradient the oracle has as NaN or infinite at the label

 private:
  void add_outputs(int64_t row, const RowView& view, const ExpectedRow& expected, const OutputMagnitudes& magnitudes);
};

// The checks of the gradients that a call gave.
Checks checks_of(const KernelResults& results);

// What is allowed of the gradients, as a GradientMetric takes it.
GradientTolerances gradient_tolerances(const GradcheckConfig::Tolerances& limits);

oracle::LinearGradients::NeedsGrad gradients_of(const KernelResults& results);

std::vector<Gate> prefixed(const std::string& prefix, std::vector<Gate> gates);
void append(std::vector<Gate>& gates, std::vector<Gate> more);

}  // namespace tileloss::tools
