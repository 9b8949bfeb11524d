// The row outputs where they are not just numbers: ties, and what each needs to be asked for.
// On toy and cuda: RowOutputsOf.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;

class RowOutputsOf : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, RowOutputsOf, testing::ValuesIn(kFormats), format_name);

std::int64_t argmax_of(const LogitsCase& c, std::int64_t row) {
  return static_cast<const std::int64_t*>(c.args().argmax.data)[row];
}

TEST_P(RowOutputsOf, TheLowestOfTiedMaximaIsTheArgmax) {
  constexpr std::int64_t kVocab = 5000;
  for (const auto& [low, high] :
       {std::pair{0, 1}, {0, 4999}, {63, 64}, {2047, 2048}, {2048, 4999}, {100, 101}, {31, 32}, {4096, 4998}}) {
    for (const bool label_is_low : {false, true}) {
      LogitsCase c({.rows = 1, .vocab = kVocab, .format = GetParam(), .extra_outputs = true, .dlogits = false},
                   LogitsCase::Open{});
      c.set_logit(0, low, 9);
      c.set_logit(0, high, 9);
      c.seal();
      const std::int64_t label = label_is_low ? low : high;
      c.args().labels = tileloss_make_vector(&label, TILELOSS_INT64, 1);
      ASSERT_TRUE(succeeds(tileloss_cross_entropy(&c.args(), nullptr, nullptr, nullptr)));
      EXPECT_EQ(argmax_of(c, 0), low);
      EXPECT_EQ(*static_cast<const std::uint8_t*>(c.args().correct.data), label_is_low ? 1 : 0);
    }
  }
}

TEST_P(RowOutputsOf, EqualLogitsHaveTheirFirstAsArgmax) {
  for (const std::int64_t vocab : {1, 2, 31, 64, 2049}) {
    LogitsCase c({.rows = 2, .vocab = vocab, .format = GetParam(), .extra_outputs = true, .dlogits = false}, LogitsCase::Open{});
    for (std::int64_t j = 0; j < vocab; ++j) {
      c.set_logit(0, j, 0.5);
      c.set_logit(1, j, -3);
    }
    c.seal();
    ASSERT_TRUE(succeeds(tileloss_cross_entropy(&c.args(), nullptr, nullptr, nullptr)));
    EXPECT_EQ(argmax_of(c, 0), 0);
    EXPECT_EQ(argmax_of(c, 1), 0);
    EXPECT_TRUE(agrees(check_cross_entropy(c, cross_entropy_options())));
  }
}

// The maximum is in the sum where it is not the label: beside its 1 a float32 lane drops every term below 2^-24, thousands of
// them.
TEST_P(RowOutputsOf, ALongTailBesideAMaximumThatIsNotTheLabel) {
  constexpr std::int64_t kVocab = 8192;
  for (const double tail : {-12.0, -16.0, -16.5, -17.0, -18.0}) {
    for (const double of_label : {tail, -0.25}) {
      LogitsCase c({.rows = 1, .vocab = kVocab, .format = GetParam(), .extra_outputs = true, .dlogits = false},
                   LogitsCase::Open{});
      const std::int64_t label = c.labels()[0];
      for (std::int64_t j = 0; j < kVocab; ++j) c.set_logit(0, j, tail);
      c.set_logit(0, label == 100 ? 101 : 100, 0);
      c.set_logit(0, label, of_label);
      c.seal();
      ASSERT_TRUE(succeeds(tileloss_cross_entropy(&c.args(), nullptr, nullptr, nullptr)));
      double sum = 1, moment = 0, collision = 1;
      for (const auto& [z, count] : {std::pair{tail, kVocab - 2.0}, {of_label, 1.0}}) {
        sum += count * std::exp(z);
        moment += count * z * std::exp(z);
        collision += count * std::exp(2 * z);
      }
      const double lse = std::log(sum);
      EXPECT_NEAR(float_at(c.args().lse, 0), lse, 2e-6) << tail << ", label " << of_label;
      EXPECT_NEAR(float_at(c.args().logp, 0), of_label - lse, 2e-6) << tail << ", label " << of_label;
      EXPECT_NEAR(float_at(c.args().entropy, 0), lse - moment / sum, 2e-6) << tail << ", label " << of_label;
      EXPECT_NEAR(float_at(c.args().log_sum_sq_probs, 0), std::log(collision) - 2 * lse, 4e-6) << tail << ", label " << of_label;
    }
  }
}

