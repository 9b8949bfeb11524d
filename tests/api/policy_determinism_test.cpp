// policy_loss, bit for bit: rows on their own, in any order, on any number of threads; the ways to give the same thing.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/api/random_options.h"
#include "tests/api/shards.h"
#include "tests/shared/policy_case.h"

namespace tileloss::test {
namespace {

constexpr const char* kPresets[] = {"grpo", "dr_grpo", "cispo", "sapo", "gspo", "luspo", "vespo", "reinforce"};

tileloss_policy_loss_options with_preset(const char* preset) {
  tileloss_policy_loss_options options = policy_options(preset);
  options.epsilon_high.value = 0.3;
  options.max_length = 50;
  leave_out_without_effect("policy_loss", options);
  return options;
}

testing::AssertionResult runs_policy(PolicyCase& c, const tileloss_policy_loss_options& options,
                                     const tileloss_plan_options& hints = plan_options()) {
  return runs("policy_loss", TILELOSS_VALUE_AND_GRAD, c.args(), &options, hints);
}

class PolicyDeterminism : public testing::TestWithParam<oracle::NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, PolicyDeterminism, testing::ValuesIn(kFormats), format_name);

TEST_P(PolicyDeterminism, ThreadsAndRowBlocksChangeNoBit) {
  for (const char* preset : kPresets) {
    tileloss_policy_loss_options options = with_preset(preset);
    PolicyCase c({.logits = {.rows = 67, .vocab = 1300, .format = GetParam(), .ignore_prob = 0.2, .extra_outputs = true},
                  .sequences = 5,
                  .mask_dtype = TILELOSS_UINT8},
                 options);
    std::vector<unsigned char> expected;
    for (int threads = 1; threads <= 16; ++threads) {
      tileloss_plan_options hints = plan_options();
      hints.cpu.threads = threads;
      hints.cpu.row_block = threads % 4;
      c.reset();
      ASSERT_TRUE(runs_policy(c, options, hints));
      if (expected.empty()) expected = outputs_of(c.args());
      ASSERT_TRUE(same_bits(outputs_of(c.args()), expected)) << preset << ", " << threads << " threads";
    }
  }
}

// Sequences of one token: row i of 2048 is the whole of the case with i rows.
TEST_P(PolicyDeterminism, ARowDoesNotDependOnHowManyThereAreNorOnItsPlace) {
  constexpr std::int64_t kMany = 2048, kVocab = 257;
  for (const char* preset : {"grpo", "sapo", "gspo", "vespo"}) {
    tileloss_policy_loss_options options = with_preset(preset);
    options.aggregation = TILELOSS_AGGREGATION_NONE;
    PolicyCase many({.logits = {.rows = kMany, .vocab = kVocab, .format = GetParam()},
                     .sequences = kMany,
                     .use_offsets = false,
                     .metrics = false},
                    options);
    ASSERT_TRUE(runs_policy(many, options));
    const std::size_t row_bytes = kVocab * oracle::format_info(GetParam()).bytes;
    const std::vector<unsigned char> expected = bytes_of(many.args().dlogits), losses = bytes_of(many.args().loss);
    for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{33}, kMany}) {
      // Row k of the smaller case is row (577 k + 5) mod 2048; 577 is odd.
      const auto from = [](std::int64_t k) { return static_cast<std::size_t>((577 * k + 5) % kMany); };
      const auto count = static_cast<std::size_t>(rows);
      std::vector<unsigned char> x(count * row_bytes), dx(count * row_bytes);
      std::vector<std::int64_t> labels(count);
      std::vector<float> old_logp(count), advantages(count), loss(count);
      tileloss_args args = many.args();
      for (std::int64_t k = 0; k < rows; ++k) {
        const auto to = static_cast<std::size_t>(k);
        std::memcpy(&x[to * row_bytes], static_cast<unsigned char*>(args.logits.data) + from(k) * row_bytes, row_bytes);
        labels[to] = static_cast<std::int64_t*>(args.labels.data)[from(k)];
        old_logp[to] = static_cast<float*>(args.old_logp.data)[from(k)];
        advantages[to] = static_cast<float*>(args.advantages.data)[from(k)];
      }
      args.logits.data = x.data();
      args.dlogits.data = dx.data();
      args.labels.data = labels.data();
      args.old_logp.data = old_logp.data();
      args.advantages.data = advantages.data();
      args.loss.data = loss.data();
      args.logp = args.lse = {};
      args.logits.rows = args.dlogits.rows = args.labels.size = args.old_logp.size = args.advantages.size = args.loss.size = rows;
      ASSERT_TRUE(runs("policy_loss", TILELOSS_VALUE_AND_GRAD, args, &options, plan_options()));
      for (std::int64_t k = 0; k < rows; ++k) {
        const auto to = static_cast<std::size_t>(k);
        ASSERT_EQ(std::memcmp(&dx[to * row_bytes], &expected[from(k) * row_bytes], row_bytes), 0) << preset << " " << rows;
        ASSERT_EQ(std::memcmp(&loss[to], &losses[from(k) * sizeof(float)], sizeof(float)), 0) << preset << " " << rows;
      }
    }
  }
}

