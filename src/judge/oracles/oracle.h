// The oracle of a function over a whole case: what each row is compared with, and the reductions.
//
//   const std::unique_ptr<Oracle> oracle = make_cross_entropy(function, tensors);
//   const std::unique_ptr<OracleRow> row = oracle->new_row();       // one a thread
//   const OracleValues& expected = row->compute(given);             // rows in use alone
//   losses[i] = expected.loss; ... oracle->reduce(losses);
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "judge/oracles/logits_rows.h"
#include "judge/oracles/row_outputs.h"
#include "judge/oracles/row_reference.h"
#include "oracle/oracle.h"
#include "support/abi.h"
#include "support/policy_inputs.h"

namespace tileloss::tools {

// The columns that each row's softmax runs over, as a call has them. No words: all columns.
struct AllowedSets {
  std::int64_t row_words = 0;  // ceil(V / 32)
  bool is_shared = false;      // one set for all rows
  std::vector<std::int32_t> words;

  // Of the row's valid columns.
  std::vector<std::uint8_t> of_row(std::int64_t row, std::int64_t valid) const;
};

// What an oracle reads besides the options and the rows. Empty: not given.
struct OracleTensors {
  std::vector<std::int64_t> labels;  // [N], ignore_index in every row that is not in use
  std::vector<double> token_weights, class_weights, loss_grad;
  std::vector<double> logp_grad, lse_grad, entropy_grad, mean_logit_grad;  // one value, or one a row; logp_grad one a label
  std::int64_t labels_per_row = 1;  // of logprobs: where there are more, `labels` has one of each row
  AllowedSets allowed;
  PolicyTensors policy;
  std::vector<std::uint8_t> used;  // of a policy loss: the rows in use, and what the oracle knows of each
  std::vector<RowSummary> summaries;
};

// A row in use, and what it is compared with.
struct GivenRow {
  LogitsRow logits;
  std::int64_t label = 0;
  // A teacher's logits, class probabilities, or the log q of the columns `ids` of a teacher (negative: no column).
  LogitsRow target = {};
  std::span<const std::int64_t> ids = {};
  oracle::Allowed allowed = {};               // the columns that its softmax runs over; empty: all
  std::span<const std::int64_t> labels = {};  // where a row has several: of each slot, less than 0 where it is empty
};

// What a slot's logp is compared with, of several labels a row.
struct SlotLogp {
  double value = 0, magnitude = 0;
};

// What the oracle has of a row, and what float32 may get wrong in it. The pointers and spans are those of the OracleRow.
struct OracleValues {
  std::int64_t row = 0;
  const oracle::SoftmaxRow* softmax = nullptr;
  const oracle::SoftmaxRow* of_logp = nullptr;  // the one that logp is of
  oracle::GradientRow gradient;
  RowReference reference;
  oracle::RowLoss loss;
  double loss_magnitude = 0;
  ExpectedRow outputs;
  OutputMagnitudes magnitudes{};
  std::vector<SlotLogp> logps;     // of several labels, of which the softmax's, and the outputs', is the likeliest
  double error_of_z = 0;           // with the LM head
  bool is_agreement_open = false;  // float32 cannot tell the largest of either side
};

// What a wrong kernel's row has over the right one's (judge/oracles/wrong_kernel.h).
struct WrongRow {
  std::vector<double> gradient;  // [valid columns]
  double loss = 0;
  std::array<double, kOutputCount> outputs{};  // of those that need not match exactly
  std::vector<double> logps;                   // of several labels
};

class OracleRow {
 public:
  virtual ~OracleRow() = default;
  virtual const OracleValues& compute(const GivenRow& given) = 0;
  // Of the computed row: what its loss and gradient are made of, by name.
  virtual std::vector<std::pair<std::string, double>> terms() const = 0;
  // Of a wrong kernel that is right for no other call, whose gradient here is 0. Of all functions alike: the mean logit of one
  // that takes the vocabulary's number of classes for the set's.
  virtual void set_wrong(std::string_view kernel, WrongRow& difference) const;

  const GivenRow& given() const { return given_; }
  const OracleValues& values() const { return values_; }

 protected:
  // Softmax and outputs of a row whose logp is `of_logp`'s.
  void start(const GivenRow& given, const oracle::SoftmaxRow& softmax, const oracle::SoftmaxRow& of_logp);
  // What 1 / V is over 1 / |A|, less 1.
  double class_excess() const;

  GivenRow given_;
  OracleValues values_;
};

// Of a function whose rows are compared with their labels alone.
class LabelRow : public OracleRow {
 public:
  explicit LabelRow(const oracle::Transform& transform) : transform_(transform) {}
  const OracleValues& compute(const GivenRow& given) final;
  void set_wrong(std::string_view kernel, WrongRow& difference) const final;

 protected:
  // The values' gradient, loss and its magnitude.
  virtual void compute_loss(const oracle::SoftmaxRow& softmax) = 0;
  // What the classes' shares give in the loss and its gradient, times `excess`.
  virtual void set_wrong_shares(double /*excess*/, WrongRow& /*difference*/) const {}

 private:
  // The row's logps; its label is the likeliest of them from here on.
  void compute_slots(const GivenRow& given);

  oracle::Transform transform_;
  oracle::SoftmaxRow softmax_;
  std::vector<std::int64_t> label_columns_;  // of several, each once
};

// The outcome of a loss over all its rows, besides the loss.
struct OracleMetric {
  double value = 0, magnitude = 0;
};

class Oracle {
 public:
  virtual ~Oracle() = default;
  virtual std::unique_ptr<OracleRow> new_row() const = 0;
  // The reduced loss of the rows', and its magnitude of theirs (in RowLoss::cross_entropy).
  virtual double reduce(std::span<const oracle::RowLoss> losses) const = 0;
  virtual double reduce_magnitudes(std::span<const oracle::RowLoss> magnitudes) const;
  // The upstream gradients of a row: of its loss, or of its outputs.
  virtual double loss_upstream(std::int64_t /*row*/) const { return 0; }
  virtual oracle::RowUpstream row_upstream(std::int64_t /*row*/) const { return {}; }
  // In the order of the function's metrics; and how far the nearest decision is.
  virtual std::vector<OracleMetric> metrics() const { return {}; }
  virtual double margin() const { return std::numeric_limits<double>::infinity(); }
};

using MakeOracle = std::unique_ptr<Oracle> (*)(const Function& function, OracleTensors tensors);

std::unique_ptr<Oracle> make_cross_entropy(const Function& function, OracleTensors tensors);
std::unique_ptr<Oracle> make_logprobs(const Function& function, OracleTensors tensors);
std::unique_ptr<Oracle> make_policy_loss(const Function& function, OracleTensors tensors);
std::unique_ptr<Oracle> make_distillation(const Function& function, OracleTensors tensors);
std::unique_ptr<Oracle> make_soft_cross_entropy(const Function& function, OracleTensors tensors);
std::unique_ptr<Oracle> make_sparse_distillation(const Function& function, OracleTensors tensors);

// Of one label of several: "logp[3]".
std::string slot_name(std::string_view name, std::size_t slot);

// Of the function's logits.
oracle::Transform make_transform(const Function& function);

}  // namespace tileloss::tools
