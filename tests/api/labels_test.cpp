// Labels: their types and strides, which are refused, and which rows do not count.
// On toy and cuda: LabelsOf.
#include <gtest/gtest.h>

#include <limits>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class LabelsOf : public testing::TestWithParam<oracle::NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, LabelsOf, testing::ValuesIn(kFormats), format_name);

// The case's labels, replaced by these.
std::vector<std::int64_t> with_label(const LogitsCase& c, std::size_t row, std::int64_t label) {
  std::vector<std::int64_t> labels(c.labels().begin(), c.labels().end());
  labels[row] = label;
  return labels;
}

TEST(Labels, OutOfRangeIsRefusedBeforeAnythingIsWritten) {
  constexpr std::int64_t kRows = 5, kVocab = 1000, kValid = 990;
  for (const tileloss_pass pass : {TILELOSS_FORWARD, TILELOSS_VALUE_AND_GRAD, TILELOSS_BACKWARD}) {
    for (const bool in_place : {false, true}) {
      for (const std::int64_t bad :
           {std::int64_t{-1}, std::int64_t{-99}, kValid, kVocab, std::int64_t{1} << 32, (std::int64_t{1} << 32) + 3,
            -(std::int64_t{1} << 32), std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()}) {
        if (pass == TILELOSS_FORWARD && in_place) continue;
        LogitsCase c({.rows = kRows, .vocab = kVocab, .valid_vocab = kValid, .extra_outputs = true, .in_place = in_place});
        if (pass == TILELOSS_FORWARD) c.args().dlogits = {};
        RowStateArrays state(kRows);
        if (pass == TILELOSS_FORWARD) c.args().row_state = &state.get();
        const std::vector<std::int64_t> labels = with_label(c, 3, bad);
        c.args().labels.data = const_cast<std::int64_t*>(labels.data());
        const tileloss_cross_entropy_options options{.logit = {.valid_vocab = kValid}};
        const auto before = outputs_of(c.args());
        EXPECT_EQ(tileloss_call("cross_entropy", pass, &c.args(), &options, nullptr, nullptr), TILELOSS_LABEL_OUT_OF_RANGE);
        EXPECT_EQ(tileloss_last_error(), "labels[3]: expected 0 <= label < 990 or ignore_index -100, got " + std::to_string(bad));
        EXPECT_TRUE(same_bits(outputs_of(c.args()), before));
        EXPECT_TRUE(c.surroundings_intact());
        for (const std::vector<float>& array : state.floats()) EXPECT_EQ(array, std::vector<float>(kRows, -7.0F));
        EXPECT_EQ(state.argmax(), std::vector<std::int64_t>(kRows, -7));
      }
    }
  }
}

TEST(Labels, Int32OutOfRangeIsRefused) {
  LogitsCase c({.rows = 3, .vocab = 10});
  for (const std::int32_t bad : {-1, 10, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
    const std::vector<std::int32_t> labels = {1, 2, bad};
    c.args().labels = tileloss_make_vector(labels.data(), TILELOSS_INT32, 3);
    EXPECT_EQ(tileloss_cross_entropy_value_and_grad(&c.args(), nullptr, nullptr, nullptr), TILELOSS_LABEL_OUT_OF_RANGE);
    EXPECT_NE(std::string(tileloss_last_error()).find("labels[2]"), std::string::npos);
    EXPECT_NE(std::string(tileloss_last_error()).find("got " + std::to_string(bad)), std::string::npos);
  }
}

TEST(Labels, TheFirstBadOneIsNamed) {
  LogitsCase c({.rows = 4, .vocab = 10});
  const std::vector<std::int64_t> labels = {1, 77, -5, 3};
  c.args().labels.data = const_cast<std::int64_t*>(labels.data());
  EXPECT_EQ(tileloss_cross_entropy_value_and_grad(&c.args(), nullptr, nullptr, nullptr), TILELOSS_LABEL_OUT_OF_RANGE);
  EXPECT_NE(std::string(tileloss_last_error()).find("labels[1]"), std::string::npos);
}

// Only ignore_index itself is a licence: -100 is an error when another value is the ignore index.
TEST(Labels, OnlyTheIgnoreIndexIsIgnored) {
  LogitsCase c({.rows = 3, .vocab = 10});
  tileloss_cross_entropy_options options = cross_entropy_options();
  for (const std::int64_t ignore_index : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{255}, std::int64_t{1} << 40}) {
    options.logit.ignore_index = ignore_index;
    const std::vector<std::int64_t> labels = with_label(c, 1, -100);
    c.args().labels.data = const_cast<std::int64_t*>(labels.data());
    EXPECT_EQ(tileloss_cross_entropy_value_and_grad(&c.args(), &options, nullptr, nullptr), TILELOSS_LABEL_OUT_OF_RANGE);
  }
}

