// The table of special values, row by row: finite, NaN or infinite exactly where the oracle is, in every output and gradient.
// On toy and cuda: SpecialValues.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using Options = tileloss_cross_entropy_options;

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kVocab = 200;

class SpecialValues : public testing::TestWithParam<oracle::NumberFormat> {
 protected:
  // Three rows: plain, special, plain.
  static std::unique_ptr<LogitsCase> make(const std::function<void(LogitsCase&)>& change, bool class_weights = false) {
    auto c = std::make_unique<LogitsCase>(LogitsCaseSpec{.rows = 3,
                                                         .vocab = kVocab,
                                                         .format = GetParam(),
                                                         .class_weights = class_weights,
                                                         .per_row_loss = true,
                                                         .extra_outputs = true},
                                          LogitsCase::Open{});
    change(*c);
    c->seal();
    return c;
  }
  static Options per_row() { return {.reduction = TILELOSS_REDUCTION_NONE}; }
  static std::int64_t label(const LogitsCase& c) { return c.labels()[1]; }
  static std::int64_t other(const LogitsCase& c) { return (label(c) + 61) % kVocab; }

  // Agrees with the oracle in every schedule and in a backward from the saved state, and the plain rows have the bits that they
  // have without the special one.
  static void expect_agreement(LogitsCase& c, const Options& options) {
    const tileloss_matrix dlogits = c.args().dlogits;
    for (const tileloss_schedule schedule : kSchedules) {
      c.reset();
      ASSERT_TRUE(runs_value_and_grad(c, options, with_schedule(schedule)));
      ASSERT_TRUE(agrees(check_cross_entropy(c, options))) << "schedule " << schedule;
    }
    RowStateArrays state(3);
    c.reset();
    c.args().row_state = &state.get();
    c.args().dlogits = {};
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_FORWARD, c.args(), &options, plan_options()));
    c.args().dlogits = dlogits;
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_BACKWARD, c.args(), &options, plan_options()));
    ASSERT_TRUE(agrees(check_cross_entropy(c, options))) << "backward from the saved state";
    c.args().row_state = nullptr;
  }
  void expect_agreement(const std::function<void(LogitsCase&)>& change, const Options& options) const {
    const auto c = make(change);
    expect_agreement(*c, options);
  }
  static float loss(const LogitsCase& c) { return float_at(c.args().loss, 1); }
};
INSTANTIATE_TEST_SUITE_P(Formats, SpecialValues, testing::ValuesIn(kFormats), format_name);

std::vector<Options> transforms(const Options& base) {
  std::vector<Options> all(4, base);
  all[1].logit.temperature.value = 0.5;
  all[2].logit.softcap = 20;
  all[3].z_loss = 1e-3;
  return all;
}

// One by one the others' exps are below 2^-126 there; what the gradient at the label is made of, their sum, is not.
TEST_P(SpecialValues, ALabelFarAboveAllOthersKeepsTheSumOfTheirs) {
  for (Options options : {cross_entropy_options(), transforms(per_row())[1], transforms(per_row())[3]}) {
    options.reduction = TILELOSS_REDUCTION_NONE;
    const double temperature = options.logit.temperature.value;
    for (const double gap : {70.0, 86.0, 87.0, 88.0, 90.0, 91.0}) {
      for (const double top : {0.0, 40.0, -30.0}) {
        const auto c = make([&](LogitsCase& l) {
          for (std::int64_t j = 0; j < kVocab; ++j) l.set_logit(1, j, j == label(l) ? top : top - gap * temperature);
        });
        expect_agreement(*c, options);
        if (GetParam() == oracle::NumberFormat::kFloat16) continue;  // 0 there
        EXPECT_NE(c->dlogit(1, label(*c)), 0.0) << gap;
      }
    }
  }
}

TEST_P(SpecialValues, ASoftCappedLabelFarAboveAllOthersKeepsTheSumOfTheirs) {
  Options options = per_row();
  options.logit.softcap = 64;
  const auto c = make([&](LogitsCase& l) {
    for (std::int64_t j = 0; j < kVocab; ++j) l.set_logit(1, j, j == label(l) ? 100 : j % 2 == 0 ? -34 : -36);
  });
  expect_agreement(*c, options);
  EXPECT_EQ(c->dlogit(1, label(*c)) < 0, GetParam() != oracle::NumberFormat::kFloat16);
}

