// Special values of the logits in policy_loss, from the logits on: which rows they reach. (What the row stage makes of a logp of
// -inf or NaN: tests/losses/policy_stage_test.cpp.)
// On toy and cuda: PolicySpecialLogits, PolicySpecialLogps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "tests/api/random_options.h"
#include "tests/shared/policy_case.h"

namespace tileloss::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kRows = 8, kVocab = 100, kCorrupted = 5;

// 4 sequences of 2 tokens, one loss a row.
struct Corrupted {
  tileloss_policy_loss_options options;
  std::vector<float> x, dx, loss, old_logp, advantages, logp;
  std::vector<std::int64_t> labels;

  Corrupted(const char* preset, auto&& corrupt) {
    EXPECT_EQ(tileloss_options_preset("policy_loss", preset, &options, sizeof options), TILELOSS_OK);
    options.aggregation = TILELOSS_AGGREGATION_NONE;
    options.epsilon_high.value = 4;
    leave_out_without_effect("policy_loss", options);
    for (std::int64_t i = 0; i < kRows * kVocab; ++i) x.push_back(static_cast<float>(i % 37) * 0.125F - 2);
    for (std::int64_t i = 0; i < kRows; ++i) labels.push_back(3 * i);
    corrupt(&x[static_cast<std::size_t>(kCorrupted * kVocab)], labels[kCorrupted]);
    dx.assign(x.size(), -7);
    loss.assign(kRows, -7);
    logp.assign(kRows, -7);
    old_logp.assign(kRows, -4.5F);
    advantages = {1, -1, 0.5F, 2};
  }
  testing::AssertionResult run() {
    auto args = init<tileloss_args>();
    args.logits = tileloss_make_matrix(x.data(), TILELOSS_FLOAT32, kRows, kVocab, kVocab);
    args.dlogits = tileloss_make_matrix(dx.data(), TILELOSS_FLOAT32, kRows, kVocab, kVocab);
    args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, kRows);
    args.loss = tileloss_make_vector(loss.data(), TILELOSS_FLOAT32, kRows);
    args.logp = tileloss_make_vector(logp.data(), TILELOSS_FLOAT32, kRows);
    args.old_logp = tileloss_make_vector(old_logp.data(), TILELOSS_FLOAT32, kRows);
    args.advantages = tileloss_make_vector(advantages.data(), TILELOSS_FLOAT32, kRows / 2);
    args.sequence_length = 2;
    return succeeds(tileloss_policy_loss_value_and_grad(&args, &options, nullptr, nullptr));
  }
  float gradient(std::int64_t row, std::int64_t column) const { return dx[static_cast<std::size_t>(row * kVocab + column)]; }
};

const auto kNothing = [](float*, std::int64_t) {};

// Bits of the rows but `first` to `last`.
void expect_others_untouched(const Corrupted& a, const Corrupted& b, std::int64_t first, std::int64_t last) {
  for (std::int64_t i = 0; i < kRows; ++i) {
    if (i >= first && i <= last) continue;
    EXPECT_EQ(a.loss[static_cast<std::size_t>(i)], b.loss[static_cast<std::size_t>(i)]) << i;
    for (std::int64_t j = 0; j < kVocab; ++j) ASSERT_EQ(a.gradient(i, j), b.gradient(i, j)) << i << " " << j;
  }
}

TEST(PolicySpecialLogits, NanInfinityAndNothingButMinusInfinityStayInTheirRow) {
  for (const char* preset : {"grpo", "cispo", "sapo", "reinforce"}) {
    Corrupted clean(preset, kNothing);
    ASSERT_TRUE(clean.run());
    const std::vector<std::function<void(float*, std::int64_t)>> corruptions = {
        [](float* row, std::int64_t) { row[50] = static_cast<float>(kNan); },
        [](float* row, std::int64_t) { row[50] = static_cast<float>(kInf); },
        [](float* row, std::int64_t) { std::fill(row, row + kVocab, static_cast<float>(-kInf)); }};
    for (const auto& corrupt : corruptions) {
      Corrupted s(preset, corrupt);
      ASSERT_TRUE(s.run());
      EXPECT_TRUE(std::isnan(s.loss[kCorrupted])) << preset;
      for (std::int64_t j = 0; j < kVocab; ++j) ASSERT_TRUE(std::isnan(s.gradient(kCorrupted, j))) << preset << " " << j;
      expect_others_untouched(s, clean, kCorrupted, kCorrupted);
    }
  }
}

TEST(PolicySpecialLogits, ACoupledLossCarriesNanThroughItsSequenceOnly) {
  Corrupted clean("gspo", kNothing), s("gspo", [](float*row, std::int64_t) { row[50] = static_cast<float>(kNan); });
  ASSERT_TRUE(clean.run());
  ASSERT_TRUE(s.run());
  EXPECT_TRUE(std::isnan(s.loss[4]));
  EXPECT_TRUE(std::isnan(s.loss[5]));
  expect_others_untouched(s, clean, 4, 5);
}

