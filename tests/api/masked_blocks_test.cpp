// Whole blocks of columns that hold a mask, and logits far from 0 whose blocks, tiles or shards lie far apart: what a row's
// running reference is first chosen by is not what its sum comes from.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "tests/api/calls.h"
#include "tests/shared/linear_case.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::int64_t kRows = 3, kVocab = 700, kBlock = 64;

class MaskedBlocks : public testing::TestWithParam<NumberFormat> {
 protected:
  // Columns [begin, end) of every row hold `mask`, the others `level` and a little.
  static void fill(LogitsCase& c, double mask, double level, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < kRows; ++i) {
      const std::int64_t label = c.labels()[static_cast<std::size_t>(i)];
      for (std::int64_t j = 0; j < kVocab; ++j) {
        const bool is_masked = j >= begin && j < end && j != label;
        c.set_logit(i, j, is_masked ? mask : level + static_cast<double>((i * 7 + j * 13) % 31) / 8);
      }
    }
  }
  static testing::AssertionResult agree(LogitsCase& c, const tileloss_cross_entropy_options& options) {
    tileloss_plan_options hints = plan_options();
    hints.cpu.vocab_block = kBlock;
    hints.cpu.threads = 1;
    return agrees_in_every_schedule(c, options, hints);
  }
  static double lowest() { return GetParam() == NumberFormat::kFloat16 ? -65504 : -3.38e38; }
};
INSTANTIATE_TEST_SUITE_P(Formats, MaskedBlocks, testing::ValuesIn(kFormats), format_name);

TEST_P(MaskedBlocks, AtTheBeginningInTheMiddleAndAtTheEnd) {
  for (const double mask : {-kInf, -1e4, -3e4, -2e9, -1e10, -1e12, -1e20, -1e30, lowest()}) {
    if (mask > -kInf && mask < lowest()) continue;
    for (const double level : {0.0, -50.0, -90.0, -200.0, -1000.0}) {
      for (const double temperature : {1.0, 0.7, 0.1}) {
        if (mask < -1e37 && temperature < 1) continue;  // z itself leaves float32
        for (const std::int64_t begin : {0, 192, 448}) {
          LogitsCase c({.rows = kRows, .vocab = kVocab, .format = GetParam()}, LogitsCase::Open{});
          fill(c, mask, level, begin, begin == 448 ? kVocab : begin + 2 * kBlock);
          c.seal();
          const tileloss_cross_entropy_options options{.logit = {.temperature = temperature},
                                                       .reduction = TILELOSS_REDUCTION_SUM};
          ASSERT_TRUE(agree(c, options)) << mask << " before " << level << " from " << begin << ", T " << temperature;
        }
      }
    }
  }
}

// Under a soft-cap -inf is -cap: a row of that alone has a distribution, however far below 0 it lies.
TEST_P(MaskedBlocks, ARowOfMinusInfinityUnderASoftcapIsUniform) {
  for (const auto& [softcap, temperature] : {std::pair{20.0, 1.0}, {30.0, 0.5}, {30.0, 0.3}, {50.0, 0.5}, {20.0, 0.2}}) {
    LogitsCase c({.rows = kRows, .vocab = kVocab, .format = GetParam()}, [](std::int64_t, std::int64_t) { return -kInf; });
    const tileloss_cross_entropy_options options{.logit = {.softcap = softcap, .temperature = temperature}};
    ASSERT_TRUE(agree(c, options)) << softcap << " / " << temperature;
    EXPECT_NEAR(float_at(c.args().loss, 0), std::log(static_cast<double>(kVocab)), 1e-5);
  }
}

// A reference may stay behind by 60 powers of 2, and the label's logit lie another 70 above that: the row's gradient is all in
// the block then, far below 1, but float32 has it.
TEST_P(MaskedBlocks, ABlockFarBelowALaterOneKeepsItsGradients) {
  for (const auto& [spike, top] : {std::pair{20.0, 75.0}, {30.0, 85.0}, {37.0, 90.0}, {37.0, 100.0}, {37.0, 110.0}}) {
    LogitsCase c({.rows = kRows, .vocab = kVocab, .format = GetParam()}, LogitsCase::Open{});
    fill(c, 0, 0, 0, kVocab);
    for (std::int64_t i = 0; i < kRows; ++i) {
      for (const std::int64_t j : {70, 400}) c.set_logit(i, j, spike);
      c.set_logit(i, c.labels()[static_cast<std::size_t>(i)], top);
    }
    c.seal();
    const tileloss_cross_entropy_options options{.reduction = TILELOSS_REDUCTION_SUM};
    ASSERT_TRUE(agree(c, options)) << spike << " before " << top;
  }
}