TEST_P(SpecialValues, ANonTargetLogitOfMinusInfinityHasNoGradient) {
  for (const Options& options : transforms(per_row())) {
    for (const int how_many : {1, 3, 199}) {
      const auto c = make([&](LogitsCase& l) {
        for (std::int64_t j = 0, set = 0; j < kVocab && set < how_many; ++j) {
          const std::int64_t column = (other(l) + j) % kVocab;
          if (column == label(l)) continue;
          l.set_logit(1, column, -kInf);
          ++set;
        }
      });
      expect_agreement(*c, options);
      EXPECT_TRUE(std::isfinite(loss(*c)));
      EXPECT_EQ(c->dlogit(1, other(*c)), 0.0);
    }
  }
}

TEST_P(SpecialValues, WithSmoothingItMakesTheLossInfiniteAndKeepsItsUniformGradient) {
  Options options = per_row();
  options.label_smoothing = 0.2;
  const auto c = make([](LogitsCase& l) { l.set_logit(1, other(l), -kInf); });
  expect_agreement(*c, options);
  EXPECT_EQ(loss(*c), static_cast<float>(kInf));
  EXPECT_NEAR(c->dlogit(1, other(*c)), -0.2 / kVocab, 1e-5);
  options.label_smoothing = 1;
  expect_agreement([](LogitsCase& l) { l.set_logit(1, other(l), -kInf); }, options);
}

TEST_P(SpecialValues, WithSmoothingAndAClassWeightOfZeroTheLossIsNan) {
  Options options = per_row();
  options.label_smoothing = 0.2;
  for (const bool zero_at_special : {false, true}) {
    const auto c = make([](LogitsCase& l) { l.set_logit(1, other(l), -kInf); });
    c->args().mean_logit = {};
    std::vector<float> weights(kVocab, 1.0F);
    weights[static_cast<std::size_t>(zero_at_special ? other(*c) : (other(*c) + 5) % kVocab)] = 0;
    c->args().class_weights = tileloss_make_vector(weights.data(), TILELOSS_FLOAT32, kVocab);
    ASSERT_TRUE(runs_value_and_grad(*c, options));
    if (zero_at_special) {
      EXPECT_TRUE(std::isnan(loss(*c)));
    } else {
      EXPECT_EQ(loss(*c), static_cast<float>(kInf));
    }
    for (std::int64_t j = 0; j < kVocab; ++j) EXPECT_TRUE(std::isfinite(c->dlogit(1, j))) << j;
    if (zero_at_special) {
      EXPECT_EQ(c->dlogit(1, other(*c)), 0.0);
    }
  }
}

TEST_P(SpecialValues, ATargetLogitOfMinusInfinityMakesTheLossInfinite) {
  for (const Options& options : transforms(per_row())) {
    const auto c = make([](LogitsCase& l) { l.set_logit(1, label(l), -kInf); });
    expect_agreement(*c, options);
    if (options.logit.softcap > 0) {
      EXPECT_TRUE(std::isfinite(loss(*c)));
      continue;
    }
    EXPECT_EQ(loss(*c), static_cast<float>(kInf));
    EXPECT_EQ(float_at(c->args().logp, 1), static_cast<float>(-kInf));
    EXPECT_NEAR(c->dlogit(1, label(*c)), -1.0 / options.logit.temperature.value, 0.01);
  }
}

TEST_P(SpecialValues, ATargetLogitOfMinusInfinityWithoutAnyWeightMakesTheLossNan) {
  Options options = per_row();
  options.label_smoothing = 1;
  const auto smoothed = make([](LogitsCase& l) { l.set_logit(1, label(l), -kInf); });
  expect_agreement(*smoothed, options);
  EXPECT_TRUE(std::isnan(loss(*smoothed)));

  const auto weighted = make([](LogitsCase& l) { l.set_logit(1, label(l), -kInf); });
  weighted->args().mean_logit = {};
  std::vector<float> weights(kVocab, 1.0F);
  weights[static_cast<std::size_t>(label(*weighted))] = 0;
  weighted->args().class_weights = tileloss_make_vector(weights.data(), TILELOSS_FLOAT32, kVocab);
  ASSERT_TRUE(runs_value_and_grad(*weighted, per_row()));
  EXPECT_TRUE(std::isnan(loss(*weighted)));
  for (std::int64_t j = 0; j < kVocab; ++j) EXPECT_EQ(weighted->dlogit(1, j), 0.0);
}