TEST(PolicySpecialLogits, AMinusInfiniteLabelLeavesClipAndSapoFinite) {
  const auto lost = [](float* row, std::int64_t label) { row[label] = static_cast<float>(-kInf); };
  for (const char* preset : {"grpo", "sapo"}) {
    Corrupted s(preset, lost);
    ASSERT_TRUE(s.run());
    EXPECT_TRUE(std::isfinite(s.loss[kCorrupted])) << preset;
    for (std::int64_t j = 0; j < kVocab; ++j) ASSERT_EQ(s.gradient(kCorrupted, j), 0) << preset << " " << j;
    EXPECT_EQ(s.logp[kCorrupted], static_cast<float>(-kInf));
  }
  Corrupted reinforce("reinforce", lost), cispo("cispo", lost);
  ASSERT_TRUE(reinforce.run());
  EXPECT_EQ(reinforce.loss[kCorrupted], static_cast<float>(kInf));
  EXPECT_NEAR(reinforce.gradient(kCorrupted, 3 * kCorrupted), -0.5, 1e-6);  // p_y = 0: -A (1 - p_y)
  ASSERT_TRUE(cispo.run());
  EXPECT_TRUE(std::isnan(cispo.loss[kCorrupted]));
}

TEST(PolicySpecialLogits, AMinusInfiniteLogitElsewhereGetsNoGradient) {
  for (const char* preset : {"grpo", "gspo", "vespo"}) {
    Corrupted s(preset, [](float* row, std::int64_t) { row[50] = static_cast<float>(-kInf); });
    s.options.entropy_coef.value = 0.1;
    s.options.entropy_reduction = TILELOSS_ENTROPY_AS_LOSS;
    ASSERT_TRUE(s.run());
    EXPECT_TRUE(std::isfinite(s.loss[kCorrupted]));
    EXPECT_EQ(s.gradient(kCorrupted, 50), 0);
    for (std::int64_t j = 0; j < kVocab; ++j) ASSERT_TRUE(std::isfinite(s.gradient(kCorrupted, j)));
  }
}

// The rule of docs/users/losses.md on NaN in the other policies' logp: every kind, level, estimator and correction.
TEST(PolicySpecialLogps, NanIsWhereTheOracleHasIt) {
  for (const auto tensor :
       {&tools::PolicyTensors::old_logp, &tools::PolicyTensors::ref_logp, &tools::PolicyTensors::sampler_logp}) {
    for (const char* preset : {"grpo", "cispo", "sapo", "gspo", "vespo", "reinforce"}) {
      for (const int estimator : {TILELOSS_KL_K1, TILELOSS_KL_K2, TILELOSS_KL_K3}) {
        for (const int variant : {0, 1, 2, 3}) {
          tileloss_policy_loss_options options;
          ASSERT_EQ(tileloss_options_preset("policy_loss", preset, &options, sizeof options), TILELOSS_OK);
          options.epsilon_high.value = 4;
          leave_out_without_effect("policy_loss", options);
          options.beta.value = variant == 0 ? 0 : 0.1;
          options.kl_estimator = estimator;
          options.kl_importance = variant == 2 ? 1 : 0;
          options.aggregation = TILELOSS_AGGREGATION_NONE;
          if (variant > 1) options.sampler_correction = TILELOSS_SAMPLER_TRUNCATE;
          if (variant == 3) options.ratio_level = TILELOSS_LEVEL_SEQUENCE;
          if (variant == 3) options.off_policy_threshold = 0.05;
          PolicyCase c({.logits = {.rows = 9, .vocab = 70, .ignore_prob = 0.2},
                        .mask_dtype = TILELOSS_UINT8,
                        .ref_logp = true,
                        .sampler_logp = true,
                        .metrics = variant % 2 == 0,
                        .with_nan = tensor},
                       options);
          ASSERT_TRUE(runs("policy_loss", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
          EXPECT_TRUE(agrees(c.check())) << preset << ", estimator " << estimator << ", variant " << variant;
        }
      }
    }
  }
}

TEST(PolicySpecialLogits, NoRowsAndNoRowInUse) {
  for (const char* preset : {"grpo", "gspo", "vespo", "dapo"}) {
    tileloss_policy_loss_options options;
    ASSERT_EQ(tileloss_options_preset("policy_loss", preset, &options, sizeof options), TILELOSS_OK);
    for (const std::int64_t rows : {std::int64_t{0}, std::int64_t{6}}) {
      PolicyCase c({.logits = {.rows = rows, .vocab = 30, .ignore_prob = 1}}, options);
      ASSERT_TRUE(runs("policy_loss", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options())) << preset << rows;
      EXPECT_EQ(float_at(c.args().loss, 0), 0) << preset << rows;
      EXPECT_TRUE(agrees(c.check())) << preset << rows;
    }
  }
}

TEST(PolicySpecialLogits, ABatchWithoutSequencesReportsNoTokens) {
  tileloss_policy_loss_options options;
  ASSERT_EQ(tileloss_options_preset("policy_loss", "grpo", &options, sizeof options), TILELOSS_OK);
  float loss = 7, logit = 0;
  std::int64_t label = 0;
  std::vector<float> metrics(TILELOSS_POLICY_METRICS, 7);
  auto args = init<tileloss_args>();
  args.logits = tileloss_make_matrix(&logit, TILELOSS_FLOAT32, 0, 30, 30);
  args.labels = tileloss_make_vector(&label, TILELOSS_INT64, 0);
  args.advantages = tileloss_make_vector(&logit, TILELOSS_FLOAT32, 0);
  args.sequence_length = 5;
  args.loss = tileloss_make_vector(&loss, TILELOSS_FLOAT32, 1);
  args.metrics = tileloss_make_vector(metrics.data(), TILELOSS_FLOAT32, TILELOSS_POLICY_METRICS);
  ASSERT_TRUE(runs("policy_loss", TILELOSS_FORWARD, args, &options, plan_options()));
  EXPECT_EQ(loss, 0);
  EXPECT_EQ(metrics[TILELOSS_METRIC_TOKENS], 0);
  for (const float metric : metrics) EXPECT_NE(metric, 7);  // each is written
}

}  // namespace
}  // namespace tileloss::test
