// logprobs with several labels a row, against the oracle.
// On cuda: SeveralLabels.
#include <gtest/gtest.h>

#include "tests/api/slots_case.h"

namespace tileloss::test {
namespace {

class SeveralLabels : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SeveralLabels, testing::ValuesIn(kFormats), format_name);

TEST_P(SeveralLabels, AreAsTheOracleHasThem) {
  for (const char* distribution : {"normal", "wide", "confident"}) {
    for (const std::int64_t count : {2, 5, 64}) {
      for (const tileloss_logprobs_options& options : options_of_logprobs()) {
        SCOPED_TRACE(testing::Message() << distribution << ", " << count << " labels, softcap " << options.logit.softcap);
        SlotsCase c({.rows = 6,
                     .vocab = 1003,
                     .stride_extra = 5,
                     .format = GetParam(),
                     .distribution = distribution,
                     .lse_grad = Upstream::kPerRow,
                     .entropy_grad = Upstream::kPerRow,
                     .loss = false,
                     .row_outputs = false},
                    count);
        c.slots.leave_some_empty();
        for (std::int64_t k = 0; k < count; ++k) c.slots.at(4, k) = kIgnored;
        c.forward(options);
        c.backward(options);
        EXPECT_TRUE(c.check(options));
      }
    }
  }
}

TEST_P(SeveralLabels, WithTheHeadTheyAreAsTheOracleHasThem) {
  for (const bool dbias : {false, true}) {
    for (const tileloss_logprobs_options& options : options_of_logprobs()) {
      SCOPED_TRACE(testing::Message() << "dbias " << dbias << ", softcap " << options.logit.softcap);
      LinearCase c({.row = {.rows = 23,
                            .vocab = 401,
                            .ignore_prob = 0.1,
                            .lse_grad = Upstream::kPerRow,
                            .entropy_grad = dbias ? Upstream::kPerRow : Upstream::kAbsent,
                            .loss = false,
                            .row_outputs = false},
                    .hidden = 40,
                    .format = GetParam(),
                    .head_format = GetParam(),
                    .compute_dtype = dbias ? TILELOSS_BFLOAT16 : TILELOSS_NONE,
                    .label_logit = dbias ? 12.0 : 0.0,
                    .bias = dbias,
                    .dbias = dbias});
      Slots slots(c.row().labels(), c.spec().row.vocab, 7);
      slots.leave_some_empty();
      const auto given = c.with_linear(options);
      ASSERT_TRUE(runs("linear_logprobs", TILELOSS_FORWARD, slots.forward(c.args()), &given, plan_options()));
      ASSERT_TRUE(runs("linear_logprobs", TILELOSS_BACKWARD, slots.backward(c.args()), &given, plan_options()));
      EXPECT_TRUE(check_slots(c, slots, options));
    }
  }
}

TEST(SeveralLabelsRefused, WithTheArgumentsName) {
  LogitsCase c({.rows = 2, .vocab = 10, .extra_outputs = true, .dlogits = false});
  const std::int64_t labels[] = {1, 2, 3, 10};
  float logp[4];
  c.args().loss = {};
  c.args().labels_per_row = 2;
  c.args().labels = tileloss_make_vector(labels, TILELOSS_INT64, 4);
  c.args().logp = tileloss_make_vector(logp, TILELOSS_FLOAT32, 4);
  EXPECT_TRUE(refused(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "correct: expected none with several labels a row, got a vector"));
  c.args().correct = {};
  EXPECT_TRUE(refused(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr), TILELOSS_LABEL_OUT_OF_RANGE,
                      "labels[1,1]: expected 0 <= label < 10 or ignore_index -100, got 10"));
  EXPECT_TRUE(refused(tileloss_cross_entropy(&c.args(), nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "labels_per_row: expected 0 or 1, as cross_entropy takes one label a row, got 2"));
  c.args().labels_per_row = 1025;
  EXPECT_TRUE(refused(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "labels_per_row: expected 0 to 1024, got 1025"));
  c.args().labels_per_row = 3;
  EXPECT_TRUE(refused(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "labels.size: expected 6, got 4"));
}

}  // namespace
}  // namespace tileloss::test