// The same under a soft-cap, whose slope is in other units on AVX-512: with a small upstream float32 would flush the first
// block's gradient, 1.6 % of the row's largest.
TEST_P(MaskedBlocks, ASoftcappedBlockFarBelowALaterOneKeepsItsGradients) {
  for (const auto& [softcap, temperature, items] : {std::tuple{200.0, 1.0, 0x1p52}, {30.0, 0.5, 0x1p60}, {50.0, 1.0, 0x1p56}}) {
    LogitsCase c({.rows = kRows, .vocab = kVocab, .format = GetParam()}, LogitsCase::Open{});
    for (std::int64_t i = 0; i < kRows; ++i) {
      for (std::int64_t j = 0; j < kVocab; ++j) c.set_logit(i, j, j < kBlock ? 0 : 41);
      c.set_logit(i, c.labels()[static_cast<std::size_t>(i)], 41.5);
    }
    c.seal();
    const tileloss_cross_entropy_options options{.logit = {.softcap = softcap, .temperature = temperature}, .num_items = items};
    ASSERT_TRUE(agree(c, options)) << softcap << " / " << temperature;
  }
}

// A row's bits do not depend on what its thread does next: not the sign of a 0 either.
TEST_P(MaskedBlocks, TheSignOfZeroDoesNotDependOnTheNextRow) {
  const auto first_row = [](std::int64_t rows, double upstream) {
    LogitsCase c({.rows = rows, .vocab = kVocab, .format = GetParam()}, LogitsCase::Open{});
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 1; j < kVocab; j += 2) c.set_logit(i, j, -kInf);
    }
    c.seal();
    const auto scale = static_cast<float>(upstream);
    c.args().loss_grad = tileloss_make_vector(&scale, TILELOSS_FLOAT32, 1);
    const tileloss_cross_entropy_options options{.reduction = TILELOSS_REDUCTION_SUM};
    tileloss_plan_options hints = plan_options();
    hints.cpu.threads = 1;
    EXPECT_TRUE(runs_value_and_grad(c, options, hints));
    const auto* bytes = static_cast<const unsigned char*>(c.args().dlogits.data);
    return std::vector<unsigned char>(bytes, bytes + kVocab * static_cast<std::int64_t>(oracle::format_info(GetParam()).bytes));
  };
  for (const double upstream : {1.0, -1.0}) EXPECT_TRUE(same_bits(first_row(1, upstream), first_row(2, upstream))) << upstream;
}

// Classes 0 to 499 lie a little or far below the others, which lie far from 0 themselves: tiles whose maximum is not the row's.
TEST(MaskedTiles, FarFromZeroAndFarApart) {
  for (const double level : {-1e6, -1e8, -1e9, -1e30, 1e8}) {
    for (const double ratio : {1.0, 1.0000002, 1.5}) {
      for (const tileloss_schedule schedule : kSchedules) {
        LinearCaseSpec with{
            .row = {.rows = 5, .vocab = 1000},
            .hidden = 16,
            .format = NumberFormat::kFloat32,
            .head_format = NumberFormat::kFloat32,
            .bias = true,
            .bias_of = [=](std::int64_t v) { return v >= 500    ? level
                                                    : level < 0 ? level * ratio
                                                                : level / ratio; },
            .dbias = true};
        LinearCase c(with);
        const tileloss_cross_entropy_options options{.reduction = TILELOSS_REDUCTION_SUM};
        ASSERT_TRUE(runs("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, with_schedule(schedule)));
        EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options))) << level << " x " << ratio << ", schedule " << schedule;
      }
    }
  }
}

TEST(MaskedTiles, AMeanLogitOfPlusInfinity) {
  LinearCaseSpec with{.row = {.rows = 5, .vocab = 1000, .loss = false, .extra_outputs = true, .dlogits = false},
                      .hidden = 16,
                      .format = NumberFormat::kFloat32,
                      .head_format = NumberFormat::kFloat32,
                      .bias = true,
                      .bias_of = [](std::int64_t v) { return v == 700 ? kInf : 0.0; },
                      .dhidden = false,
                      .dhead = false};
  LinearCase c(with);
  const tileloss_logprobs_options options = logprobs_options();
  ASSERT_TRUE(runs("linear_logprobs", TILELOSS_FORWARD, c.args(), &options, plan_options()));
  EXPECT_TRUE(agrees(check_linear_logprobs(c, options)));
  EXPECT_EQ(float_at(c.args().mean_logit, 0), static_cast<float>(kInf));
}

}  // namespace
}  // namespace tileloss::test