TEST_P(SpecialValues, ALabelWithoutClassWeightHasNoLossAndNoGradient) {
  const auto c = make([](LogitsCase&) {});
  c->args().mean_logit = {};
  std::vector<float> weights(kVocab, 1.0F);
  weights[static_cast<std::size_t>(label(*c))] = 0;
  c->args().class_weights = tileloss_make_vector(weights.data(), TILELOSS_FLOAT32, kVocab);
  ASSERT_TRUE(runs_value_and_grad(*c, per_row()));
  EXPECT_EQ(loss(*c), 0.0F);
  for (std::int64_t j = 0; j < kVocab; ++j) EXPECT_EQ(c->dlogit(1, j), 0.0);
}

TEST_P(SpecialValues, ARowOfMinusInfinityHasNoDistribution) {
  for (const Options& options : transforms(per_row())) {
    const auto c = make([](LogitsCase& l) {
      for (std::int64_t j = 0; j < kVocab; ++j) l.set_logit(1, j, -kInf);
    });
    expect_agreement(*c, options);
    if (options.logit.softcap > 0) continue;  // all logits are -20: a uniform distribution
    EXPECT_TRUE(std::isnan(loss(*c)));
    EXPECT_EQ(float_at(c->args().lse, 1), static_cast<float>(-kInf));
    for (std::int64_t j = 0; j < kVocab; ++j) EXPECT_TRUE(std::isnan(c->dlogit(1, j)));
  }
}

TEST_P(SpecialValues, AnyPlusInfinityHasNoDistribution) {
  for (const Options& options : transforms(per_row())) {
    for (const bool at_label : {false, true}) {
      for (const bool also_minus : {false, true}) {
        const auto c = make([&](LogitsCase& l) {
          l.set_logit(1, at_label ? label(l) : other(l), kInf);
          if (also_minus) l.set_logit(1, (label(l) + 3) % kVocab, -kInf);
        });
        expect_agreement(*c, options);
        if (options.logit.softcap > 0) continue;  // +inf is +20
        EXPECT_TRUE(std::isnan(loss(*c)));
        EXPECT_EQ(float_at(c->args().lse, 1), static_cast<float>(kInf));
        for (std::int64_t j = 0; j < kVocab; ++j) EXPECT_TRUE(std::isnan(c->dlogit(1, j)));
      }
    }
  }
}

TEST_P(SpecialValues, ANanAnywhereMakesTheRowNan) {
  for (const Options& options : transforms(per_row())) {
    for (const int where : {0, 1, 2, 3, 4}) {
      const auto c = make([&](LogitsCase& l) {
        const std::int64_t column = where == 0 ? label(l) : where == 1 ? other(l) : where == 2 ? 0 : where == 3 ? kVocab - 1 : 64;
        l.set_logit(1, column, kNan);
        if (where == 1) l.set_logit(1, label(l), kInf);
        if (where == 4) l.set_logit(1, 63, -kInf);
      });
      expect_agreement(*c, options);
      for (const tileloss_vector* v : {&c->args().loss, &c->args().logp, &c->args().lse, &c->args().entropy,
                                       &c->args().log_sum_sq_probs, &c->args().mean_logit}) {
        EXPECT_TRUE(std::isnan(float_at(*v, 1)));
      }
      EXPECT_EQ(static_cast<const std::int64_t*>(c->args().argmax.data)[1], -1) << where;
      for (std::int64_t j = 0; j < kVocab; ++j) EXPECT_TRUE(std::isnan(c->dlogit(1, j)));
    }
  }
}

// Weights of 0 (1 - s = 0, c_y = 0, zeta = 0) do not hide a NaN in a used row: 0 * NaN is NaN, as in the oracle.
TEST_P(SpecialValues, ANanUnderASaturatedSoftcapOrFullSmoothingIsStillNan) {
  Options options = per_row();
  options.label_smoothing = 1;
  options.logit.softcap = 0.01;
  const auto c = make([](LogitsCase& l) { l.set_logit(1, label(l), kNan); });
  expect_agreement(*c, options);
  EXPECT_TRUE(std::isnan(loss(*c)));
}

TEST_P(SpecialValues, OtherRowsAreUntouched) {
  const auto plain = make([](LogitsCase&) {});
  ASSERT_TRUE(runs_value_and_grad(*plain, per_row()));
  for (const double value : {-kInf, kInf, kNan}) {
    const auto c = make([&](LogitsCase& l) { l.set_logit(1, label(l), value); });
    ASSERT_TRUE(runs_value_and_grad(*c, per_row()));
    for (const std::int64_t i : {0, 2}) {
      EXPECT_EQ(float_at(c->args().loss, i), float_at(plain->args().loss, i));
      EXPECT_EQ(float_at(c->args().entropy, i), float_at(plain->args().entropy, i));
      for (std::int64_t j = 0; j < kVocab; ++j) ASSERT_EQ(c->dlogit(i, j), plain->dlogit(i, j));
    }
  }
}

