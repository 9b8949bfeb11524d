// The sweeps at every size, stride, alignment and storage type, on memory between guard pages: inputs read-only, outputs NaN
// beforehand, the gaps between rows and the padding NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;

std::string describe(const LogitsCaseSpec& s) {
  return std::string(oracle::format_info(s.format).name) + " [" + std::to_string(s.rows) + "," + std::to_string(s.vocab) +
         "] valid " + std::to_string(s.valid_vocab) + " stride +" + std::to_string(s.stride_extra) + " misaligned " +
         std::to_string(s.misalignment) + (s.flush == Flush::kRight ? " flush right " : " flush left ") + s.distribution +
         (s.in_place ? " in place" : "");
}

testing::AssertionResult value_and_grad_agrees(const LogitsCaseSpec& spec, const tileloss_plan_options& hints) {
  LogitsCase c(spec);
  tileloss_cross_entropy_options options = cross_entropy_options();
  options.logit.valid_vocab = spec.valid_vocab;
  if (testing::AssertionResult result = runs_value_and_grad(c, options, hints); !result) return result << " " << describe(spec);
  if (testing::AssertionResult result = agrees(check_cross_entropy(c, options)); !result) return result << " " << describe(spec);
  return testing::AssertionSuccess();
}

tileloss_plan_options in_blocks_of(std::int64_t columns) {
  tileloss_plan_options hints = plan_options();
  hints.cpu.vocab_block = columns;
  return hints;
}

class SweepsOf : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SweepsOf, testing::ValuesIn(kFormats), format_name);

// Every small size with every schedule and side of the guard page; strides, misalignments and row counts take turns.
TEST_P(SweepsOf, StayInBoundsAndAgreeAtEverySmallSize) {
  std::size_t turn = 0;
  for (const std::int64_t vocab : kSmallVocabSizes) {
    for (const Flush flush : kFlushes) {
      for (const tileloss_schedule schedule : kSchedules) {
        for (const bool in_place : {false, true}) {
          ++turn;
          LogitsCaseSpec spec{.rows = turn % 3 == 0 ? 7 : 3, .vocab = vocab, .format = GetParam(), .flush = flush};
          spec.stride_extra = kStrideExtras[turn % kStrideExtras.size()];
          spec.misalignment = kMisalignments[turn / 4 % kMisalignments.size()];
          spec.in_place = in_place;
          spec.extra_outputs = turn % 2 == 0;
          spec.seed = turn;
          ASSERT_TRUE(value_and_grad_agrees(spec, with_schedule(schedule)));
        }
      }
    }
  }
}

TEST_P(SweepsOf, AgreeAtEverySizeUpTo200) {
  for (std::int64_t vocab = 1; vocab <= 200; ++vocab) {
    const LogitsCaseSpec spec{
        .rows = 3, .vocab = vocab, .misalignment = vocab % 5, .format = GetParam(), .seed = static_cast<std::uint64_t>(vocab)};
    ASSERT_TRUE(value_and_grad_agrees(spec, plan_options()));
  }
}

TEST_P(SweepsOf, StayInBoundsAndAgreeAtRealVocabularies) {
  std::size_t turn = 0;
  for (const std::int64_t vocab : kVocabSizes) {
    ++turn;
    LogitsCaseSpec spec{.rows = 2, .vocab = vocab, .format = GetParam(), .flush = kFlushes[turn % 2], .seed = turn};
    spec.stride_extra = kStrideExtras[turn % kStrideExtras.size()];
    spec.misalignment = kMisalignments[turn / 2 % kMisalignments.size()];
    ASSERT_TRUE(value_and_grad_agrees(spec, plan_options()));
    spec.in_place = true;
    spec.rows = 1;
    ASSERT_TRUE(
        value_and_grad_agrees(spec, with_schedule(turn % 2 == 0 ? TILELOSS_SCHEDULE_STASH : TILELOSS_SCHEDULE_RECOMPUTE)));
  }
}

