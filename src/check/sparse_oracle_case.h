// The oracle of a teacher of which some columns are known (sparse_distillation) over a whole case: its rows, what float32 may get
// wrong in them, and those of kernels that get them wrong.
//
//   SparseOracleCase oracle_case(options, labels, ...);
//   sparse.compute(oracle_case.options(), logits, ids, log_q, label);
//   oracle_case.row_gradient(i, sparse, gradient); losses[i] = oracle_case.row_loss(i, sparse); ...
#ifndef TILELOSS_CHECK_SPARSE_ORACLE_CASE_H_
#define TILELOSS_CHECK_SPARSE_ORACLE_CASE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "check/mutants.h"
#include "check/row_outputs.h"
#include "reference/distillation.h"

namespace tileloss::tools {

struct SparseOptions {
  reference::DistillationOptions distillation;
  reference::Tail tail = reference::Tail::kLump;
};

// A row beside the columns that are known of its teacher. The buffers are kept from row to row.
class SparseRow {
 public:
  // `logits`: of the valid columns. `ids`: distinct, negative ones are none; `log_q`: as many.
  void compute(const SparseOptions& options, std::span<const double> logits, std::span<const std::int64_t> ids,
               std::span<const double> log_q, std::int64_t label);

  const reference::DistillationRow& values() const { return values_; }
  const reference::SoftmaxRow& student() const { return values_.student(); }
  std::span<const double> logits() const { return logits_; }
  std::span<const std::int64_t> ids() const { return ids_; }
  std::span<const double> log_q() const { return log_q_; }

  ExpectedRow expected() const;
  OutputMagnitudes magnitudes() const;
  // Of the divergence, the teacher's entropy and the loss: terms of logarithms, as far as their columns count.
  double output_magnitude() const { return output_magnitude_; }
  double square() const { return square_; }  // what the oracle's divergence is multiplied by

 private:
  reference::DistillationRow values_;
  std::vector<double> logits_, log_q_;
  std::vector<std::int64_t> ids_;
  double square_ = 1;
  double output_magnitude_ = 0;
};

class SparseOracleCase {
 public:
  // labels [N]: ignore_index in rows that are not in use. Empty: weights 1; upstream gradient 1.
  SparseOracleCase(const SparseOptions& options, std::vector<std::int64_t> labels, std::vector<double> token_weights,
                   std::vector<double> loss_grad);
  SparseOracleCase(const SparseOracleCase&) = delete;
  SparseOracleCase& operator=(const SparseOracleCase&) = delete;

  const SparseOptions& options() const { return options_; }
  const reference::Distillation& oracle() const { return oracle_; }

  // Of rows in use.
  double row_loss(std::int64_t row, const SparseRow& sparse) const { return oracle_.row_loss(row, sparse.values()); }
  void row_gradient(std::int64_t row, const SparseRow& sparse, reference::GradientRow& out) const;
  // Magnitudes for OutputMetric::add: of a row's loss, and of the reduced loss given the sum of the rows'.
  double row_magnitude(std::int64_t row, const SparseRow& sparse) const;
  double reduce_magnitude(double sum) const;

  // Whether the options can tell this kernel from the right one.
  bool can_be_wrong(WrongPair wrong) const;
  void wrong_row(WrongPair wrong, std::int64_t row, const SparseRow& sparse, const reference::GradientRow& right,
                 WrongPairRow& out) const;

 private:
  // Where the wrong kernel is the right one of other options.
  std::optional<SparseOptions> other_options(WrongPair wrong) const;

  SparseOptions options_;
  std::vector<std::int64_t> labels_, all_in_use_;
  std::vector<double> token_weights_, loss_grad_;
  reference::Distillation oracle_;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_SPARSE_ORACLE_CASE_H_
