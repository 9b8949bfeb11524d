// One row of the kernels' results beside the oracle's, and the gates over all rows: what the judge and the mutants share.
#ifndef TILELOSS_CHECK_GRADCHECK_ROWS_H_
#define TILELOSS_CHECK_GRADCHECK_ROWS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check/gradcheck_judge.h"
#include "check/gradcheck_oracle.h"

namespace tileloss::tools {

// What one thread needs for a row.
struct Scratch {
  std::vector<double> logits;
  reference::SoftmaxRow softmax;
  reference::GradientRow gradient;
  std::unique_ptr<PairRow> pair;      // of distillation
  std::unique_ptr<SoftRow> soft;      // of class probabilities
  std::unique_ptr<SparseRow> sparse;  // of a sparse teacher

  OracleRow oracle_row() const { return {softmax, pair.get(), soft.get(), sparse.get()}; }
};

// A row of the kernel's results; null or absent: not asked for. Mutants have their own values in it.
struct RowView {
  std::vector<const void*> dlogits;
  const float* per_loss = nullptr;
  RowOutputValues outputs;
  std::optional<double> fused_logp;
};

RowView row_view(const CheckInputs& inputs, const KernelResults& results, int64_t row);

// What is allowed of the gradients, as a GradientMetric takes it.
GradientTolerances gradient_tolerances(const GradcheckConfig& config);

// What a computed row's gradient and outputs are held against. `outputs`: the kernel's, which decide where the oracle leaves them
// open: agreement, where rounding may make another column the largest.
RowReference row_reference(const Scratch& scratch);
ExpectedRow expected_outputs(const Scratch& scratch, const RowOutputValues& outputs);
OutputMagnitudes expected_magnitudes(const Scratch& scratch);

// The oracle's row: softmax, loss and gradient.
reference::RowLoss compute_row(const LossOracle& oracle, const CheckInputs& inputs, int64_t row, Scratch& scratch);

// Counts a row that is not ignored, once it is computed.
void count_row(const Scratch& scratch, Checks& checks);

// `magnitude`: of the row's loss.
void check_row(const CheckInputs& inputs, int64_t row, const RowView& view, const Scratch& scratch,
               const reference::RowLoss& loss, double magnitude, Checks& checks);
void check_ignored_row(const CheckInputs& inputs, int64_t row, const RowView& view, Checks& checks);

void check_outputs(int64_t row, const RowView& view, const ExpectedRow& expected, const OutputMagnitudes& magnitudes,
                   Checks& checks);

void append(std::vector<Gate>& gates, std::vector<Gate> more);
std::vector<Gate> row_gates(const GradcheckConfig& config, const KernelResults& results, const Checks& checks);
// Loss, metrics and rows, once the rows are checked: what is judged alike on both levels.
void judge_outputs(const GradcheckConfig& config, const LossOracle& oracle, const KernelResults& results,
                   const std::vector<reference::RowLoss>& losses, const std::vector<reference::RowLoss>& magnitudes,
                   Verdict& verdict);
// The scalar loss, by the metric's budget and by the config's own limit. A loss per row is judged with the rows.
std::vector<Gate> loss_gates(const GradcheckConfig& config, const std::string& name, double loss, const Verdict& verdict);

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_GRADCHECK_ROWS_H_
