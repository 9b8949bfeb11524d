// Logits kept in dhead's own memory until dhead is stored there: where the plan does so, that the gradients keep to the oracle's
// bound and to the same bits, and that nothing of the logits is left behind.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "tests/api/kept_calls.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;

// ------------------------------------------------------------------------------------------------------------ the choice

TEST(LinearPlan, DheadHoldsTheLogitsOfAsManyRowsAsItHasRoomFor) {
  tileloss_cross_entropy_options plain = cross_entropy_options(), capped = plain;
  capped.logit.softcap = 30;  // logits in float32
  const HeadShape fp32{.dtype = TILELOSS_FLOAT32, .dhead_dtype = TILELOSS_FLOAT32};
  const HeadShape fp16{.dtype = TILELOSS_FLOAT16, .dhead_dtype = TILELOSS_FLOAT16};
  const HeadShape bf16_from_fp32{.dhead_dtype = TILELOSS_FLOAT32};
  HeadShape across = bf16_from_fp32, gaps = bf16_from_fp32, adding = bf16_from_fp32, bf16_across, few = {.rows = 1400};
  across.dhead_layout = bf16_across.dhead_layout = MatrixLayout::kTransposed;
  gaps.dhead_layout = MatrixLayout::kGaps;
  adding.accumulate = true;
  const struct {
    const char* name;
    HeadShape shape;
    std::int64_t rows;
    std::int64_t capped_rows;
  } cases[] = {{"words in bfloat16", {}, 1536, 0},
               {"words in bfloat16, all rows", few, 1400, 0},
               {"words in float32", bf16_from_fp32, 2048, 1536},
               {"[H,V]", across, 2048, 1536},
               {"[H,V] in bfloat16", bf16_across, 1536, 0},
               {"float32", fp32, 1536, 1536},
               {"float32 in float16", fp16, 0, 0},
               {"gaps between rows", gaps, 0, 0},
               {"added to", adding, 0, 0},
               {"frozen head", {.dhead = false}, 0, 0}};
  for (const auto& c : cases) {
    EXPECT_EQ(plan_of(c.shape, 0).cpu.kept_rows, c.rows) << c.name;
    EXPECT_EQ(plan_of(c.shape, 0, TILELOSS_SCHEDULE_AUTO, capped).cpu.kept_rows, c.capped_rows) << c.name;
    EXPECT_EQ(plan_of(c.shape, 0, TILELOSS_SCHEDULE_RECOMPUTE, plain).cpu.kept_rows, 0) << c.name;
  }
}

// The planner's own choice computes nothing twice. What it takes is the maxima of the tiles in dhead, and with a 16-bit dhead the
// words and maxima of the 512 rows that it has no room for.
TEST(LinearPlan, WhatDheadHoldsCostsNoWorkspace) {
  const HeadShape bf16, fp32{.dhead_dtype = TILELOSS_FLOAT32};
  const tileloss_plan recompute = plan_of(bf16, 0, TILELOSS_SCHEDULE_RECOMPUTE);
  const double of_recompute = recompute.predicted_ms;
  constexpr double kLastTile = 128. / 151936;  // not a whole one: its logits are made again
  for (const HeadShape& shape : {bf16, fp32}) {
    const tileloss_plan plan = plan_of(shape, 0);
    EXPECT_EQ(plan.cpu.kept_columns, shape.vocab);
    EXPECT_GE(plan.cpu.row_block, shape.rows);
    EXPECT_NEAR(plan.predicted_ms / of_recompute, 0.75, kLastTile);
  }
  const std::int64_t tiles = (bf16.vocab + recompute.cpu.vocab_block - 1) / recompute.cpu.vocab_block;
  const std::int64_t maxima = bf16.rows * tiles * 4, words = 512 * tiles * recompute.cpu.vocab_block * 2;
  EXPECT_LE(plan_of(bf16, 0).workspace_bytes, recompute.workspace_bytes + maxima + words);
  EXPECT_LE(plan_of(fp32, 0).workspace_bytes, recompute.workspace_bytes + maxima);
  const tileloss_plan tight = plan_of(bf16, 128 * kMiB);
  EXPECT_EQ(tight.cpu.kept_rows, 1536);
  EXPECT_GT(tight.cpu.kept_columns, 0);
  EXPECT_LT(tight.cpu.kept_columns, bf16.vocab);
  EXPECT_LT(tight.workspace_bytes, 128 * kMiB);
  const double made_again = 512. / 2048 * (1 - static_cast<double>(tight.cpu.kept_columns) / 151936);
  EXPECT_NEAR(tight.predicted_ms / of_recompute, (3 + made_again) / 4, kLastTile);
}

// ----------------------------------------------------------------------------------------------------------- the results

struct InDhead {
  const char* name;
  NumberFormat format = NumberFormat::kBfloat16;
  bool float32_dhead = true;
  MatrixLayout layout = MatrixLayout::kRows;
  double softcap = 0;
  std::int64_t rows = 128;  // that dhead holds, of 200
};

// 15 whole tiles and 41 columns; 160 rows in use or so.
LinearCaseSpec spec_of(const InDhead& p, std::uint64_t seed) {
  return {.row = {.rows = 200,
                  .vocab = 1001,
                  .misalignment = static_cast<std::int64_t>(seed % 4),
                  .flush = seed % 2 == 0 ? Flush::kRight : Flush::kLeft,
                  .seed = seed,
                  .ignore_prob = 0.2},
          .hidden = 136,
          .format = p.format,
          .head_format = p.format,
          .head_layout = p.layout,
          .bias = true,
          .dbias = true,
          .float32_dhead = p.float32_dhead};
}

