// A test case for functions on logits: guarded buffers of any dtype, stride and alignment, filled from a named distribution, and
// the tileloss_args that describe them; and its judgement by the oracle and the error metric.
//
//   LogitsCase c({.rows = 7, .vocab = 1000, .format = kBfloat16, .distribution = "wide"});
//   ASSERT_EQ(tileloss_cross_entropy_value_and_grad(&c.args(), &options, nullptr, nullptr), TILELOSS_OK);
//   EXPECT_TRUE(agrees(check_cross_entropy(c, options)));
#pragma once

#include <gtest/gtest.h>
#include <tileloss/tileloss.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "judge/strict/guard_buffer.h"
#include "oracle/number_formats.h"
#include "oracle/oracle.h"
#include "support/oracle_options.h"
#include "tests/shared/input_families.h"
#include "tests/shared/judgement.h"

namespace tileloss::test {

using tools::abi_dtype;
using tools::GuardBuffer;
using tools::make_oracle_options;
using tools::make_transform;

struct LogitsCaseSpec {
  std::int64_t rows = 4;
  std::int64_t vocab = 100;
  std::int64_t valid_vocab = -1;  // columns from here on hold NaN; give the same to the options
  std::int64_t stride_extra = 0;  // the gaps between rows hold NaN
  std::int64_t misalignment = 0;  // in elements, of logits and dlogits
  oracle::NumberFormat format = oracle::NumberFormat::kFloat32;
  Flush flush = Flush::kRight;
  std::string distribution = "normal";
  std::uint64_t seed = 1;
  double ignore_prob = 0.0;  // ignored rows hold NaN
  std::int64_t ignore_index = -100;
  bool int32_labels = false;
  bool token_weights = false;
  bool class_weights = false;              // refused by the library together with mean_logit
  Upstream loss_grad = Upstream::kAbsent;  // kScalar and the per-row kinds: as the reduction asks
  Upstream logp_grad = Upstream::kAbsent;
  Upstream lse_grad = Upstream::kAbsent;
  Upstream entropy_grad = Upstream::kAbsent;
  Upstream mean_logit_grad = Upstream::kAbsent;
  // Outputs.
  bool loss = true;  // per row if per_row_loss
  bool per_row_loss = false;
  bool row_outputs = true;     // logp, lse
  bool extra_outputs = false;  // entropy, argmax, correct, log_sum_sq_probs, and mean_logit unless there are class weights
  bool dlogits = true;
  bool in_place = false;
};

class LogitsCase {
 public:
  explicit LogitsCase(const LogitsCaseSpec& spec);

  const LogitsCaseSpec& spec() const { return spec_; }
  tileloss_args& args() { return args_; }
  const tileloss_args& args() const { return args_; }

  std::int64_t valid_columns() const { return spec_.valid_vocab < 0 ? spec_.vocab : spec_.valid_vocab; }
  std::int64_t row_stride() const { return spec_.vocab + spec_.stride_extra; }
  std::span<const std::int64_t> labels() const { return labels_; }
  std::span<const double> token_weights() const { return token_weights_; }
  std::span<const double> class_weights() const { return class_weights_; }
  std::span<const double> loss_grad() const { return loss_grad_; }
  oracle::RowUpstream upstream(std::int64_t row) const;
  tools::OracleTensors oracle_tensors() const;
  const tools::AllowedSets& allowed() const { return allowed_; }
  // The words of each row's allowed columns.
  void set_allowed(std::vector<std::int32_t> words);

  // The valid columns of a row's logits as given (also after an in-place call).
  std::vector<double> logits_row(std::int64_t row) const;
  // Puts another value there. Not for read-only logits: call before seal().
  void set_logit(std::int64_t row, std::int64_t column, double value);
  // Makes the logits read-only (unless in place) and keeps the copy that the oracle reads. Called by the constructor unless
  // `open` is given; every call of the library should see sealed inputs.
  struct Open {};
  LogitsCase(const LogitsCaseSpec& spec, Open);
  // Of other logits.
  LogitsCase(const LogitsCaseSpec& spec, const std::function<double(std::int64_t row, std::int64_t column)>& logit);
  void seal();
  // Outputs NaN again, in-place logits as given.
  void reset();
  // divergence, teacher_entropy and agreement, of functions with a teacher.
  void add_divergence_outputs();

  const void* dlogits_row(std::int64_t row) const;
  double dlogit(std::int64_t row, std::int64_t column) const { return oracle::decode_at(spec_.format, dlogits_row(row), column); }
  // Gaps between the rows of dlogits and what surrounds every output are as they were.
  bool surroundings_intact() const;

 private:
  std::size_t matrix_bytes() const;
  tileloss_matrix make_matrix(const GuardBuffer& buffer) const;
  GuardBuffer& add_buffer(std::size_t bytes, std::size_t misalignment = 0);
  tileloss_vector make_input(std::span<const double> values, std::int64_t stride);
  tileloss_vector make_upstream(Upstream kind, std::int64_t size, std::int64_t stream_row, std::vector<double>& values);
  tileloss_vector make_output(std::int64_t size, tileloss_dtype dtype);
  void make_logits();
  void make_labels();
  void make_outputs();

  LogitsCaseSpec spec_;
  tileloss_args args_{};
  std::vector<std::int64_t> labels_;
  std::vector<double> token_weights_, class_weights_, loss_grad_, logp_grad_, lse_grad_, entropy_grad_, mean_logit_grad_;
  tools::AllowedSets allowed_;
  std::vector<unsigned char> original_;  // the logits as given
  GuardBuffer logits_, dlogits_;
  std::deque<GuardBuffer> inputs_, outputs_;
};

CheckResult check_cross_entropy(const LogitsCase& c, const tileloss_cross_entropy_options& options);
CheckResult check_logprobs(const LogitsCase& c, const tileloss_logprobs_options& options);

}  // namespace tileloss::test
