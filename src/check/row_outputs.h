// The row outputs that a check judges: the one list of them on this side of the ABI, with the oracle's value of each and what
// float32 may get wrong in it. Losses are held against the same budget.
#ifndef TILELOSS_CHECK_ROW_OUTPUTS_H_
#define TILELOSS_CHECK_ROW_OUTPUTS_H_

#include <tileloss/tileloss.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "check/error_metric.h"
#include "reference/oracle.h"

namespace tileloss::tools {

// Places in checked_outputs(); the first kRowOutputCount are row_outputs().
enum RowOutputIndex : std::size_t { kLogp, kLse, kEntropy, kArgmax, kCorrect, kLogSumSqProbs, kMeanLogit, kRowOutputCount };
enum PairOutputIndex : std::size_t { kDivergence = kRowOutputCount, kTeacherEntropy, kAgreement, kOutputCount };

// The oracle's values of a row, the default's those of one that is ignored.
struct ExpectedRow {
  ExpectedRow() = default;
  ExpectedRow(const reference::RowOutputs& outputs) : own(outputs) {}

  reference::RowOutputs own;
  // Of a row with a teacher's beside it.
  double divergence = 0.0;  // as the library has it: not multiplied by the temperature's square
  double teacher_entropy = 0.0;
  bool agreement = false;
};

// What the budgets of a row's outputs are made of.
struct OutputTerms;

struct RowOutput {
  const char* name;  // in tileloss_args, a config's outputs and files
  tileloss_vector tileloss_args::*argument;
  tileloss_dtype dtype;
  double (*expected)(const ExpectedRow& row);
  double (*magnitude)(const OutputTerms& terms);  // null: the output must match exactly, or is one of a pair
  bool of_pair = false;                           // of functions with a teacher alone; the magnitude is check/pair_row.h's

  bool is_exact() const { return magnitude == nullptr; }
};

// Those that every function has ...
std::span<const RowOutput, kRowOutputCount> row_outputs();
// ... and, behind them, those of functions with a teacher.
std::span<const RowOutput, kOutputCount> checked_outputs();
std::vector<std::string> output_names(bool has_divergence);

// `elements`, as they lie in memory, as doubles: exact for each dtype of an output (argmax is far below 2^53).
std::vector<double> widen(tileloss_dtype dtype, std::span<const char> elements);

// What cancels, or is blurred, in each output: the `magnitude` for OutputMetric::add. z - m carries an error of |z - m| 2^-24,
// and with a transform z one of about |z| 2^-24: they move logp and entropy by no more than twice that times min(1, |their
// value|).
using OutputMagnitudes = std::array<double, kOutputCount>;
// 0 for the outputs of pairs. `error_of_z`: what each z may be wrong by besides, in units of the magnitude (0: z comes from
// stored logits).
OutputMagnitudes output_magnitudes(const reference::SoftmaxRow& softmax, double error_of_z = 0.0);

// The magnitude for a row's loss (weights of token and class included).
double loss_magnitude(const reference::SoftmaxRow& softmax, const reference::RowLoss& loss);

// Whether `output` is the row's argmax: the lowest index of the maximum (-1 if there is a NaN). Under a transform logits that
// differ in double may tie in float32 (a saturated softcap): any column within 2^-20 |m| of the maximum will do.
bool argmax_agrees(const reference::SoftmaxRow& softmax, std::int64_t output);

// The kernel's outputs of one row, widened; absent: not asked for.
using RowOutputValues = std::array<std::optional<double>, kOutputCount>;

// One output over all rows.
class RowOutputMetric {
 public:
  explicit RowOutputMetric(const RowOutput& output) : output_(&output), number_(output.name), exact_(output.name) {}

  void add(std::int64_t row, double value, double expected, double magnitude);
  void merge(const RowOutputMetric& other);

  const RowOutput& output() const { return *output_; }
  std::int64_t count() const { return count_; }
  Worst max_abs() const { return number_.max_abs(); }              // unless the output is exact
  std::int64_t mismatches() const { return exact_.mismatches(); }  // if it is

  // OutputMetric's or ExactMetric's.
  std::vector<Gate> gates(double max_abs_limit = std::numeric_limits<double>::infinity()) const;

 private:
  const RowOutput* output_;
  OutputMetric number_;
  ExactMetric exact_;
  std::int64_t count_ = 0;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_ROW_OUTPUTS_H_