class LinearInDhead : public testing::TestWithParam<InDhead> {};
INSTANTIATE_TEST_SUITE_P(
    Kinds, LinearInDhead,
    testing::Values(InDhead{.name = "bf16_in_bf16", .float32_dhead = false}, InDhead{.name = "bf16_in_fp32", .rows = 200},
                    InDhead{.name = "bf16_in_bf16_across", .float32_dhead = false, .layout = MatrixLayout::kTransposed},
                    InDhead{.name = "bf16_in_fp32_across", .layout = MatrixLayout::kTransposed, .rows = 200},
                    InDhead{.name = "capped_in_fp32", .softcap = 20},
                    InDhead{.name = "capped_in_fp32_across", .layout = MatrixLayout::kTransposed, .softcap = 20},
                    InDhead{.name = "fp32", .format = NumberFormat::kFloat32},
                    InDhead{.name = "fp32_across", .format = NumberFormat::kFloat32, .layout = MatrixLayout::kTransposed},
                    InDhead{.name = "fp16_in_fp32", .format = NumberFormat::kFloat16}),
    [](const auto& param) { return std::string(param.param.name); });

tileloss_cross_entropy_options options_of(const InDhead& p) { return {.logit = {.softcap = p.softcap}}; }

TEST_P(LinearInDhead, AgreesAndGivesTheSameBitsWhateverElseIsKept) {
  const tileloss_cross_entropy_options options = options_of(GetParam());
  for (const std::uint64_t seed : {41, 42, 43}) {
    LinearCase c(spec_of(GetParam(), seed));
    const KeptRun all = run_within(c, options, stash_of_columns());
    EXPECT_EQ(all.plan.cpu.kept_rows, GetParam().rows);
    EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options))) << seed;
    if (GetParam().rows == 200) continue;
    for (const double share : {0.5, 0.0}) {
      const KeptRun some = run_within(c, options, stash_of_columns(budget_for(all.plan, share)));
      EXPECT_EQ(some.plan.cpu.kept_rows, GetParam().rows);
      EXPECT_LT(some.plan.cpu.kept_columns, 1001);
      EXPECT_TRUE(same_bits(some.bytes, all.bytes)) << seed << " " << share;
    }
  }
}

TEST_P(LinearInDhead, GivesTheBitsOfLogitsInTheWorkspace) {
  const tileloss_cross_entropy_options options = options_of(GetParam());
  LinearCaseSpec with = spec_of(GetParam(), 44);
  LinearCase in_dhead(with);
  with.head_layout = MatrixLayout::kGaps;
  LinearCase in_workspace(with);
  EXPECT_GT(run_within(in_dhead, options, stash_of_columns()).plan.cpu.kept_rows, 0);
  EXPECT_EQ(run_within(in_workspace, options, stash_of_columns()).plan.cpu.kept_rows, 0);
  for (const auto& which : {&LinearCase::dhidden, &LinearCase::dhead, &LinearCase::dbias}) {
    const oracle::StoredMatrix &a = (in_dhead.*which)().view(), &b = (in_workspace.*which)().view();
    for (std::int64_t i = 0; i < a.rows; ++i) {
      for (std::int64_t j = 0; j < a.cols; ++j) ASSERT_EQ(a.at(i, j), b.at(i, j)) << i << " " << j;
    }
  }
}

TEST_P(LinearInDhead, ThreadsDoNotChangeABit) {
  const tileloss_cross_entropy_options options = options_of(GetParam());
  LinearCase c(spec_of(GetParam(), 45));
  std::vector<unsigned char> first;
  for (const int threads : {1, 2, 5}) {
    tileloss_plan_options hints = stash_of_columns();
    hints.cpu.threads = threads;
    const KeptRun r = run_within(c, options, hints);
    EXPECT_GT(r.plan.cpu.kept_rows, 0);
    if (first.empty()) first = r.bytes;
    EXPECT_TRUE(same_bits(r.bytes, first)) << threads;
  }
}

// No row in use, or classes without logits: dhead is 0 there, whatever lay in it.
TEST_P(LinearInDhead, NothingOfTheLogitsIsLeftBehind) {
  tileloss_cross_entropy_options options = options_of(GetParam());
  LinearCaseSpec with = spec_of(GetParam(), 46);
  with.row.valid_vocab = options.logit.valid_vocab = 700;
  for (const double ignored : {0.5, 0.99, 1.0}) {
    with.row.ignore_prob = ignored;
    LinearCase c(with);
    EXPECT_GT(run_within(c, options, stash_of_columns()).plan.cpu.kept_rows, 0);
    EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options))) << ignored;
  }
}

// A plan for a dhead that is stored does not fit one that is added to: its logits would be lost.
TEST(LinearInDhead, ThePlanIsRefusedWhereDheadIsAddedTo) {
  const tileloss_cross_entropy_options options = cross_entropy_options();
  LinearCase c(spec_of({.name = "", .rows = 200}, 47));
  tileloss_plan plan = run_within(c, options, stash_of_columns()).plan;
  tileloss_cross_entropy_options adding = options;
  adding.linear.accumulate = 1;
  EXPECT_EQ(tileloss_call("linear_cross_entropy", kBoth, &c.args(), &adding, &plan, nullptr), TILELOSS_PLAN_MISMATCH)
      << tileloss_last_error();
}

}  // namespace
}  // namespace tileloss::test
