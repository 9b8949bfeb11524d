// What schedules, buffers and passes must not change: compared bit by bit.
#include <gtest/gtest.h>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;

class SchedulesOf : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SchedulesOf, testing::ValuesIn(kFormats), format_name);

TEST_P(SchedulesOf, LogpAndTheOtherOutputsAreBitwiseTheSameInEverySchedule) {
  for (const tileloss_cross_entropy_options& options : option_sets()) {
    for (const std::string distribution : {"normal", "wide", "spike_tile_edge"}) {
      for (const bool extra : {false, true}) {
        LogitsCase c({.rows = 9,
                      .vocab = 4500,
                      .format = GetParam(),
                      .distribution = distribution,
                      .ignore_prob = 0.2,
                      .extra_outputs = extra});
        std::vector<std::vector<unsigned char>> outputs;
        const tileloss_matrix dlogits = c.args().dlogits;
        for (const tileloss_schedule schedule : kSchedules) {
          c.reset();
          c.args().dlogits = dlogits;
          ASSERT_TRUE(runs_value_and_grad(c, options, with_schedule(schedule)));
          c.args().dlogits = {};
          outputs.push_back(outputs_of(c.args()));
        }
        c.reset();
        ASSERT_TRUE(runs("cross_entropy", TILELOSS_FORWARD, c.args(), &options, plan_options()));
        outputs.push_back(outputs_of(c.args()));
        for (std::size_t k = 1; k < outputs.size(); ++k)
          EXPECT_TRUE(same_bits(outputs[0], outputs[k])) << distribution << " " << k;
      }
    }
  }
}

TEST_P(SchedulesOf, LogpIsBitwiseTheSameWithAndWithoutTheOtherOutputs) {
  LogitsCase plain({.rows = 9, .vocab = 4500, .format = GetParam()});
  LogitsCase extra({.rows = 9, .vocab = 4500, .format = GetParam(), .extra_outputs = true});
  const tileloss_cross_entropy_options options = cross_entropy_options();
  ASSERT_TRUE(runs_value_and_grad(plain, options));
  ASSERT_TRUE(runs_value_and_grad(extra, options));
  EXPECT_TRUE(same_bits(bytes_of(plain.args().logp), bytes_of(extra.args().logp)));
  EXPECT_TRUE(same_bits(bytes_of(plain.args().lse), bytes_of(extra.args().lse)));
  EXPECT_TRUE(same_bits(bytes_of(plain.args().dlogits), bytes_of(extra.args().dlogits)));
}

TEST_P(SchedulesOf, LogprobsAndCrossEntropyGiveTheSameLogp) {
  LogitsCase c({.rows = 9, .vocab = 4500, .format = GetParam(), .loss = false, .dlogits = false});
  const tileloss_cross_entropy_options options = cross_entropy_options();
  ASSERT_TRUE(succeeds(tileloss_cross_entropy(&c.args(), &options, nullptr, nullptr)));
  const auto first = outputs_of(c.args());
  c.reset();
  ASSERT_TRUE(succeeds(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr)));
  EXPECT_TRUE(same_bits(first, outputs_of(c.args())));
}

TEST_P(SchedulesOf, OverTheLogitsIsBitwiseAsBesideThem) {
  for (const tileloss_cross_entropy_options& options : option_sets()) {
    for (const std::int64_t vocab : {33, 1000, 4500}) {
      for (const tileloss_schedule schedule : kSchedules) {
        LogitsCaseSpec spec{.rows = 9,
                            .vocab = vocab,
                            .stride_extra = 5,
                            .misalignment = 1,
                            .format = GetParam(),
                            .ignore_prob = 0.2,
                            .extra_outputs = true};
        LogitsCase beside(spec);
        spec.in_place = true;
        LogitsCase over(spec);
        ASSERT_EQ(over.args().dlogits.data, over.args().logits.data);
        ASSERT_TRUE(runs_value_and_grad(beside, options, with_schedule(schedule)));
        ASSERT_TRUE(runs_value_and_grad(over, options, with_schedule(schedule)));
        EXPECT_TRUE(same_bits(outputs_of(beside.args()), outputs_of(over.args())))
            << "vocab " << vocab << " schedule " << schedule;
      }
    }
  }
}

// Non-temporal stores are used where the output is aligned: the bits must not depend on it.
TEST_P(SchedulesOf, TheOutputsAlignmentDoesNotChangeTheBits) {
  const tileloss_cross_entropy_options options = cross_entropy_options();
  std::vector<unsigned char> first;
  for (const std::int64_t misalignment : {0, 1, 8, 31}) {
    for (const std::int64_t extra : {0, 1, 36}) {
      LogitsCase c({.rows = 5,
                    .vocab = 4060,
                    .stride_extra = extra,
                    .misalignment = misalignment,
                    .format = GetParam(),
                    .flush = Flush::kLeft});
      ASSERT_TRUE(runs_value_and_grad(c, options));
      const auto outputs = outputs_of(c.args());
      if (first.empty()) first = outputs;
      EXPECT_TRUE(same_bits(first, outputs)) << misalignment << " " << extra;
    }
  }
}

}  // namespace
}  // namespace tileloss::test
