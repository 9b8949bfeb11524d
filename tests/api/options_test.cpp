// Options of cross-entropy and logprobs beyond what property_test.cpp draws: numbers behind pointers, denominators of 0, strides.
#include <gtest/gtest.h>

#include <limits>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using Options = tileloss_cross_entropy_options;

class OptionsOf : public testing::TestWithParam<oracle::NumberFormat> {
 protected:
  LogitsCaseSpec spec() const {
    return {.rows = 8, .vocab = 2100, .format = GetParam(), .ignore_prob = 0.2, .extra_outputs = true};
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, OptionsOf, testing::ValuesIn(kFormats), format_name);

TEST_P(OptionsOf, ADenominatorOfZeroGivesZero) {
  const tileloss_cross_entropy_options options{.num_items = 0};
  LogitsCase c({.rows = 3, .vocab = 100, .format = GetParam()});
  ASSERT_TRUE(runs_value_and_grad(c, options));
  ASSERT_TRUE(agrees(check_cross_entropy(c, options)));
  EXPECT_EQ(float_at(c.args().loss, 0), 0.0F);

  // All token weights 0: the same, without num_items. An infinite loss does not turn it into NaN.
  LogitsCase weighted({.rows = 3, .vocab = 100, .format = GetParam()}, LogitsCase::Open{});
  weighted.set_logit(1, weighted.labels()[1], -std::numeric_limits<double>::infinity());
  weighted.seal();
  const std::vector<float> zeros(3, 0.0F);
  weighted.args().token_weights = tileloss_make_vector(zeros.data(), TILELOSS_FLOAT32, 3);
  ASSERT_TRUE(runs_value_and_grad(weighted, cross_entropy_options()));
  EXPECT_EQ(float_at(weighted.args().loss, 0), 0.0F);
  for (std::int64_t i = 0; i < 3; ++i) {
    for (std::int64_t j = 0; j < 100; ++j) ASSERT_EQ(weighted.dlogit(i, j), 0.0);
  }
}

// A row with mask 0 is one whose label is ignore_index, whatever its own label is.
TEST_P(OptionsOf, AMaskLeavesRowsOutAsALabelDoes) {
  for (const tileloss_reduction reduction : {TILELOSS_REDUCTION_NONE, TILELOSS_REDUCTION_MEAN}) {
    const tileloss_cross_entropy_options options{.label_smoothing = 0.1, .z_loss = 0.25, .reduction = reduction};
    LogitsCase c({.rows = 9, .vocab = 100, .format = GetParam(), .per_row_loss = reduction == TILELOSS_REDUCTION_NONE});
    std::vector<std::int64_t> ignored(c.labels().begin(), c.labels().end()), wrong = ignored;
    std::vector<std::uint8_t> mask(9, 1);
    for (const std::size_t i : {0, 3, 4, 8}) ignored[i] = -100, wrong[i] = 1 << 20, mask[i] = 0;
    const auto outputs = [&](const std::vector<std::int64_t>& labels, bool has_mask) {
      c.reset();
      c.args().labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, 9);
      c.args().mask = has_mask ? tileloss_make_vector(mask.data(), TILELOSS_UINT8, 9) : tileloss_vector{};
      EXPECT_TRUE(runs_value_and_grad(c, options));
      return outputs_of(c.args());
    };
    const auto wanted = outputs(ignored, false);
    EXPECT_TRUE(same_bits(outputs(wrong, true), wanted));
  }
}

// A plan made before the numbers are known serves all of them.
TEST_P(OptionsOf, NumbersBehindPointersAreReadAtTheCall) {
  float temperature = 1, num_items = 1;
  Options by_pointer = cross_entropy_options();
  by_pointer.logit.temperature.pointer = &temperature;
  by_pointer.num_items.pointer = &num_items;
  LogitsCase c(spec());
  auto plan = init<tileloss_plan>();
  ASSERT_TRUE(
      succeeds(tileloss_make_plan("cross_entropy", TILELOSS_VALUE_AND_GRAD, &c.args(), &by_pointer, nullptr, nullptr, &plan)));
  for (const auto& [t, n] : {std::pair{1.0F, 8.0F}, {0.5F, 1.0F}, {2.0F, 0.0F}}) {
    temperature = t;
    num_items = n;
    c.reset();
    ASSERT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&c.args(), &by_pointer, &plan, nullptr)));
    ASSERT_TRUE(agrees(check_cross_entropy(c, by_pointer)));
    const auto outputs = outputs_of(c.args());
    const tileloss_cross_entropy_options by_value{.logit = {.temperature = static_cast<double>(t)},
                                                  .num_items = static_cast<double>(n)};
    c.reset();
    ASSERT_TRUE(runs_value_and_grad(c, by_value));
    EXPECT_TRUE(same_bits(outputs_of(c.args()), outputs));
  }
  // Behind its pointer num_items can say "not given", too.
  num_items = std::numeric_limits<float>::quiet_NaN();
  c.reset();
  ASSERT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&c.args(), &by_pointer, &plan, nullptr)));
  EXPECT_TRUE(agrees(check_cross_entropy(c, by_pointer)));
}

TEST_P(OptionsOf, OutputsMayBeStrided) {
  LogitsCase c(spec());
  const tileloss_cross_entropy_options options = cross_entropy_options();
  ASSERT_TRUE(runs_value_and_grad(c, options));
  std::vector<float> logp(8 * 3, -5.0F);
  std::vector<std::uint8_t> correct(8 * 2, 77);
  tileloss_args args = c.args();
  args.logp = tileloss_make_vector(logp.data(), TILELOSS_FLOAT32, 8);
  args.logp.stride = 3;
  args.correct = tileloss_make_vector(correct.data(), TILELOSS_UINT8, 8);
  args.correct.stride = 2;
  const auto expected_logp = bytes_of(c.args().logp), expected_correct = bytes_of(c.args().correct);
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, args, &options, plan_options()));
  EXPECT_TRUE(same_bits(bytes_of(args.logp), expected_logp));
  EXPECT_TRUE(same_bits(bytes_of(args.correct), expected_correct));
  for (std::size_t i = 0; i < logp.size(); ++i) {
    if (i % 3 == 0) continue;
    EXPECT_EQ(logp[i], -5.0F);
  }
}

}  // namespace
}  // namespace tileloss::test