TEST_P(SweepsOf, AgreeForEveryRowCount) {
  for (const std::int64_t rows : kRowCounts) {
    for (const std::int64_t extra : kStrideExtras) {
      const LogitsCaseSpec spec{.rows = rows, .vocab = 257, .stride_extra = extra, .format = GetParam(), .extra_outputs = true};
      for (const tileloss_schedule schedule : kSchedules) ASSERT_TRUE(value_and_grad_agrees(spec, with_schedule(schedule)));
    }
  }
}

// The padding holds NaN before and must be exactly 0 in the gradient.
TEST_P(SweepsOf, PaddingIsNeverReadAndItsGradientIsZero) {
  for (const auto& [vocab, valid] :
       {std::pair{64, 1}, {64, 63}, {100, 33}, {1000, 999}, {4100, 2048}, {4100, 2049}, {2049, 2049}}) {
    for (const tileloss_schedule schedule : kSchedules) {
      for (const bool in_place : {false, true}) {
        const LogitsCaseSpec spec{.rows = 3,
                                  .vocab = vocab,
                                  .valid_vocab = valid,
                                  .stride_extra = 3,
                                  .format = GetParam(),
                                  .extra_outputs = true,
                                  .in_place = in_place};
        ASSERT_TRUE(value_and_grad_agrees(spec, with_schedule(schedule)));
      }
    }
  }
}

TEST_P(SweepsOf, AgreeOnEveryInputFamily) {
  for (const std::string_view name : tools::distribution_names()) {
    for (const std::int64_t vocab : {17, 1000, 5000}) {
      for (const tileloss_schedule schedule : kSchedules) {
        const LogitsCaseSpec spec{
            .rows = 5, .vocab = vocab, .format = GetParam(), .distribution = std::string(name), .extra_outputs = true};
        ASSERT_TRUE(value_and_grad_agrees(spec, with_schedule(schedule)));
      }
    }
    const LogitsCaseSpec large{.rows = 2, .vocab = 50257, .format = GetParam(), .distribution = std::string(name)};
    ASSERT_TRUE(value_and_grad_agrees(large, plan_options()));
  }
}

// A maximum that appears late makes a block be done again: at the first, the last and each block's edges, label or not.
TEST_P(SweepsOf, SpikesAtTheEdgesOfVocabularyBlocks) {
  constexpr std::int64_t kVocab = 1000;
  for (const std::int64_t block : {64, 128, 512}) {
    for (const std::int64_t column : {std::int64_t{0}, block - 1, block, 2 * block - 1, 2 * block % kVocab, kVocab - 1}) {
      if (column >= kVocab) continue;
      for (const double height : {3.0, 5.0, 80.0}) {
        LogitsCase c({.rows = 4, .vocab = kVocab, .format = GetParam(), .extra_outputs = true}, LogitsCase::Open{});
        for (std::int64_t i = 0; i < 4; ++i) {
          // Row 0: the spike; row 1: at the label too; row 2: a staircase of ever higher maxima; row 3: plain.
          if (i < 2) c.set_logit(i, column, height);
          if (i == 1) c.set_logit(i, c.labels()[1], height);
          for (std::int64_t j = 0; i == 2 && j < kVocab; ++j) c.set_logit(i, j, height * static_cast<double>(j / block));
        }
        c.seal();
        ASSERT_TRUE(agrees_in_every_schedule(c, cross_entropy_options(), in_blocks_of(block)))
            << "block " << block << " column " << column << " height " << height;
      }
    }
  }
}

