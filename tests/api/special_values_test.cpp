// The table of special values, row by row: finite, NaN or infinite exactly where the oracle is, in every output and gradient.
// On toy and cuda: SpecialValues.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using Options = tileloss_cross_entropy_options;

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kVocab = 200;

class SpecialValues : public testing::TestWithParam<oracle::NumberFormat> {
 protected:
  // Three rows: plain, special, plain.
  static std::unique_ptr<LogitsCase> make(const std::function<void(LogitsCase&)>& change) {
    auto c = std::make_unique<LogitsCase>(
        LogitsCaseSpec{.rows = 3, .vocab = kVocab, .format = GetParam(), .per_row_loss = true, .extra_outputs = true},
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
    ASSERT_TRUE(agrees_in_every_schedule(c, options));
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
  static float loss(const LogitsCase& c) { return float_at(c.args().loss, 1); }
};
INSTANTIATE_TEST_SUITE_P(Formats, SpecialValues, testing::ValuesIn(kFormats), format_name);

std::vector<Options> transforms() {
  std::vector<Options> all(4, {.reduction = TILELOSS_REDUCTION_NONE});
  all[1].logit.temperature.value = 0.5;
  all[2].logit.softcap = 20;  // +-inf is +-20 then
  all[3].z_loss = 1e-3;
  return all;
}

// One by one the others' exps are below 2^-126 there; what the gradient at the label is made of, their sum, is not.
TEST_P(SpecialValues, ALabelFarAboveAllOthersKeepsTheSumOfTheirs) {
  for (const Options& options : {transforms()[0], transforms()[1], transforms()[3]}) {
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

// The oracle's values of them by hand: oracle/oracle_values_test.cpp.
TEST_P(SpecialValues, AreWhereTheOracleHasThem) {
  const auto set = [](double value) { return [=](LogitsCase& l) { l.set_logit(1, label(l), value); }; };
  const auto set_other = [](double value) { return [=](LogitsCase& l) { l.set_logit(1, other(l), value); }; };
  const auto set_others = [](int how_many) {
    return [=](LogitsCase& l) {
      for (std::int64_t j = 0, done = 0; j < kVocab && done < how_many; ++j) {
        const std::int64_t column = (other(l) + j) % kVocab;
        if (column == label(l)) continue;
        l.set_logit(1, column, -kInf);
        ++done;
      }
    };
  };
  const auto set_all = [](LogitsCase& l) {
    for (std::int64_t j = 0; j < kVocab; ++j) l.set_logit(1, j, -kInf);
  };
  const auto and_minus = [](const auto& change) {
    return [=](LogitsCase& l) {
      change(l);
      l.set_logit(1, (label(l) + 3) % kVocab, -kInf);
    };
  };
  const auto nan_at = [](std::int64_t column) { return [=](LogitsCase& l) { l.set_logit(1, column, kNan); }; };
  const std::vector<std::pair<const char*, std::function<void(LogitsCase&)>>> changes = {
      {"another logit of -inf", set_others(1)},
      {"three other logits of -inf", set_others(3)},
      {"all other logits of -inf", set_others(199)},
      {"a label's logit of -inf", set(-kInf)},
      {"a row of -inf", set_all},
      {"a label's logit of +inf", set(kInf)},
      {"a label's logit of +inf, another of -inf", and_minus(set(kInf))},
      {"another logit of +inf", set_other(kInf)},
      {"another logit of +inf, a third of -inf", and_minus(set_other(kInf))},
      {"a label's logit of NaN", set(kNan)},
      {"another logit of NaN, the label's of +inf",
       [&](LogitsCase& l) {
         set(kInf)(l);
         set_other(kNan)(l);
       }},
      {"the first logit of NaN", nan_at(0)},
      {"the last logit of NaN", nan_at(kVocab - 1)},
      {"a logit of NaN beside one of -inf",
       [&](LogitsCase& l) {
         nan_at(64)(l);
         l.set_logit(1, 63, -kInf);
       }},
  };
  // Weights of 0 (1 - s = 0, zeta = 0) do not hide a NaN in a used row: 0 * NaN is NaN.
  std::vector<Options> all = transforms();
  all.push_back({.label_smoothing = 0.2, .reduction = TILELOSS_REDUCTION_NONE});
  all.push_back({.label_smoothing = 1, .reduction = TILELOSS_REDUCTION_NONE});
  all.push_back(all.back());
  all.back().logit.softcap = 0.01;
  for (const auto& [name, change] : changes) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(name + (", options " + std::to_string(i)));
      expect_agreement(*make(change), all[i]);
    }
  }
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

TEST_P(SpecialValues, ATargetLogitOfMinusInfinityWithoutAnyWeightMakesTheLossNan) {
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
