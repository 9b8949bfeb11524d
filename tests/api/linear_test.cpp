// The functions fused with the LM head, through the C ABI, against the oracle.
// On cuda: Linear, LinearSizes.
#include <gtest/gtest.h>

#include <vector>

#include "tests/api/kept_calls.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;

class LinearSizes : public testing::TestWithParam<NumberFormat> {};

TEST_P(LinearSizes, AWideHiddenStateAgrees) {
  for (const MatrixLayout layout : {MatrixLayout::kRows, MatrixLayout::kTransposed}) {
    LinearCase c({.row = {.rows = 33, .vocab = 300, .seed = 3},
                  .hidden = 1536,
                  .format = GetParam(),
                  .head_format = GetParam(),
                  .head_layout = layout,
                  .dbias = true});
    EXPECT_TRUE(value_and_grad_agrees(c, cross_entropy_options())) << name_of(c.spec());
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, LinearSizes, testing::ValuesIn(kFormats), format_name);

// 20 row chunks: the float32 dbias, rounded once, to the bit.
TEST(Linear, A16BitDbiasIsRoundedOnceForAllRowChunks) {
  for (const NumberFormat format : {NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
    std::vector<std::vector<float>> dbias;
    for (const bool float32_dbias : {true, false}) {
      LinearCase c({.row = {.rows = 320, .vocab = 40, .seed = 90},
                    .hidden = 24,
                    .bias = true,
                    .bias_format = format,
                    .dbias = true,
                    .float32_dbias = float32_dbias});
      const tileloss_cross_entropy_options options{.reduction = TILELOSS_REDUCTION_SUM};
      tileloss_plan_options hints = with_schedule(TILELOSS_SCHEDULE_STASH);
      hints.cpu.row_block = 16;
      ASSERT_TRUE(runs("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, hints));
      const oracle::StoredMatrix& view = c.dbias().view();
      std::vector<float>& values = dbias.emplace_back();
      for (std::int64_t v = 0; v < view.rows; ++v) {
        values.push_back(static_cast<float>(decode(format, encode(format, view.at(v, 0)))));
      }
    }
    EXPECT_EQ(dbias[0], dbias[1]) << format_info(format).name;
  }
}

TEST(Linear, LogprobsForwardAndBackwardAgree) {
  for (const NumberFormat format : kFormats) {
    for (const Upstream kind : {Upstream::kPerRow, Upstream::kStrided, Upstream::kBroadcast}) {
      LinearCase c({.row = {.rows = 33,
                            .vocab = 500,
                            .seed = 10,
                            .ignore_prob = 0.2,
                            .logp_grad = kind,
                            .lse_grad = kind,
                            .entropy_grad = kind,
                            .mean_logit_grad = kind,
                            .loss = false,
                            .extra_outputs = true},
                    .hidden = 48,
                    .format = format,
                    .head_format = format,
                    .bias = true,
                    .dbias = true});
      const tileloss_logprobs_options options = logprobs_options();
      tileloss_args forward = c.args(), backward = c.args();
      for (tileloss_matrix* m : {&forward.dhidden, &forward.dhead}) *m = {};
      forward.dbias = forward.logp_grad = forward.lse_grad = forward.entropy_grad = forward.mean_logit_grad = {};
      for (tileloss_vector* v : {&backward.logp, &backward.lse, &backward.entropy, &backward.argmax, &backward.correct,
                                 &backward.log_sum_sq_probs, &backward.mean_logit})
        *v = {};
      RowStateArrays state(33);
      forward.row_state = backward.row_state = &state.get();
      ASSERT_TRUE(runs("linear_logprobs", TILELOSS_FORWARD, forward, &options, plan_options()));
      ASSERT_TRUE(runs("linear_logprobs", TILELOSS_BACKWARD, backward, &options, plan_options()));
      EXPECT_TRUE(agrees(check_linear_logprobs(c, options)));
    }
  }
}

TEST(Linear, PoliciesAgreeAtTokenAndAtSequenceLevel) {
  for (const char* preset : {"grpo", "dapo", "cispo", "sapo", "gspo", "vespo", "reinforce"}) {
    for (const NumberFormat format : kFormats) {
      tileloss_policy_loss_options options = policy_options(preset);
      if (options.kind == TILELOSS_POLICY_CISPO) options.epsilon_high.value = 5;
      options.beta.value = 0.04;
      LinearCase c({.row = {.rows = 60, .vocab = 400, .seed = 11, .ignore_prob = 0.2, .loss_grad = Upstream::kScalar},
                    .hidden = 40,
                    .format = format,
                    .head_format = format,
                    .head_layout = MatrixLayout::kTransposed});
      tools::PolicyDraw draw;
      draw.seed = 12;
      draw.rows = 60;
      draw.sequences = 4;
      draw.use_offsets = true;
      draw.old_scale = draw.ref_scale = 0.3;
      const LinearPolicy policy(c, draw, options);
      ASSERT_TRUE(runs("linear_policy_loss", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options())) << preset;
      EXPECT_TRUE(agrees(policy.check())) << preset << " " << format_info(format).name;
    }
  }
}

}  // namespace
}  // namespace tileloss::test
