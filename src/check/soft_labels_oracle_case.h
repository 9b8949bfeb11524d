// The oracle of class probabilities instead of labels (soft_cross_entropy) over a whole case: its rows, what float32 may get
// wrong in them, and those of kernels that get them wrong.
//
//   SoftLabelsOracleCase oracle_case(options, labels, ...);
//   soft.compute(oracle_case.options(), softmax, logits, probs);
//   oracle_case.row_gradient(i, soft, gradient); losses[i] = oracle_case.row_loss(i, soft); ...
#ifndef TILELOSS_CHECK_SOFT_LABELS_ORACLE_CASE_H_
#define TILELOSS_CHECK_SOFT_LABELS_ORACLE_CASE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "check/mutants.h"
#include "reference/distillation.h"
#include "reference/oracle.h"
#include "reference/soft_labels.h"

namespace tileloss::tools {

struct SoftLabelsOptions {
  double label_smoothing = 0;
  std::vector<double> class_weights;  // [valid columns]; empty: 1
  // Weights of rows and reductions are a distillation's without a divergence: transform student, reduction, num_items,
  // ignore_index.
  reference::DistillationOptions rows;
};

// A row beside its class probabilities. The buffers are kept from row to row.
class SoftRow {
 public:
  // Of the valid columns; `softmax`: of the logits under the options' transform. Both must outlive what is asked of the row.
  void compute(const SoftLabelsOptions& options, const reference::SoftmaxRow& softmax, std::span<const double> logits,
               std::span<const double> probs);

  const reference::SoftLabelsRow& values() const { return values_; }
  const reference::SoftmaxRow& softmax() const { return *softmax_; }
  std::span<const double> logits() const { return logits_; }
  std::span<const double> probs() const { return probs_; }
  double mass() const { return mass_; }                          // sum |c q'|
  double output_magnitude() const { return output_magnitude_; }  // of the loss: sum |c q' log p|, and what rounds lse

 private:
  const reference::SoftmaxRow* softmax_ = nullptr;
  std::vector<double> logits_, probs_, wanted_;
  reference::SoftLabelsRow values_;
  double mass_ = 0, output_magnitude_ = 0;
};

class SoftLabelsOracleCase {
 public:
  // labels [N]: ignore_index in rows that are not in use. Empty: weights 1; upstream gradient 1.
  SoftLabelsOracleCase(SoftLabelsOptions options, std::vector<std::int64_t> labels, std::vector<double> token_weights,
                       std::vector<double> loss_grad);
  SoftLabelsOracleCase(const SoftLabelsOracleCase&) = delete;
  SoftLabelsOracleCase& operator=(const SoftLabelsOracleCase&) = delete;

  const SoftLabelsOptions& options() const { return options_; }
  const reference::Distillation& oracle() const { return oracle_; }

  // Of rows in use.
  double row_loss(std::int64_t row, const SoftRow& soft) const;
  void row_gradient(std::int64_t row, const SoftRow& soft, reference::GradientRow& out) const;
  // Magnitudes for OutputMetric::add: of a row's loss, and of the reduced loss given the sum of the rows'.
  double row_magnitude(std::int64_t row, const SoftRow& soft) const;
  double reduce_magnitude(double sum) const;

  // Whether the options can tell this kernel from the right one.
  bool can_be_wrong(WrongPair wrong) const;
  void wrong_row(WrongPair wrong, std::int64_t row, const SoftRow& soft, const reference::GradientRow& right,
                 WrongPairRow& out) const;

 private:
  // What a row's own gradient is multiplied by.
  double row_factor(std::int64_t row) const;

  SoftLabelsOptions options_;
  std::vector<std::int64_t> labels_;
  std::vector<double> token_weights_, loss_grad_;
  reference::Distillation oracle_;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_SOFT_LABELS_ORACLE_CASE_H_