TEST_P(LabelsOf, Int32Int64AndStridedLabelsGiveTheSameBits) {
  const LogitsCaseSpec spec{.rows = 9, .vocab = 1500, .format = GetParam(), .ignore_prob = 0.3, .extra_outputs = true};
  LogitsCase c(spec);
  const tileloss_cross_entropy_options options = cross_entropy_options();
  ASSERT_TRUE(runs_value_and_grad(c, options));
  ASSERT_TRUE(agrees(check_cross_entropy(c, options)));
  const auto expected = outputs_of(c.args());
  for (const std::int64_t stride : {1, 2, 5}) {
    // The gaps hold labels that would be refused.
    std::vector<std::int64_t> wide(static_cast<std::size_t>(9 * stride), -7);
    std::vector<std::int32_t> narrow(static_cast<std::size_t>(9 * stride), -7);
    for (std::size_t i = 0; i < 9; ++i) {
      wide[i * static_cast<std::size_t>(stride)] = c.labels()[i];
      narrow[i * static_cast<std::size_t>(stride)] = static_cast<std::int32_t>(c.labels()[i]);
    }
    for (const bool is_wide : {false, true}) {
      c.reset();
      c.args().labels =
          is_wide ? tileloss_make_vector(wide.data(), TILELOSS_INT64, 9) : tileloss_make_vector(narrow.data(), TILELOSS_INT32, 9);
      c.args().labels.stride = stride;
      ASSERT_TRUE(runs_value_and_grad(c, options));
      EXPECT_TRUE(same_bits(outputs_of(c.args()), expected));
    }
  }
}

TEST_P(LabelsOf, OneBroadcastLabelServesAllRows) {
  LogitsCase c({.rows = 4, .vocab = 50, .format = GetParam()});
  const std::vector<std::int64_t> same(4, 17);
  c.args().labels.data = const_cast<std::int64_t*>(same.data());
  ASSERT_TRUE(runs_value_and_grad(c, cross_entropy_options()));
  const auto expected = outputs_of(c.args());
  c.reset();
  c.args().labels.stride = 0;
  ASSERT_TRUE(runs_value_and_grad(c, cross_entropy_options()));
  EXPECT_TRUE(same_bits(outputs_of(c.args()), expected));
}

// LogitsCase fills ignored rows with NaN; their weights and upstream gradients are NaN here too.
TEST_P(LabelsOf, IgnoredRowsAreNeverReadAndCountNowhere) {
  for (const tileloss_reduction reduction : kReductions) {
    for (const std::int64_t ignore_index : {std::int64_t{-100}, std::int64_t{7}, std::int64_t{-1}}) {
      for (const tileloss_schedule schedule : kSchedules) {
        for (const bool in_place : {false, true}) {
          LogitsCase c({.rows = 12,
                        .vocab = 600,
                        .stride_extra = 3,
                        .format = GetParam(),
                        .ignore_prob = 0.5,
                        .ignore_index = ignore_index,
                        .token_weights = true,
                        .per_row_loss = reduction == TILELOSS_REDUCTION_NONE,
                        .extra_outputs = true,
                        .in_place = in_place});
          std::vector<float> weights;
          for (std::size_t i = 0; i < 12; ++i) {
            weights.push_back(c.labels()[i] == ignore_index ? static_cast<float>(kNan)
                                                            : static_cast<float>(c.token_weights()[i]));
          }
          c.args().token_weights = tileloss_make_vector(weights.data(), TILELOSS_FLOAT32, 12);
          const tileloss_cross_entropy_options options{
              .logit = {.ignore_index = ignore_index}, .z_loss = 1e-3, .reduction = reduction};
          ASSERT_TRUE(runs_value_and_grad(c, options, with_schedule(schedule)));
          ASSERT_TRUE(agrees(check_cross_entropy(c, options)));
        }
      }
    }
  }
}

TEST_P(LabelsOf, NoRowsGiveALossOfZero) {
  for (const tileloss_reduction reduction : kReductions) {
    for (const tileloss_schedule schedule : kSchedules) {
      LogitsCase c({.rows = 0,
                    .vocab = 40,
                    .format = GetParam(),
                    .per_row_loss = reduction == TILELOSS_REDUCTION_NONE,
                    .extra_outputs = true});
      const tileloss_cross_entropy_options options{.reduction = reduction};
      ASSERT_TRUE(runs_value_and_grad(c, options, with_schedule(schedule)));
      if (reduction == TILELOSS_REDUCTION_NONE) continue;
      EXPECT_EQ(float_at(c.args().loss, 0), 0.0F);
    }
  }
}

TEST(Labels, NoRowsNeedNoPointers) {
  auto args = init<tileloss_args>();
  float loss = -1;
  args.logits = tileloss_make_matrix(nullptr, TILELOSS_FLOAT32, 0, 40, 40);
  args.dlogits = args.logits;
  args.labels = tileloss_make_vector(nullptr, TILELOSS_INT64, 0);
  args.class_weights = tileloss_make_vector(nullptr, TILELOSS_FLOAT32, 40);
  args.loss = tileloss_make_vector(&loss, TILELOSS_FLOAT32, 1);
  EXPECT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&args, nullptr, nullptr, nullptr)));
  EXPECT_EQ(loss, 0.0F);
}

}  // namespace
}  // namespace tileloss::test