// Terms of one sign and size: each addition to a long sum rounds the same way.
TEST_P(RowOutputsOf, TheSmoothingSumOfEqualLogits) {
  constexpr std::int64_t kVocab = 8192;
  for (const double level : {-3.75, -5.125, -17.25}) {
    LogitsCase c({.rows = 1, .vocab = kVocab, .format = GetParam(), .dlogits = false}, LogitsCase::Open{});
    for (std::int64_t j = 0; j < kVocab; ++j) c.set_logit(0, j, level);
    const std::int64_t top = c.labels()[0] == 100 ? 101 : 100;
    c.set_logit(0, top, 0);
    c.seal();
    const tileloss_cross_entropy_options options{.label_smoothing = 0.1};
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_FORWARD, c.args(), &options, plan_options()));
    const double lse = std::log1p((kVocab - 1) * std::exp(level)), mean = level * (kVocab - 1) / kVocab;
    const double loss = lse - 0.9 * level - 0.1 * mean;
    EXPECT_NEAR(float_at(c.args().loss, 0), loss, loss * 0x1p-18) << level;
  }
}

// -0 and +0 tie.
TEST_P(RowOutputsOf, SignedZerosTie) {
  LogitsCase c({.rows = 1, .vocab = 70, .format = GetParam(), .extra_outputs = true, .dlogits = false}, LogitsCase::Open{});
  for (std::int64_t j = 0; j < 70; ++j) c.set_logit(0, j, j == 5 ? -0.0 : (j == 66 ? 0.0 : -1.0));
  c.seal();
  ASSERT_TRUE(succeeds(tileloss_cross_entropy(&c.args(), nullptr, nullptr, nullptr)));
  EXPECT_EQ(argmax_of(c, 0), 5);
}

// Each output asked for alone has the bits that it has among all of them.
TEST_P(RowOutputsOf, AnOutputDoesNotDependOnWhichOthersAreAskedFor) {
  LogitsCase all({.rows = 6, .vocab = 3000, .format = GetParam(), .ignore_prob = 0.2, .extra_outputs = true, .dlogits = false});
  ASSERT_TRUE(succeeds(tileloss_cross_entropy(&all.args(), nullptr, nullptr, nullptr)));
  for (const auto member :
       {&tileloss_args::loss, &tileloss_args::logp, &tileloss_args::lse, &tileloss_args::entropy, &tileloss_args::argmax,
        &tileloss_args::correct, &tileloss_args::log_sum_sq_probs, &tileloss_args::mean_logit}) {
    const auto expected = bytes_of(all.args().*member);
    LogitsCase one({.rows = 6, .vocab = 3000, .format = GetParam(), .ignore_prob = 0.2, .extra_outputs = true, .dlogits = false});
    auto args = init<tileloss_args>();
    args.logits = one.args().logits;
    args.labels = one.args().labels;
    args.*member = one.args().*member;
    ASSERT_TRUE(succeeds(tileloss_cross_entropy(&args, nullptr, nullptr, nullptr)));
    EXPECT_TRUE(same_bits(bytes_of(args.*member), expected));
  }
}

TEST_P(RowOutputsOf, NoOutputsAtAllIsFine) {
  LogitsCase c({.rows = 3, .vocab = 100, .format = GetParam(), .loss = false, .row_outputs = false, .dlogits = false});
  EXPECT_TRUE(succeeds(tileloss_cross_entropy(&c.args(), nullptr, nullptr, nullptr)));
  EXPECT_TRUE(succeeds(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr)));
}

TEST_P(RowOutputsOf, OneColumnHasNoEntropyAndNoGradient) {
  LogitsCase c({.rows = 4, .vocab = 1, .format = GetParam(), .extra_outputs = true});
  tileloss_cross_entropy_options options = cross_entropy_options();
  ASSERT_TRUE(runs_value_and_grad(c, options));
  ASSERT_TRUE(agrees(check_cross_entropy(c, options)));
  for (std::int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(float_at(c.args().logp, i), 0.0F);
    EXPECT_EQ(float_at(c.args().entropy, i), 0.0F);
    EXPECT_EQ(c.dlogit(i, 0), 0.0);
    EXPECT_EQ(static_cast<double>(float_at(c.args().lse, i)), c.logits_row(i)[0]);
  }
  // z-loss is all that is left: 2 zeta z.
  options.z_loss = 0.25;
  options.reduction = TILELOSS_REDUCTION_SUM;
  c.reset();
  ASSERT_TRUE(runs_value_and_grad(c, options));
  ASSERT_TRUE(agrees(check_cross_entropy(c, options)));
  for (std::int64_t i = 0; i < 4; ++i) EXPECT_NEAR(c.dlogit(i, 0), 0.5 * c.logits_row(i)[0], 0.01);
}

}  // namespace
}  // namespace tileloss::test