// A block that its quick way cannot take goes another than its neighbours, after the row before it was finished in the same loop:
// soft-capped with logits near the cap or beyond, of either sign; plain with masks.
void check_blocks_apart(NumberFormat format, double softcap, const std::vector<double>& heights) {
  constexpr std::int64_t kVocab = 1000;
  tileloss_cross_entropy_options options = cross_entropy_options();
  options.logit.softcap = softcap;
  int turn = 0;
  for (const std::int64_t block : {64, 128, 512}) {
    for (const std::int64_t column : {std::int64_t{0}, block - 1, block, 2 * block % kVocab, kVocab - 1}) {
      for (const double height : heights) {
        // Without further sums a row's backward and the next one's forward share a loop.
        const LogitsCaseSpec spec{
            .rows = 8,
            .vocab = kVocab,
            .format = format,
            .extra_outputs = ++turn % 2 == 0 && (height > -1e37 || std::isinf(height)),  // the mean logit would overflow
            .in_place = true};
        LogitsCase c(spec, LogitsCase::Open{});
        // Even rows: one in one block; rows 1 and 5: none; rows 3 and 7: one in every second block.
        for (std::int64_t i = 0; i < 8; ++i) {
          if (i % 2 == 0) c.set_logit(i, column, height);
          for (std::int64_t j = column % block; i % 4 == 3 && j < kVocab; j += 2 * block) c.set_logit(i, j, height);
        }
        c.seal();
        tileloss_plan_options hints = in_blocks_of(block);
        hints.cpu.threads = 1;
        ASSERT_TRUE(agrees_in_every_schedule(c, options, hints))
            << "block " << block << " column " << column << " height " << height;
      }
    }
  }
}

TEST_P(SweepsOf, CappedBlocksWithAndWithoutLargeLogits) {
  check_blocks_apart(GetParam(), 30, {20.0, 60.0, -20.0, -60.0, -std::numeric_limits<double>::infinity()});
}

TEST_P(SweepsOf, PlainBlocksWithAndWithoutMasks) {
  // -2^87: where the square in TableExp overflows.
  check_blocks_apart(GetParam(), 0,
                     {-1e4, -6e4, -1e15, -0x1p85, -0x1p87, -0x1p89, -1e30, -3.3e38, -std::numeric_limits<double>::infinity()});
}

// Maxima beyond what TableLinear's table can hold (120 log 2, about 83), beyond what is an exact offset, and just within.
TEST_P(SweepsOf, LogitsFarFromZero) {
  for (const double center : {80.5,     -80.5, 83.0,  -83.0,  84.0, -84.0, 100.0, -100.0, -6e4,  6e4,  90000.0, 91000.0,
                              -91000.0, 1e6,   1.1e7, -1.2e7, -1e8, -1e9,  1e10,  1e15,   -1e30, 1e37, -3e38}) {
    if (GetParam() == NumberFormat::kFloat16 && std::fabs(center) > 65000) continue;  // has no such numbers
    LogitsCase c({.rows = 3, .vocab = 1000, .format = GetParam(), .in_place = true},
                 [&](std::int64_t i, std::int64_t j) { return center * (1 + static_cast<double>((i + 7 * j) % 5) / 128); });
    ASSERT_TRUE(agrees_in_every_schedule(c, cross_entropy_options())) << center;
  }
}

// A capped logit of 30 tanh(u) shows every rounding of tanh 30 times: most where its slope is computed in another way, 0.75 of
// the cap, and beyond.
TEST_P(SweepsOf, SoftcapOfLogitsNearTheCap) {
  constexpr double kRanges[][2] = {{0, 0.75}, {0.4, 0.42}, {0.55, 0.57}, {0.74, 0.76}, {0.76, 1}, {1, 1.5}, {1.5, 6}};
  constexpr auto kRows = static_cast<std::int64_t>(std::size(kRanges));
  constexpr std::int64_t kVocab = 3000;
  for (const double cap : {5.0, 30.0, 50.0}) {
    LogitsCase c({.rows = kRows, .vocab = kVocab, .format = GetParam(), .extra_outputs = true},
                 [&](std::int64_t i, std::int64_t j) {
                   const double place = static_cast<double>((1237 * j) % kVocab) / kVocab;
                   return cap * (j % 2 == 0 ? 1 : -1) * std::lerp(kRanges[i][0], kRanges[i][1], place);
                 });
    ASSERT_TRUE(agrees_in_every_schedule(c, {.logit = {.softcap = cap}})) << cap;
  }
}

