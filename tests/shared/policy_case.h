// A test case for policy_loss: a LogitsCase, the policy's tensors in guarded buffers, and the judgement by the oracle. Rows that
// are not in use hold NaN everywhere, and labels that are no class where they are masked.
//
//   PolicyCase c({.logits = {.rows = 33, .vocab = 1000}, .sequences = 4, .ref_logp = true}, options);
//   ASSERT_EQ(tileloss_policy_loss_value_and_grad(&c.args(), &options, nullptr, nullptr), TILELOSS_OK);
//   EXPECT_TRUE(agrees(c.check()));
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>
#include <deque>
#include <vector>

#include "judge/oracles/policy.h"
#include "tests/shared/logits_case.h"

namespace tileloss::test {

struct PolicyCaseSpec {
  LogitsCaseSpec logits;  // ignore_prob: half of those rows are masked instead, if there is a mask; per_row_loss is the options'
  std::int64_t sequences = 3;
  bool use_offsets = true;  // otherwise [B,T]: rows is then a multiple of sequences
  bool int32_offsets = false;
  tileloss_dtype mask_dtype = TILELOSS_NONE;  // none: no mask
  bool old_logp = true;
  bool ref_logp = false;
  bool sampler_logp = false;
  bool metrics = true;
  std::vector<float> tools::PolicyTensors::*with_nan = nullptr;  // in this tensor the first row in use holds NaN
};

class PolicyCase {
 public:
  // The options' numbers may lie behind pointers, which must stay valid. Entropy masks are moved
  // clear of every entropy.
  PolicyCase(const PolicyCaseSpec& spec, tileloss_policy_loss_options& options);

  tileloss_args& args() { return logits_.args(); }
  LogitsCase& logits() { return logits_; }
  void reset() {
    logits_.reset();
    if (metrics_) metrics_.fill_ones();
  }
  // Everything that the args ask for.
  CheckResult check() const;

 private:
  static LogitsCaseSpec with_loss_kind(LogitsCaseSpec spec, const tileloss_policy_loss_options& options);
  template <class To, class From>
  tileloss_vector copy(const std::vector<From>& values, tileloss_dtype dtype);
  void clear_entropy_masks(tileloss_policy_loss_options& options) const;
  void mask_ignored_rows();
  void summarize_rows();
  tileloss_vector copy_mask();
  void add_tensors();

  const PolicyCaseSpec spec_;
  const tileloss_policy_loss_options& options_;
  LogitsCase logits_;
  tools::PolicyTensors tensors_;
  std::vector<std::int64_t> labels_;
  std::vector<std::uint8_t> used_;
  std::vector<tools::RowSummary> rows_;
  std::deque<GuardBuffer> buffers_;
  GuardBuffer metrics_;
};

}  // namespace tileloss::test