TEST_P(SpecialValues, AScalarLossOfASpecialRowIsSpecial) {
  for (const tileloss_reduction reduction : {TILELOSS_REDUCTION_SUM, TILELOSS_REDUCTION_MEAN}) {
    for (const double value : {-kInf, kInf, kNan}) {
      LogitsCase c({.rows = 3, .vocab = kVocab, .format = GetParam()}, LogitsCase::Open{});
      c.set_logit(1, c.labels()[1], value);
      c.seal();
      const tileloss_cross_entropy_options options{.reduction = reduction};
      ASSERT_TRUE(runs_value_and_grad(c, options));
      ASSERT_TRUE(agrees(check_cross_entropy(c, options)));
    }
  }
}

TEST_P(SpecialValues, LogprobsGradientsThroughSpecialRows) {
  for (const double value : {-kInf, kInf, kNan}) {
    for (const bool at_label : {false, true}) {
      for (const bool entropy_grad : {false, true}) {
        LogitsCase c({.rows = 3,
                      .vocab = kVocab,
                      .format = GetParam(),
                      .logp_grad = Upstream::kPerRow,
                      .lse_grad = Upstream::kPerRow,
                      .entropy_grad = entropy_grad ? Upstream::kPerRow : Upstream::kAbsent,
                      .loss = false,
                      .row_outputs = false},
                     LogitsCase::Open{});
        c.set_logit(1, at_label ? c.labels()[1] : (c.labels()[1] + 61) % kVocab, value);
        c.seal();
        const tileloss_logprobs_options options = logprobs_options();
        for (const tileloss_schedule schedule : kSchedules) {
          c.reset();
          ASSERT_TRUE(runs("logprobs", TILELOSS_BACKWARD, c.args(), &options, with_schedule(schedule)));
          ASSERT_TRUE(agrees(check_logprobs(c, options))) << value << " at label " << at_label << " entropy " << entropy_grad;
        }
      }
    }
  }
}

// The largest finite numbers: differences overflow to -inf, which is a probability of 0 and nothing worse.
TEST_P(SpecialValues, TheLargestFiniteLogitsAreNoSpecialValues) {
  const double largest = GetParam() == oracle::NumberFormat::kFloat16 ? 65504.0 : 3.3895313892515355e38;  // fits bfloat16
  for (const bool at_label : {false, true}) {
    const auto c = make([&](LogitsCase& l) {
      l.set_logit(1, at_label ? label(l) : other(l), largest);
      l.set_logit(1, (label(l) + 3) % kVocab, -largest);
    });
    Options options = per_row();
    ASSERT_TRUE(runs_value_and_grad(*c, options));
    EXPECT_FALSE(std::isnan(loss(*c)));
    EXPECT_EQ(loss(*c), at_label ? 0.0F : static_cast<float>(largest - c->logits_row(1)[static_cast<std::size_t>(label(*c))]));
    for (std::int64_t j = 0; j < kVocab; ++j) EXPECT_TRUE(std::isfinite(c->dlogit(1, j)));
  }
}

// What frameworks mask with when they do not use -inf.
TEST_P(SpecialValues, MasksOfTheLowestFiniteNumberActLikeMinusInfinity) {
  const double lowest = GetParam() == oracle::NumberFormat::kFloat16 ? -65504.0 : -3.3895313892515355e38;
  for (const std::int64_t spared : {1, 50}) {
    const auto c = make([&](LogitsCase& l) {
      for (std::int64_t j = spared; j < kVocab; ++j) l.set_logit(1, (label(l) + j) % kVocab, lowest);
    });
    c->args().mean_logit = {};  // a sum of such numbers is beyond float32
    expect_agreement(*c, per_row());
    EXPECT_TRUE(std::isfinite(loss(*c)));
  }
  const auto masked = make([&](LogitsCase& l) {
    for (std::int64_t j = 0; j < kVocab; ++j) l.set_logit(1, j, lowest);
  });
  masked->args().mean_logit = {};
  expect_agreement(*masked, per_row());
  EXPECT_NEAR(loss(*masked), std::log(kVocab), 1e-4);
}

}  // namespace
}  // namespace tileloss::test