TEST_P(PolicyDeterminism, OffsetsAndBatchShapeAreTheSameSequences) {
  for (const char* preset : kPresets) {
    tileloss_policy_loss_options options = with_preset(preset);
    PolicyCase c({.logits = {.rows = 12, .vocab = 100, .format = GetParam()}, .sequences = 3, .use_offsets = false}, options);
    ASSERT_TRUE(runs_policy(c, options));
    const auto expected = outputs_of(c.args());
    const std::int32_t offsets[] = {0, 4, 8, 12};
    c.args().sequence_length = 0;
    c.args().sequence_offsets = tileloss_make_vector(offsets, TILELOSS_INT32, 4);
    c.reset();
    ASSERT_TRUE(runs_policy(c, options));
    EXPECT_TRUE(same_bits(outputs_of(c.args()), expected)) << preset;
  }
}

// Plans, schedules and passes: one sweep where the coefficients allow it, two where rows are coupled.
TEST(PolicySchedules, OneSweepUnlessRowsAreCoupled) {
  for (const char* preset : kPresets) {
    tileloss_policy_loss_options options = with_preset(preset);
    PolicyCase c({.logits = {.rows = 12, .vocab = 5000}}, options);
    tileloss_plan plan;
    ASSERT_TRUE(runs("policy_loss", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options(), nullptr, &plan));
    const std::string name = preset;
    const bool coupled = name == "gspo" || name == "luspo" || name == "vespo";
    EXPECT_EQ(plan.cpu.schedule, coupled ? TILELOSS_SCHEDULE_SWEEPS : TILELOSS_SCHEDULE_STASH) << preset;
    EXPECT_TRUE(agrees(c.check())) << preset;
  }
}

TEST(PolicySchedules, FewerMetricsAreTheFirstOnes) {
  tileloss_policy_loss_options options = with_preset("grpo");
  PolicyCase c({.logits = {.rows = 12, .vocab = 50}}, options);
  ASSERT_TRUE(runs_policy(c, options));
  const auto all = bytes_of(c.args().metrics);
  c.reset();
  c.args().metrics.size = 3;
  ASSERT_TRUE(runs_policy(c, options));
  EXPECT_TRUE(same_bits(bytes_of(c.args().metrics), {all.begin(), all.begin() + 3 * sizeof(float)}));
  EXPECT_TRUE(std::isnan(float_at(tileloss_make_vector(c.args().metrics.data, TILELOSS_FLOAT32, 13), 3)));  // not written
}

// The merged states of two halves of the vocabulary, then the row stage alone, then each half's columns.
TEST(PolicySchedules, ShardsOfTheVocabularyAgreeWithTheWhole) {
  for (const char* preset : {"grpo", "gspo", "vespo"}) {
    tileloss_policy_loss_options options = with_preset(preset);
    options.entropy_coef.value = 0.1;
    PolicyCase c({.logits = {.rows = 9, .vocab = 40}}, options);
    ASSERT_TRUE(runs_policy(c, options));
    const auto whole = bytes_of(c.args().dlogits);
    const float loss = float_at(c.args().loss, 0);
    c.reset();
    run_sharded("policy_loss", c.args(), options, {{0, 24}, {24, 16}});
    EXPECT_NEAR(float_at(c.args().loss, 0), loss, 1e-6 * std::fabs(loss)) << preset;
    const auto merged = bytes_of(c.args().dlogits);
    for (std::size_t i = 0; i < whole.size(); i += sizeof(float)) {
      float a = 0, b = 0;
      std::memcpy(&a, &whole[i], sizeof a);
      std::memcpy(&b, &merged[i], sizeof b);
      ASSERT_NEAR(a, b, 1e-6 * std::fabs(a) + 1e-8) << preset << " " << i / sizeof(float);
    }
  }
}

}  // namespace
}  // namespace tileloss::test
