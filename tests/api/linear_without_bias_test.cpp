// The LM head without a bias, in bfloat16: where a processor with tile registers does the softmax beside the products, and packs
// dz as soon as it is made. Sizes on either side of its registers of 16 and 32 rows, its panels of 48 columns and its blocks of
// rows.
// On cuda: LinearWithoutBias.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/api/kept_calls.h"

namespace tileloss::test {
namespace {

LinearCaseSpec spec_of(std::int64_t rows, std::int64_t vocab, std::int64_t hidden, std::uint64_t seed) {
  return {.row = {.rows = rows,
                  .vocab = vocab,
                  .misalignment = static_cast<std::int64_t>(seed % 3),
                  .flush = seed % 2 == 0 ? Flush::kRight : Flush::kLeft,
                  .seed = seed,
                  .ignore_prob = 0.2},
          .hidden = hidden,
          .hidden_layout = static_cast<MatrixLayout>(seed / 3 % 3),
          .head_layout = static_cast<MatrixLayout>(seed % 3),
          .float32_dhead = seed % 4 < 2,
          .accumulate = seed % 5 == 0};
}

TEST(LinearWithoutBias, AgreesAtEverySize) {
  std::uint64_t seed = 0;
  for (const std::int64_t rows : {1, 31, 33, 70}) {
    for (const std::int64_t vocab : {1, 47, 49, 193, 401}) {
      for (const std::int64_t hidden : {1, 33, 65}) {
        const LinearCaseSpec spec = spec_of(rows, vocab, hidden, ++seed);
        tileloss_plan_options hints = with_schedule(kSchedules[seed % 3]);
        if (seed % 2 == 0) hints.cpu.vocab_block = 64;
        EXPECT_TRUE(value_and_grad_agrees(spec, cross_entropy_options(), hints));
      }
    }
  }
}

// More rows than lie along k in a product of dhead, and rows at a time: the last block is shorter.
TEST(LinearWithoutBias, BlocksOfRowsAgree) {
  const LinearCaseSpec many = spec_of(2100, 70, 9, 2);
  for (const tileloss_schedule schedule : kSchedules) {
    EXPECT_TRUE(value_and_grad_agrees(many, cross_entropy_options(), with_schedule(schedule))) << schedule;
  }
  for (const bool float32_dhead : {false, true}) {
    for (const MatrixLayout layout : {MatrixLayout::kRows, MatrixLayout::kTransposed, MatrixLayout::kGaps}) {
      LinearCaseSpec spec = spec_of(150, 700, 100, 31);
      spec.float32_dhead = float32_dhead;
      spec.head_layout = layout;
      tileloss_plan_options hints = with_schedule(TILELOSS_SCHEDULE_STASH);
      hints.cpu.row_block = 64;
      hints.cpu.chunk_columns = 512;
      EXPECT_TRUE(value_and_grad_agrees(spec, cross_entropy_options(), hints));
    }
  }
}

TEST(LinearWithoutBias, EverySubsetOfGradientsAgrees) {
  for (const tileloss_schedule schedule : kSchedules) {
    for (int subset = 0; subset < 3; ++subset) {
      LinearCaseSpec spec = spec_of(70, 300, 40, 51);
      spec.dhidden = subset != 1;
      spec.dhead = subset != 0;
      spec.accumulate = spec.dhead && subset == 1;
      const tileloss_plan_options hints = with_schedule(schedule);
      EXPECT_TRUE(value_and_grad_agrees(spec, cross_entropy_options(), hints)) << "subset " << subset;
    }
  }
}

TEST(LinearWithoutBias, EveryOutputOfARowAndEveryTransformAgrees) {
  for (const tileloss_schedule schedule : kSchedules) {
    for (int variant = 0; variant < 8; ++variant) {
      LinearCaseSpec spec = spec_of(50, 300, 24, 61);
      spec.row.valid_vocab = 290;
      spec.row.class_weights = variant == 1;
      spec.row.token_weights = variant == 2;
      spec.row.extra_outputs = variant != 3;
      if (variant == 6) spec.label_logit = 45;
      tileloss_cross_entropy_options options{.logit = {.valid_vocab = 290}};
      if (variant == 3) options.z_loss = 0.01;
      if (variant == 4) options.label_smoothing = 0.1;
      if (variant == 5) options.logit.logit_scale = 6;
      if (variant == 6) options.logit.temperature.value = 0.7;
      if (variant == 7) options.logit.softcap = 10;
      EXPECT_TRUE(value_and_grad_agrees(spec, options, with_schedule(schedule)))
          << "variant " << variant << " schedule " << schedule;
    }
  }
}

TEST(LinearWithoutBias, ThreadsChangeNoBit) {
  for (const tileloss_schedule schedule : kSchedules) {
    LinearCase c(spec_of(150, 1500, 40, 73));
    std::vector<unsigned char> expected;
    for (const int threads : {1, 2, 5}) {
      tileloss_plan_options hints = with_schedule(schedule);
      hints.cpu.threads = threads;
      c.reset();
      const auto given = c.with_linear(cross_entropy_options());
      ASSERT_TRUE(runs("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &given, hints));
      const std::vector<unsigned char> got = outputs_of(c.args());
      if (expected.empty()) expected = got;
      EXPECT_TRUE(same_bits(got, expected)) << threads << " threads, schedule " << schedule;
    }
  }
}

}  // namespace
}  // namespace tileloss::test
