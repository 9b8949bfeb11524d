// The oracle of each function of the library, by name.
#ifndef TILELOSS_CHECK_GRADCHECK_ORACLE_H_
#define TILELOSS_CHECK_GRADCHECK_ORACLE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check/distillation_oracle_case.h"
#include "check/gradcheck_config.h"
#include "check/gradcheck_run.h"
#include "check/pair_row.h"
#include "check/policy_oracle_case.h"
#include "check/soft_labels_oracle_case.h"
#include "check/sparse_oracle_case.h"
#include "reference/oracle.h"

namespace tileloss::tools {

// A row as its oracle sees it.
struct OracleRow {
  const reference::SoftmaxRow& softmax;
  const PairRow* pair = nullptr;      // of distillation: the same with the teacher's row beside it
  const SoftRow* soft = nullptr;      // of class probabilities: the same with them beside it
  const SparseRow* sparse = nullptr;  // of a sparse teacher: the same with its columns beside it
};

// Rows given to it are not ignored. A policy loss's upstream gradients of a row's outputs are the row's coefficients.
class LossOracle {
 public:
  virtual ~LossOracle() = default;

  reference::Transform transform;

  virtual reference::RowLoss row_loss(int64_t row, const OracleRow& values) const = 0;
  virtual void row_gradient(int64_t row, const OracleRow& values, reference::GradientRow& out) const = 0;
  virtual double reduce(std::span<const reference::RowLoss> losses) const = 0;
  // Magnitudes for OutputMetric::add: of a row's loss, and of the reduced loss given the rows'.
  virtual double row_magnitude(int64_t row, const OracleRow& values, const reference::RowLoss& loss) const;
  virtual double reduce_magnitudes(std::span<const reference::RowLoss> magnitudes) const;
  // What a row's loss and its gradient are made of, by name.
  virtual std::vector<std::pair<std::string, double>> row_terms(int64_t row, const OracleRow& values,
                                                                const reference::RowLoss& loss) const = 0;
  // The upstream gradients of a row: of its loss, or of its outputs.
  virtual double loss_upstream(int64_t row) const = 0;
  virtual reference::RowUpstream row_upstream(int64_t row) const = 0;
  // Of a policy loss; null for any other.
  virtual const PolicyOracleCase* policy() const { return nullptr; }
  // Of distillation; null for any other.
  virtual const DistillationOracleCase* distillation() const { return nullptr; }
  // Of class probabilities; null for any other.
  virtual const SoftLabelsOracleCase* soft_labels() const { return nullptr; }
  // Of a sparse teacher; null for any other.
  virtual const SparseOracleCase* sparse() const { return nullptr; }
  // Whether the options can tell this kernel from the right one; and its row, of one that they can.
  virtual bool can_be_wrong(WrongPair /*wrong*/) const { return false; }
  virtual void wrong_row(WrongPair /*wrong*/, int64_t /*row*/, const OracleRow& /*values*/,
                         const reference::GradientRow& /*right*/, WrongPairRow& /*out*/) const {}
};

reference::Transform make_transform(const Function& function);

// The losses that there is an oracle for, by the names that `loss` has in a config.
std::vector<std::string> checked_losses();

// Throws ToolError (usage) if there is none for this function.
std::unique_ptr<LossOracle> make_loss_oracle(const GradcheckConfig& config, const CheckInputs& inputs);

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_GRADCHECK_ORACLE_H_
