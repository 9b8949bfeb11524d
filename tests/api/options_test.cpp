// Every option of cross-entropy and logprobs by itself, against the oracle, in every storage type, schedule and pass.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using Options = tileloss_cross_entropy_options;

constexpr tileloss_schedule kSchedules[] = {TILELOSS_SCHEDULE_STASH, TILELOSS_SCHEDULE_RECOMPUTE, TILELOSS_SCHEDULE_SWEEPS};
constexpr tileloss_reduction kReductions[] = {TILELOSS_REDUCTION_NONE, TILELOSS_REDUCTION_SUM, TILELOSS_REDUCTION_MEAN};

class OptionsOf : public testing::TestWithParam<reference::NumberFormat> {
 protected:
  LogitsCaseSpec spec() const {
    return {.rows = 8, .vocab = 2100, .format = GetParam(), .ignore_prob = 0.2, .extra_outputs = true};
  }

  static void expect_agreement(LogitsCaseSpec spec, const Options& options) {
    spec.per_row_loss = options.reduction == TILELOSS_REDUCTION_NONE;
    spec.valid_vocab = options.logit.valid_vocab;
    for (const tileloss_schedule schedule : kSchedules) {
      for (const bool in_place : {false, true}) {
        spec.in_place = in_place;
        LogitsCase c(spec);
        ASSERT_TRUE(runs_value_and_grad(c, options, with_schedule(schedule)));
        ASSERT_TRUE(agrees(check_cross_entropy(c, options))) << "schedule " << schedule << " in place " << in_place;
      }
    }
  }
  void expect_agreement(const std::function<void(Options&)>& change) const {
    for (const tileloss_reduction reduction : kReductions) {
      Options options = cross_entropy_options();
      options.reduction = reduction;
      change(options);
      expect_agreement(spec(), options);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, OptionsOf, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(reference::format_info(param.param).name); });

TEST_P(OptionsOf, Reductions) {
  expect_agreement([](Options&) {});
}

TEST_P(OptionsOf, LabelSmoothing) {
  for (const double s : {0.1, 0.5, 1.0}) expect_agreement([=](Options& o) { o.label_smoothing = s; });
}

TEST_P(OptionsOf, ZLoss) {
  for (const double zeta : {1e-4, 0.5}) expect_agreement([=](Options& o) { o.z_loss = zeta; });
}

TEST_P(OptionsOf, Softcap) {
  for (const double cap : {1.0, 30.0, 400.0, 1e4}) expect_agreement([=](Options& o) { o.logit.softcap = cap; });
}

TEST_P(OptionsOf, LogitScale) {
  for (const double scale : {0.0625, 1.5, 8.0}) expect_agreement([=](Options& o) { o.logit.logit_scale = scale; });
}

TEST_P(OptionsOf, TemperatureOnLogits) {
  for (const double t : {0.3, 2.0}) expect_agreement([=](Options& o) { o.logit.temperature.value = t; });
}

TEST_P(OptionsOf, TemperatureOnLogprob) {
  for (const double t : {0.3, 1.0, 2.0}) {
    expect_agreement([=](Options& o) {
      o.logit.temperature.value = t;
      o.logit.temperature_on = TILELOSS_TEMPERATURE_ON_LOGPROB;
      o.z_loss = 1e-3;
    });
  }
}

TEST_P(OptionsOf, AllTransformsTogether) {
  expect_agreement([](Options& o) {
    o.logit.logit_scale = 2.0;
    o.logit.softcap = 5.0;
    o.logit.temperature.value = 0.5;
    o.label_smoothing = 0.1;
    o.z_loss = 1e-3;
  });
}

TEST_P(OptionsOf, ValidVocab) {
  for (const std::int64_t valid : {1, 2, 63, 2048, 2099}) expect_agreement([=](Options& o) { o.logit.valid_vocab = valid; });
  expect_agreement([](Options& o) {
    o.logit.valid_vocab = 2000;
    o.label_smoothing = 0.2;  // spread over the valid columns
  });
}

TEST_P(OptionsOf, ClassWeights) {
  for (const double smoothing : {0.0, 0.3}) {
    for (const double softcap : {0.0, 3.0}) {
      for (const tileloss_reduction reduction : kReductions) {
        Options options = cross_entropy_options();
        options.reduction = reduction;
        options.label_smoothing = smoothing;
        options.logit.softcap = softcap;
        options.z_loss = 1e-3;
        LogitsCaseSpec s = spec();
        s.class_weights = s.token_weights = true;
        expect_agreement(s, options);
        options.logit.valid_vocab = 1990;
        expect_agreement(s, options);
      }
    }
  }
}

TEST_P(OptionsOf, TokenWeights) {
  for (const tileloss_reduction reduction : kReductions) {
    Options options = cross_entropy_options();
    options.reduction = reduction;
    options.z_loss = 1e-3;
    LogitsCaseSpec s = spec();
    s.token_weights = true;
    expect_agreement(s, options);
  }
}

// None, scalar, per row, strided and broadcast.
TEST_P(OptionsOf, UpstreamGradients) {
  for (const tileloss_reduction reduction : kReductions) {
    for (const Upstream kind : kUpstreams) {
      if (reduction != TILELOSS_REDUCTION_NONE && kind != Upstream::kAbsent && kind != Upstream::kScalar) continue;
      if (reduction == TILELOSS_REDUCTION_NONE && kind == Upstream::kScalar) continue;
      Options options = cross_entropy_options();
      options.reduction = reduction;
      options.label_smoothing = 0.1;
      options.z_loss = 1e-3;
      LogitsCaseSpec s = spec();
      s.loss_grad = kind;
      expect_agreement(s, options);
    }
  }
}

TEST_P(OptionsOf, NumItems) {
  for (const double n : {1.0, 3.5, 4096.0}) {
    expect_agreement([=](Options& o) {
      o.num_items.value = n;
      o.z_loss = 1e-3;
    });
  }
}

TEST_P(OptionsOf, ADenominatorOfZeroGivesZero) {
  Options options = cross_entropy_options();
  options.num_items.value = 0;
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

// A plan made before the numbers are known serves all of them.
TEST_P(OptionsOf, NumbersBehindPointersAreReadAtTheCall) {
  float temperature = 1, num_items = 1;
  Options by_pointer = cross_entropy_options();
  by_pointer.logit.temperature.pointer = &temperature;
  by_pointer.num_items.pointer = &num_items;
  LogitsCase c(spec());
  tileloss_plan plan;
  tileloss_plan_init(&plan);
  ASSERT_TRUE(
      succeeds(tileloss_make_plan("cross_entropy", TILELOSS_VALUE_AND_GRAD, &c.args(), &by_pointer, nullptr, nullptr, &plan)));
  for (const auto& [t, n] : {std::pair{1.0F, 8.0F}, {0.5F, 1.0F}, {2.0F, 0.0F}}) {
    temperature = t;
    num_items = n;
    c.reset();
    ASSERT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&c.args(), &by_pointer, &plan, nullptr)));
    ASSERT_TRUE(agrees(check_cross_entropy(c, by_pointer)));
    const auto outputs = outputs_of(c.args());
    Options by_value = cross_entropy_options();
    by_value.logit.temperature.value = static_cast<double>(t);
    by_value.num_items.value = static_cast<double>(n);
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

TEST_P(OptionsOf, LogprobsTakesUpstreamGradientsOfLogpLseAndEntropy) {
  for (const Upstream logp : {Upstream::kAbsent, Upstream::kPerRow, Upstream::kStrided}) {
    for (const Upstream lse : {Upstream::kAbsent, Upstream::kBroadcast, Upstream::kPerRow}) {
      for (const Upstream entropy : {Upstream::kAbsent, Upstream::kStrided, Upstream::kBroadcast}) {
        for (const int transform : {0, 1, 2, 3}) {
          LogitsCaseSpec s = spec();
          s.loss = s.extra_outputs = s.row_outputs = false;
          s.logp_grad = logp;
          s.lse_grad = lse;
          s.entropy_grad = entropy;
          s.in_place = transform == 2;
          tileloss_logprobs_options options = logprobs_options();
          if (transform == 1) options.logit.softcap = 3;
          if (transform == 2) options.logit.temperature.value = 0.6;
          if (transform == 3) {
            options.logit.temperature.value = 0.6;
            options.logit.temperature_on = TILELOSS_TEMPERATURE_ON_LOGPROB;
          }
          for (const tileloss_schedule schedule : kSchedules) {
            LogitsCase c(s);
            ASSERT_TRUE(runs("logprobs", TILELOSS_BACKWARD, c.args(), &options, with_schedule(schedule)));
            ASSERT_TRUE(agrees(check_logprobs(c, options))) << "transform " << transform << " schedule " << schedule;
          }
        }
      }
    }
  }
}

TEST_P(OptionsOf, LogprobsForward) {
  for (const int transform : {0, 1, 2, 3}) {
    LogitsCaseSpec s = spec();
    s.loss = s.dlogits = false;
    tileloss_logprobs_options options = logprobs_options();
    if (transform == 1) options.logit.softcap = 3;
    if (transform >= 2) options.logit.temperature.value = 0.6;
    if (transform == 3) options.logit.temperature_on = TILELOSS_TEMPERATURE_ON_LOGPROB;
    LogitsCase c(s);
    ASSERT_TRUE(runs("logprobs", TILELOSS_FORWARD, c.args(), &options, plan_options()));
    ASSERT_TRUE(agrees(check_logprobs(c, options))) << transform;
  }
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
