// A forward that saves its row state, then a backward from it: the same gradient as value_and_grad, within the metric.
// On toy and cuda: SavedState.
#include <gtest/gtest.h>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

class SavedState : public testing::TestWithParam<oracle::NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SavedState, testing::ValuesIn(kFormats), format_name);

// The three arrays that the header calls required are enough.
TEST_P(SavedState, MaxSumAndTargetAreEnoughForCrossEntropy) {
  for (const tileloss_cross_entropy_options& options : option_sets()) {
    LogitsCase c({.rows = 5, .vocab = 2500, .format = GetParam(), .ignore_prob = 0.2});
    const tileloss_matrix dlogits = c.args().dlogits;
    RowStateArrays state(5);
    state.get().entropy_sum = state.get().collision_sum = state.get().smoothing_sum = nullptr;
    state.get().argmax = nullptr;
    c.args().row_state = &state.get();
    c.args().dlogits = {};
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_FORWARD, c.args(), &options, plan_options()));
    c.args().dlogits = dlogits;
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_BACKWARD, c.args(), &options, plan_options()));
    ASSERT_TRUE(agrees(check_cross_entropy(c, options)));
  }
}

TEST_P(SavedState, LogprobsWithAnEntropyGradientNeedsTheEntropySumToo) {
  LogitsCase c({.rows = 5,
                .vocab = 2500,
                .format = GetParam(),
                .ignore_prob = 0.2,
                .logp_grad = Upstream::kPerRow,
                .lse_grad = Upstream::kStrided,
                .entropy_grad = Upstream::kPerRow,
                .mean_logit_grad = Upstream::kPerRow,
                .loss = false});
  const tileloss_logprobs_options options = logprobs_options();
  const tileloss_args all = c.args();
  RowStateArrays state(5);
  state.get().collision_sum = state.get().smoothing_sum = nullptr;
  state.get().argmax = nullptr;
  c.args().row_state = &state.get();
  c.args().dlogits = {};
  c.args().logp_grad = c.args().lse_grad = c.args().entropy_grad = c.args().mean_logit_grad = {};
  ASSERT_TRUE(runs("logprobs", TILELOSS_FORWARD, c.args(), &options, plan_options()));
  c.args() = all;
  c.args().row_state = &state.get();
  ASSERT_TRUE(runs("logprobs", TILELOSS_BACKWARD, c.args(), &options, plan_options()));
  EXPECT_TRUE(agrees(check_logprobs(c, options)));
}

// value_and_grad fills a row state as well, with the forward's bits; ignored rows hold the identity.
TEST_P(SavedState, EveryForwardSavesTheSameState) {
  const tileloss_cross_entropy_options options = cross_entropy_options();
  std::vector<std::vector<std::vector<float>>> saved;
  LogitsCase c({.rows = 9, .vocab = 2500, .format = GetParam(), .ignore_prob = 0.3});
  const tileloss_matrix dlogits = c.args().dlogits;
  for (const int run : {0, 1, 2, 3}) {
    RowStateArrays state(9);
    c.args().row_state = &state.get();
    c.args().dlogits = run == 0 ? tileloss_matrix{} : dlogits;
    const auto schedule = static_cast<tileloss_schedule>(run);
    ASSERT_TRUE(runs("cross_entropy", run == 0 ? TILELOSS_FORWARD : TILELOSS_VALUE_AND_GRAD, c.args(), &options,
                     with_schedule(schedule)));
    saved.push_back(state.floats());
    EXPECT_EQ(saved.back(), saved.front()) << run;
    for (std::size_t i = 0; i < 9; ++i) {
      if (c.labels()[i] != -100) continue;
      EXPECT_EQ(state.floats()[0][i], -std::numeric_limits<float>::infinity());
      EXPECT_EQ(state.floats()[1][i], 0.0F);
      EXPECT_EQ(state.floats()[2][i], -std::numeric_limits<float>::infinity());
      EXPECT_EQ(state.argmax()[i], -1);
    }
  }
}

}  // namespace
}  // namespace tileloss::test
