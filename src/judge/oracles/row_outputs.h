// The row outputs that a check judges: the one list of them on this side of the ABI, with the oracle's value of each and what
// float32 may get wrong in it. Losses are compared with the same budget.
#pragma once

#include <tileloss/tileloss.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "judge/oracles/row_reference.h"
#include "oracle/oracle.h"

namespace tileloss::tools {

// Places in checked_outputs().
enum RowOutputIndex : std::size_t {
  kLogp,
  kLse,
  kEntropy,
  kArgmax,
  kCorrect,
  kLogSumSqProbs,
  kMeanLogit,
  kDivergence,
  kTeacherEntropy,
  kAgreement,
  kOutputCount
};

// The oracle's values of a row, the default's those of one that is ignored.
struct ExpectedRow {
  ExpectedRow() = default;
  ExpectedRow(const oracle::RowOutputs& outputs) : own(outputs) {}

  oracle::RowOutputs own;
  // Of a student and a teacher.
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
  double (*magnitude)(const OutputTerms& terms);  // null: the output must match exactly
  bool of_pair = false;                           // of functions with a teacher alone, whose rows have the magnitude
  bool is_mean = false;                           // over the row's classes

  bool is_exact() const { return magnitude == nullptr; }
};

// Those that every function has and, behind them, those of functions with a teacher.
std::span<const RowOutput, kOutputCount> checked_outputs();
std::vector<std::string> output_names(bool has_divergence);

// `elements`, as they lie in memory, as doubles: exact for each dtype of an output (argmax is far below 2^53).
std::vector<double> widen(tileloss_dtype dtype, std::span<const char> elements);

// What cancels, or is blurred, in each output: the `magnitude` for OutputMetric::add. z - m carries an error of |z - m| 2^-24,
// and with a transform z one of about |z| 2^-24: they move logp and entropy by no more than twice that times min(1, |their
// value|).
using OutputMagnitudes = std::array<double, kOutputCount>;
// 0 for the outputs of pairs. `error_of_z`, here and below: what each z may be wrong by besides, where it comes of a product (0:
// of stored logits).
OutputMagnitudes output_magnitudes(const oracle::SoftmaxRow& softmax, double error_of_z = 0.0);

// The magnitude for a row's loss (weights of token and class included).
double loss_magnitude(const oracle::SoftmaxRow& softmax, const oracle::RowLoss& loss, double error_of_z = 0.0);

// Whether `output` is the row's argmax: the lowest index of the maximum (-1 if there is a NaN). Under a transform logits that
// differ in double may tie in float32 (a saturated softcap): any column within 2^-20 |m| of the maximum will do, and with errors
// of z any that these may have made the largest.
bool argmax_agrees(const oracle::SoftmaxRow& softmax, std::int64_t output, double error_of_z = 0.0);

// The kernel's outputs of one row, widened; absent: not asked for.
using RowOutputValues = std::array<std::optional<double>, kOutputCount>;

}  // namespace tileloss::tools
