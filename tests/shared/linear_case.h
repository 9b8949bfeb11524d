// A test case for the functions linear_*: hidden states, head, bias and their gradients in guarded buffers of any dtype and
// strides, beside the row tensors of a LogitsCase; and its judgement by the oracle and the bound of judge/gates/linear_metric.h.
//
//   LinearCase c({.row = {.rows = 33, .vocab = 1000}, .hidden = 64, .head_layout = MatrixLayout::kTransposed});
//   ASSERT_TRUE(runs("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
//   EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options)));
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "judge/gates/linear_metric.h"
#include "oracle/linear.h"
#include "tests/shared/logits_case.h"

namespace tileloss::test {

// How [rows, cols] lies in memory: rows side by side; columns side by side (a head as [H,V]); with gaps after rows and after
// every element.
enum class MatrixLayout { kRows, kTransposed, kGaps };

struct LinearCaseSpec {
  LogitsCaseSpec row;  // rows, vocab, valid_vocab, labels, weights, upstream gradients, outputs by row; its logits are not used
  std::int64_t hidden = 16;
  std::int64_t rank = 0;  // so many of hidden's last columns, and the head's, are handed over as the low-rank part
  oracle::NumberFormat format = oracle::NumberFormat::kBfloat16;  // of hidden, and of dhidden if that is not float32
  oracle::NumberFormat head_format = oracle::NumberFormat::kBfloat16;
  tileloss_dtype compute_dtype = TILELOSS_NONE;
  MatrixLayout hidden_layout = MatrixLayout::kRows;
  MatrixLayout head_layout = MatrixLayout::kRows;  // and dhead's
  double logit_std = 2;
  double label_logit = 0;  // > 0: each row of hidden points at its label's class, whose logit is this before the bias
  bool bias = false;
  std::function<double(std::int64_t)> bias_of = {};  // by class; none: normal
  oracle::NumberFormat bias_format = oracle::NumberFormat::kFloat32;
  bool dhidden = true, dhead = true, dbias = false;
  bool float32_dhidden = false, float32_dhead = true, float32_dbias = true;  // or that of hidden, head, bias
  bool accumulate = false;
};

// A matrix in a guarded buffer. Gaps hold 0xff bytes, which must stay.
class GuardedMatrix {
 public:
  GuardedMatrix() = default;
  GuardedMatrix(std::int64_t rows, std::int64_t cols, oracle::NumberFormat format, MatrixLayout layout, Flush flush,
                std::int64_t misalignment);

  explicit operator bool() const { return view_.rows != 0 || view_.cols != 0; }
  const oracle::StoredMatrix& view() const { return view_; }
  tileloss_matrix abi() const;
  GuardBuffer& buffer() { return buffer_; }
  const GuardBuffer& buffer() const { return buffer_; }
  void set(std::int64_t i, std::int64_t j, double value);
  bool gaps_intact() const;

 private:
  GuardBuffer buffer_;
  oracle::StoredMatrix view_;
};

class LinearCase {
 public:
  explicit LinearCase(const LinearCaseSpec& spec);

  const LinearCaseSpec& spec() const { return spec_; }
  tileloss_args& args() { return row_.args(); }
  const tileloss_args& args() const { return row_.args(); }
  LogitsCase& row() { return row_; }
  const LogitsCase& row() const { return row_; }
  const oracle::LinearOperands& operands() const { return operands_; }
  const tools::LinearNorms& norms() const { return norms_; }
  std::vector<std::int64_t> used_rows() const;
  std::span<const std::uint8_t> used() const { return used_; }

  // The same options with those of the LM head as the spec has them: what calls are made with.
  template <class Options>
  Options with_linear(Options options) const {
    options.linear.compute_dtype = spec_.compute_dtype;
    options.linear.accumulate = spec_.accumulate ? 1 : 0;
    return options;
  }

  // Outputs NaN again, or what is added to as it was.
  void reset();

  // Row outputs, the gradients that there are, and what surrounds every buffer. `add_target`: what a row is compared with.
  CheckResult check(const tools::Oracle& oracle, const std::function<void(tools::GivenRow& given)>& add_target = {}) const;

  // For tests that corrupt them.
  GuardedMatrix& dhidden() { return dhidden_; }
  GuardedMatrix& dhead() { return dhead_; }
  GuardedMatrix& dbias() { return dbias_; }

  // All gradients' bytes, for comparisons.
  std::vector<unsigned char> gradient_bytes() const;

 private:
  static LogitsCaseSpec without_logits(LogitsCaseSpec spec);
  void fill_operands();
  void point_at_labels();
  void hand_over(const GuardedMatrix& matrix, tileloss_matrix& own, tileloss_matrix& low_rank) const;
  void make_gradients();
  void prefill();

  const LinearCaseSpec spec_;
  LogitsCase row_;
  std::vector<std::uint8_t> used_;
  GuardedMatrix hidden_, head_, bias_, dhidden_, dhead_, dbias_;
  std::vector<unsigned char> dhead_before_, dbias_before_;
  oracle::LinearOperands operands_;
  tools::LinearNorms norms_;
};

CheckResult check_linear_cross_entropy(const LinearCase& c, const tileloss_cross_entropy_options& options);
CheckResult check_linear_logprobs(const LinearCase& c, const tileloss_logprobs_options& options);

// The policy's tensors of a LinearCase: rows in use are those that are not ignored.
class LinearPolicy {
 public:
  // Adds its tensors to the case's args; must outlive the calls.
  LinearPolicy(LinearCase& c, const tools::PolicyDraw& draw, const tileloss_policy_loss_options& options);
  CheckResult check() const;

 private:
  LinearCase& case_;
  const tileloss_policy_loss_options& options_;
  tools::PolicyTensors tensors_;
  std::vector<tools::RowSummary> rows_;
};

}  // namespace tileloss::test
