// The functions fused with the LM head, through the C ABI, against the oracle.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/api/calls.h"
#include "tests/shared/linear_case.h"

namespace tileloss::test {
namespace {

using reference::NumberFormat;

testing::AssertionResult value_and_grad_agrees(LinearCase& c, const tileloss_cross_entropy_options& options,
                                               const tileloss_plan_options& wishes = plan_options()) {
  const auto given = c.with_linear(options);
  const auto ran = runs("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &given, wishes);
  if (!ran) return ran;
  return agrees(check_linear_cross_entropy(c, options));
}

std::string name_of(const LinearCaseSpec& spec) {
  return "N " + std::to_string(spec.row.rows) + " V " + std::to_string(spec.row.vocab) + " H " + std::to_string(spec.hidden) +
         " hidden " + format_info(spec.format).name + " head " + format_info(spec.head_format).name + " compute " +
         std::to_string(spec.compute_dtype) + " layouts " + std::to_string(static_cast<int>(spec.hidden_layout)) +
         std::to_string(static_cast<int>(spec.head_layout));
}

class LinearSizes : public testing::TestWithParam<NumberFormat> {};

TEST_P(LinearSizes, ValueAndGradientsAgreeAtEverySize) {
  std::uint64_t seed = 0;
  for (const std::int64_t rows : {0, 1, 7, 33}) {
    for (const std::int64_t hidden : {1, 7, 33, 64}) {
      for (const std::int64_t vocab : {1, 17, 127, 1000}) {
        ++seed;
        LinearCase c({.row = {.rows = rows,
                              .vocab = vocab,
                              .misalignment = static_cast<std::int64_t>(seed % 3),
                              .flush = seed % 2 == 0 ? Flush::kRight : Flush::kLeft,
                              .seed = seed,
                              .ignore_prob = 0.2},
                      .hidden = hidden,
                      .format = GetParam(),
                      .head_format = GetParam(),
                      .head_layout = static_cast<MatrixLayout>(seed % 3),
                      .bias = seed % 2 == 0,
                      .dbias = true});
        EXPECT_TRUE(value_and_grad_agrees(c, cross_entropy_options())) << name_of(c.spec());
      }
    }
  }
}

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

INSTANTIATE_TEST_SUITE_P(Formats, LinearSizes, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(format_info(param.param).name); });

TEST(Linear, EveryPairOfStorageComputeAndLayoutAgrees) {
  std::uint64_t seed = 20;
  for (const NumberFormat format : kFormats) {
    for (const NumberFormat head_format : kFormats) {
      for (const tileloss_dtype compute : {TILELOSS_NONE, TILELOSS_FLOAT32, TILELOSS_BFLOAT16}) {
        for (const bool float32_outputs : {false, true}) {
          ++seed;
          LinearCase c({.row = {.rows = 20, .vocab = 131, .seed = seed, .ignore_prob = 0.1},
                        .hidden = 37,
                        .format = format,
                        .head_format = head_format,
                        .compute_dtype = compute,
                        .hidden_layout = static_cast<MatrixLayout>(seed % 3),
                        .head_layout = static_cast<MatrixLayout>(seed / 3 % 3),
                        .bias = true,
                        .dbias = true,
                        .float32_dhidden = float32_outputs,
                        .float32_dhead = float32_outputs});
          EXPECT_TRUE(value_and_grad_agrees(c, cross_entropy_options())) << name_of(c.spec());
        }
      }
    }
  }
}

// A model in bfloat16 has its bias in bfloat16 too. Several row chunks: dbias is summed in float32, rounded once, added to once.
TEST(Linear, ABiasOfAnyTypeAgrees) {
  std::uint64_t seed = 60;
  for (const NumberFormat bias_format : kFormats) {
    for (const NumberFormat format : kFormats) {
      for (const tileloss_schedule schedule : {TILELOSS_SCHEDULE_STASH, TILELOSS_SCHEDULE_RECOMPUTE}) {
        for (const bool float32_dbias : {true, false}) {
          ++seed;
          LinearCase c({.row = {.rows = 100, .vocab = 300, .valid_vocab = 290, .seed = seed, .ignore_prob = 0.2},
                        .hidden = 24,
                        .format = format,
                        .head_format = format,
                        .bias = true,
                        .bias_format = bias_format,
                        .dbias = true,
                        .float32_dbias = float32_dbias,
                        .accumulate = seed / 2 % 2 == 0});
          tileloss_cross_entropy_options options = cross_entropy_options();
          options.logit.valid_vocab = 290;
          tileloss_plan_options wishes = with_schedule(schedule);
          wishes.row_block = 32;
          EXPECT_TRUE(value_and_grad_agrees(c, options, wishes))
              << name_of(c.spec()) << " bias " << format_info(bias_format).name << " schedule " << schedule;
        }
      }
    }
  }
}

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
      tileloss_cross_entropy_options options = cross_entropy_options();
      options.reduction = TILELOSS_REDUCTION_SUM;
      tileloss_plan_options wishes = with_schedule(TILELOSS_SCHEDULE_STASH);
      wishes.row_block = 16;
      ASSERT_TRUE(runs("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, wishes));
      const reference::StoredMatrix& view = c.dbias().view();
      std::vector<float>& values = dbias.emplace_back();
      for (std::int64_t v = 0; v < view.rows; ++v) {
        values.push_back(static_cast<float>(decode(format, encode(format, view.at(v, 0)))));
      }
    }
    EXPECT_EQ(dbias[0], dbias[1]) << format_info(format).name;
  }
}

TEST(Linear, EverySubsetOfGradientsAgrees) {
  for (const tileloss_schedule schedule : {TILELOSS_SCHEDULE_AUTO, TILELOSS_SCHEDULE_STASH, TILELOSS_SCHEDULE_RECOMPUTE}) {
    for (int subset = 1; subset < 8; ++subset) {
      for (const bool accumulate : {false, true}) {
        LinearCase c({.row = {.rows = 70, .vocab = 1000, .valid_vocab = 990, .seed = 7, .ignore_prob = 0.3},
                      .hidden = 40,
                      .head_layout = MatrixLayout::kGaps,
                      .bias = true,
                      .dhidden = (subset & 1) != 0,
                      .dhead = (subset & 2) != 0,
                      .dbias = (subset & 4) != 0,
                      .float32_dhead = accumulate,
                      .accumulate = accumulate});
        tileloss_cross_entropy_options options = cross_entropy_options();
        options.logit.valid_vocab = 990;
        tileloss_plan_options wishes = plan_options();
        wishes.schedule = schedule;
        EXPECT_TRUE(value_and_grad_agrees(c, options, wishes)) << "schedule " << schedule << " subset " << subset;
      }
    }
  }
}

TEST(Linear, RowChunksAndWorkspaceDoNotMatterToTheBound) {
  for (const std::int64_t row_block : {32, 64, 0}) {
    for (const bool float32_dhead : {false, true}) {
      for (const bool accumulate : {false, true}) {
        LinearCase c({.row = {.rows = 150, .vocab = 700, .seed = 8},
                      .hidden = 33,
                      .dbias = true,
                      .float32_dhead = float32_dhead,
                      .accumulate = accumulate});
        tileloss_plan_options wishes = plan_options();
        wishes.schedule = TILELOSS_SCHEDULE_STASH;
        wishes.row_block = row_block;
        EXPECT_TRUE(value_and_grad_agrees(c, cross_entropy_options(), wishes)) << row_block;
      }
    }
  }
}

TEST(Linear, OptionsOfCrossEntropyAgree) {
  for (const tileloss_dtype compute : {TILELOSS_BFLOAT16, TILELOSS_FLOAT32}) {
    for (const tileloss_reduction reduction : {TILELOSS_REDUCTION_NONE, TILELOSS_REDUCTION_SUM, TILELOSS_REDUCTION_MEAN}) {
      for (int variant = 0; variant < 5; ++variant) {
        const bool per_row = reduction == TILELOSS_REDUCTION_NONE;
        LinearCaseSpec spec{.row = {.rows = 50, .vocab = 300, .seed = 9, .ignore_prob = 0.2, .token_weights = variant == 0},
                            .hidden = 24,
                            .compute_dtype = compute,
                            .bias = true,
                            .dbias = true};
        spec.row.class_weights = variant == 1;
        spec.row.loss_grad = per_row ? kUpstreams[static_cast<std::size_t>(variant)] : Upstream::kScalar;
        spec.row.per_row_loss = per_row;
        spec.row.extra_outputs = true;
        if (spec.row.loss_grad == Upstream::kScalar && per_row) spec.row.loss_grad = Upstream::kPerRow;
        tileloss_cross_entropy_options options = cross_entropy_options();
        options.reduction = reduction;
        if (variant == 2) options.label_smoothing = 0.1;
        if (variant == 3) options.z_loss = 0.01;
        if (variant == 4) {
          options.logit.logit_scale = 0.8;
          options.logit.softcap = 10;
          options.logit.temperature.value = 0.7;
        }
        LinearCase c(spec);
        EXPECT_TRUE(value_and_grad_agrees(c, options)) << "reduction " << reduction << " variant " << variant;
      }
    }
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

tileloss_policy_loss_options policy_preset(const char* preset) {
  tileloss_policy_loss_options options;
  tileloss_options_preset("policy_loss", preset, &options, sizeof options);
  if (options.kind == TILELOSS_POLICY_CISPO) options.epsilon_high.value = 5;
  return options;
}

TEST(Linear, PoliciesAgreeAtTokenAndAtSequenceLevel) {
  for (const char* preset : {"grpo", "dapo", "cispo", "sapo", "gspo", "vespo", "reinforce"}) {
    for (const NumberFormat format : kFormats) {
      tileloss_policy_loss_options options = policy_preset(preset);
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

// 9 of 10 rows ignored, every row ignored, one in use: the rest of hidden is NaN, and so would be whatever read it.
TEST(Linear, IgnoredRowsAreNeverReadAndHaveNoGradient) {
  for (const double ignored : {0.9, 1.0}) {
    LinearCase c({.row = {.rows = 100, .vocab = 200, .seed = 13, .ignore_prob = ignored},
                  .hidden = 32,
                  .dbias = true,
                  .accumulate = true});
    EXPECT_TRUE(value_and_grad_agrees(c, cross_entropy_options())) << ignored;
  }
}

// Zeros are then written without a sum: over all of dhead or its padding, in every layout and dtype, and over no gap.
TEST(Linear, GradientsOfNoRowAreZeros) {
  for (const MatrixLayout layout : {MatrixLayout::kRows, MatrixLayout::kTransposed, MatrixLayout::kGaps}) {
    for (const NumberFormat format : kFormats) {
      for (const double ignored : {0.3, 1.0}) {
        LinearCase c({.row = {.rows = 70, .vocab = 600, .valid_vocab = 300, .seed = 14, .ignore_prob = ignored},
                      .hidden = 24,
                      .format = format,
                      .head_format = format,
                      .hidden_layout = layout,
                      .head_layout = layout,
                      .dbias = true});
        tileloss_cross_entropy_options options = cross_entropy_options();
        options.logit.valid_vocab = 300;
        EXPECT_TRUE(value_and_grad_agrees(c, options)) << name_of(c.spec()) << " " << ignored;
      }
    }
  }
}

// Wrong kernels made of the right one's output: none may pass.
TEST(Linear, MutantsOfTheKernelsOutputAreRejected) {
  using Mutant = std::function<double(std::int64_t row, std::int64_t rows, double value)>;
  const Mutant halved = [](std::int64_t, std::int64_t, double value) { return 0.5 * value; };
  const Mutant last_tile_dropped = [](std::int64_t row, std::int64_t rows, double value) { return row < rows - 16 ? value : 0; };
  const Mutant first_chunk_dropped = [](std::int64_t row, std::int64_t, double value) { return row < 8 ? 0 : value; };
  const Mutant one_row_negated = [](std::int64_t row, std::int64_t, double value) { return row == 40 ? -value : value; };
  for (const NumberFormat format : {NumberFormat::kBfloat16, NumberFormat::kFloat32}) {
    for (const auto& which : {&LinearCase::dhidden, &LinearCase::dhead, &LinearCase::dbias}) {
      for (const Mutant& mutant : {halved, last_tile_dropped, first_chunk_dropped, one_row_negated}) {
        LinearCase c({.row = {.rows = 64, .vocab = 500, .seed = 15},
                      .hidden = 48,
                      .format = format,
                      .head_format = format,
                      .dbias = true});
        const tileloss_cross_entropy_options options = cross_entropy_options();
        ASSERT_TRUE(value_and_grad_agrees(c, options));
        GuardedMatrix& gradient = (c.*which)();
        const reference::StoredMatrix& view = gradient.view();
        for (std::int64_t i = 0; i < view.rows; ++i) {
          for (std::int64_t j = 0; j < view.cols; ++j) gradient.set(i, j, mutant(i, view.rows, view.at(i, j)));
        }
        EXPECT_FALSE(agrees(check_linear_cross_entropy(c, options)));
      }
    }
  }
}

// A kernel told to add that stores instead.
TEST(Linear, AccumulationThatIsIgnoredIsRejected) {
  for (const bool dhead : {true, false}) {
    LinearCase c(
        {.row = {.rows = 40, .vocab = 300, .seed = 16}, .hidden = 24, .dhead = dhead, .dbias = !dhead, .accumulate = true});
    const tileloss_cross_entropy_options options = cross_entropy_options();
    ASSERT_TRUE(value_and_grad_agrees(c, options));
    c.reset();
    EXPECT_TRUE(value_and_grad_agrees(c, options));
    c.reset();
    ASSERT_TRUE(runs("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
    EXPECT_FALSE(agrees(check_linear_cross_entropy(c, options)));
  }
}

TEST(Linear, ThreadsDoNotChangeABit) {
  std::vector<unsigned char> first;
  for (const int threads : {1, 2, 3, 16}) {
    LinearCase c({.row = {.rows = 90, .vocab = 3000, .seed = 14, .ignore_prob = 0.1}, .hidden = 40, .bias = true, .dbias = true});
    tileloss_plan_options wishes = plan_options();
    wishes.threads = threads;
    const tileloss_cross_entropy_options options = cross_entropy_options();
    ASSERT_TRUE(runs("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, wishes));
    std::vector<unsigned char> bytes = c.gradient_bytes();
    const std::vector<unsigned char> outputs = outputs_of(c.args());
    bytes.insert(bytes.end(), outputs.begin(), outputs.end());
    if (first.empty()) first = bytes;
    EXPECT_TRUE(same_bits(first, bytes)) << threads;
  }
}

}  // namespace
}  // namespace tileloss::test