// Row by row, block by block: some can have their maximum in TableLinear's table, some cannot.
TEST_P(SweepsOf, MaximaThatEnterAndLeaveTheTablesRange) {
  constexpr double kCenters[][4] = {{80, 90, 70, 85}, {-90, -80, -95, -70}, {-120, -40, 10, 120}, {83, 83.5, 82.5, 84}};
  LogitsCase c({.rows = 4, .vocab = 1000, .format = GetParam(), .extra_outputs = true},
               [&](std::int64_t i, std::int64_t j) { return kCenters[i][j / 256] + static_cast<double>((i + 7 * j) % 5) / 4; });
  EXPECT_TRUE(agrees_in_every_schedule(c, cross_entropy_options(), in_blocks_of(256)));
}

// Nothing but a mask in the first blocks, then logits so far below 0 that a reference of 0 would make most of their exps vanish.
TEST_P(SweepsOf, LowLogitsAfterAMask) {
  LogitsCase c({.rows = 3, .vocab = 2000, .format = GetParam()}, [](std::int64_t i, std::int64_t j) {
    return j < 1024 ? -std::numeric_limits<double>::infinity() : -80 - static_cast<double>((i + 7 * j) % 59) / 4;
  });
  EXPECT_TRUE(agrees_in_every_schedule(c, cross_entropy_options(), in_blocks_of(256)));
}

// Many logits far below the maximum whose exps count all the same, next to the label and at the row's end too.
TEST_P(SweepsOf, EntropyOfWideLogitsUnderASmallScale) {
  for (const std::int64_t vocab : {20, 70, 1000}) {
    LogitsCase c({.rows = 3, .vocab = vocab, .format = GetParam(), .extra_outputs = true},
                 [](std::int64_t i, std::int64_t j) { return j % 7 == 3 ? 500 : -8.0 * static_cast<double>((i + 5 * j) % 100); });
    ASSERT_TRUE(agrees_in_every_schedule(c, {.logit = {.logit_scale = 0.01}})) << vocab;
  }
}

TEST_P(SweepsOf, AgreeForEveryVocabularyBlock) {
  for (std::int64_t block = 64; block <= 8192; block += block < 1024 ? 64 : 1024) {
    for (const tileloss_schedule schedule : {TILELOSS_SCHEDULE_STASH, TILELOSS_SCHEDULE_RECOMPUTE}) {
      tileloss_plan_options hints = in_blocks_of(block);
      hints.cpu.schedule = schedule;
      const LogitsCaseSpec spec{.rows = 2,
                                .vocab = 8300,
                                .format = GetParam(),
                                .distribution = block % 128 == 0 ? "wide" : "normal",
                                .extra_outputs = true};
      ASSERT_TRUE(value_and_grad_agrees(spec, hints)) << "vocab_block " << block;
    }
  }
}

TEST_P(SweepsOf, TheMarginOfAConfidentLabelKeepsItsDigits) {
  for (const double margin : {10.0, 16.0, 20.0, 24.0, 40.0, 80.0}) {
    LogitsCase c({.rows = 3, .vocab = 2500, .format = GetParam()}, LogitsCase::Open{});
    for (std::int64_t i = 0; i < 3; ++i) c.set_logit(i, c.labels()[static_cast<std::size_t>(i)], margin);
    c.seal();
    ASSERT_TRUE(agrees_in_every_schedule(c, cross_entropy_options())) << "margin " << margin;
  }
}

// Memory of all ones is a NaN whose payload a rounding must not carry away.
TEST_P(SweepsOf, AnUpstreamNanStaysNan) {
  LogitsCase c({.rows = 2, .vocab = 70, .format = GetParam()});
  const float upstream = std::bit_cast<float>(0xffffffffU);
  c.args().loss_grad = tileloss_make_vector(&upstream, TILELOSS_FLOAT32, 1);
  const tileloss_cross_entropy_options options = cross_entropy_options();
  for (const tileloss_schedule schedule : kSchedules) {
    c.reset();
    ASSERT_TRUE(runs_value_and_grad(c, options, with_schedule(schedule)));
    for (std::int64_t j = 0; j < 70; ++j) ASSERT_TRUE(std::isnan(c.dlogit(0, j)) && std::isnan(c.dlogit(1, j))) << j;
  }
}

}  // namespace
}  // namespace tileloss::test
