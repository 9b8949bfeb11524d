// Distillation's oracle over a whole case: its rows beside their teacher's, and those of kernels that get them wrong.
//
//   DistillationOracleCase oracle_case(options, rows, ...);  // the tensors must outlive it
//   pair.compute(oracle_case.options(), student, teacher, label);
//   oracle_case.row_gradient(i, pair, gradient); losses[i] = oracle_case.row_loss(i, pair); ...
#ifndef TILELOSS_CHECK_DISTILLATION_ORACLE_CASE_H_
#define TILELOSS_CHECK_DISTILLATION_ORACLE_CASE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "check/mutants.h"
#include "check/pair_row.h"
#include "reference/distillation.h"

namespace tileloss::tools {

// Where the wrong kernel is the right one of other options of a divergence.
std::optional<reference::DistillationOptions> wrong_options(const reference::DistillationOptions& options, WrongPair wrong);
// Whether a mean counts the rows in use, and there are others.
bool counts_rows(const reference::DistillationOptions& options, std::span<const std::int64_t> labels);

class DistillationOracleCase {
 public:
  // labels [N]: ignore_index in rows that are not in use. Empty spans: weights 1; upstream gradient 1.
  DistillationOracleCase(const reference::DistillationOptions& options, std::vector<std::int64_t> labels,
                         std::vector<double> token_weights, std::vector<double> loss_grad);
  DistillationOracleCase(const DistillationOracleCase&) = delete;
  DistillationOracleCase& operator=(const DistillationOracleCase&) = delete;

  const reference::DistillationOptions& options() const { return options_; }
  const reference::Distillation& oracle() const { return oracle_; }

  // Of rows in use.
  double row_loss(std::int64_t row, const PairRow& pair) const { return oracle_.row_loss(row, pair.values()); }
  void row_gradient(std::int64_t row, const PairRow& pair, reference::GradientRow& out) const;
  // Magnitudes for OutputMetric::add: of a row's loss, and of the reduced loss given the sum of the rows'.
  double row_magnitude(std::int64_t row, const PairRow& pair) const;
  double reduce_magnitude(double sum) const;

  // Whether the options can tell this kernel from the right one.
  bool can_be_wrong(WrongPair wrong) const;
  void wrong_row(WrongPair wrong, std::int64_t row, const PairRow& pair, const reference::GradientRow& right,
                 WrongPairRow& out) const;

 private:
  // Where the wrong kernel is the right one of other options, or of other labels.
  std::optional<reference::DistillationOptions> other_options(WrongPair wrong) const;
  // What a row's own gradient is multiplied by.
  double row_factor(std::int64_t row) const;
  double square() const;  // of the divergence: T^2 or 1

  reference::DistillationOptions options_;
  std::vector<std::int64_t> labels_, all_in_use_;
  std::vector<double> token_weights_, loss_grad_;
  reference::Distillation oracle_;
  std::array<std::optional<reference::Distillation>, kWrongPairs> others_;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_DISTILLATION_ORACLE_CASE_H_
