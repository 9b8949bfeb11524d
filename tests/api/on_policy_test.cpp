// policy_loss against the logp that logprobs has of the same input: every ratio is exactly 1, every KL exactly 0.
#include <gtest/gtest.h>

#include "tests/api/calls.h"
#include "tests/shared/linear_case.h"

namespace tileloss::test {
namespace {

constexpr std::int64_t kRows = 300, kVocab = 700;

// What a step on fresh samples is given: old_logp and ref_logp from `logprobs_function`, an advantage of its own for each token.
struct OnPolicy {
  std::vector<float> logp = std::vector<float>(kRows), advantages = std::vector<float>(kRows), loss = std::vector<float>(kRows),
                     metrics = std::vector<float>(TILELOSS_POLICY_METRICS);

  void get_logp(const char* logprobs_function, const tileloss_args& given, const tileloss_logit_options& logit) {
    tileloss_args args = given;
    args.loss = {};
    args.dlogits = args.dhidden = args.dhead = {};
    args.logp = tileloss_make_vector(logp.data(), TILELOSS_FLOAT32, kRows);
    tileloss_logprobs_options options{.logit = logit};
    ASSERT_TRUE(runs(logprobs_function, TILELOSS_FORWARD, args, &options, plan_options()));
  }

  void expect_exact(const char* function, const tileloss_args& given, tileloss_policy_loss_options options,
                    tileloss_schedule schedule) {
    tileloss_args args = given;
    for (std::size_t i = 0; i < advantages.size(); ++i) advantages[i] = static_cast<float>(i % 7) - 3;
    args.old_logp = args.ref_logp = tileloss_make_vector(logp.data(), TILELOSS_FLOAT32, kRows);
    args.advantages = tileloss_make_vector(advantages.data(), TILELOSS_FLOAT32, kRows);
    args.loss = tileloss_make_vector(loss.data(), TILELOSS_FLOAT32, kRows);
    args.metrics = tileloss_make_vector(metrics.data(), TILELOSS_FLOAT32, TILELOSS_POLICY_METRICS);
    args.sequence_length = 30;
    options.advantage_level = TILELOSS_LEVEL_TOKEN;
    options.aggregation = TILELOSS_AGGREGATION_NONE;
    options.beta.value = 0.5;
    ASSERT_TRUE(runs(function, TILELOSS_VALUE_AND_GRAD, args, &options, with_schedule(schedule)));
    for (std::size_t i = 0; i < loss.size(); ++i) ASSERT_EQ(loss[i], -advantages[i]) << function << ", row " << i;
    EXPECT_EQ(metrics[TILELOSS_METRIC_RATIO_MEAN], 1);
    EXPECT_EQ(metrics[TILELOSS_METRIC_KL], 0);
  }
};

tileloss_policy_loss_options grpo() { return {}; }

class OnPolicyRatios : public testing::TestWithParam<oracle::NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, OnPolicyRatios, testing::ValuesIn(kFormats), format_name);

TEST_P(OnPolicyRatios, AreExactlyOneFromLogits) {
  const LogitsCase c({.rows = kRows, .vocab = kVocab, .format = GetParam(), .loss = false, .row_outputs = false});
  for (const tileloss_temperature_on on : {TILELOSS_TEMPERATURE_ON_LOGITS, TILELOSS_TEMPERATURE_ON_LOGPROB}) {
    tileloss_policy_loss_options options = grpo();
    options.logit.temperature.value = 0.7;
    options.logit.temperature_on = on;
    OnPolicy step;
    step.get_logp("logprobs", c.args(), options.logit);
    for (const tileloss_schedule schedule : kSchedules) {
      step.expect_exact("policy_loss", c.args(), options, schedule);
    }
  }
}

TEST_P(OnPolicyRatios, AreExactlyOneWithTheLmHead) {
  const LinearCase c({.row = {.rows = kRows, .vocab = kVocab, .loss = false, .row_outputs = false},
                      .hidden = 24,
                      .format = GetParam(),
                      .head_format = GetParam()});
  OnPolicy step;
  step.get_logp("linear_logprobs", c.args(), grpo().logit);
  for (const tileloss_schedule schedule : {TILELOSS_SCHEDULE_STASH, TILELOSS_SCHEDULE_RECOMPUTE}) {
    step.expect_exact("linear_policy_loss", c.args(), grpo(), schedule);
  }
}

}  // namespace
}  // namespace tileloss::test
