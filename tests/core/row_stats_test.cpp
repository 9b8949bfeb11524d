// A row's statistics keep their digits where they are small: confident labels, common offsets.
#include "core/row_stats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/logit_transform.h"
#include "core/row_coefficients.h"
#include "oracle/oracle.h"

namespace tileloss::test {
namespace {

using impl::coefficients_from_upstream;
using impl::kInfinity;
using impl::LogitTransform;
using impl::make_row_stats;
using impl::RowCoefficients;
using impl::RowState;
using impl::RowStats;

constexpr double kFloatRounding = 0x1p-23;

TEST(RowStats, OneMinusPKeepsItsDigitsNearOne) {
  for (const double rest : {1e-1, 4.5e-5, 1e-7, 2e-9, 1e-9, 1e-20, 1e-37}) {
    RowState state;
    state.max = state.label_logit = 12;
    state.sum = static_cast<float>(rest);
    const RowStats s = make_row_stats(state);
    const double exact = static_cast<double>(state.sum);
    EXPECT_NEAR(s.one_minus_p / (exact / (1 + exact)), 1, 1e-15) << rest;
    EXPECT_NEAR(s.logp / -std::log1p(exact), 1, 1e-15) << rest;
    EXPECT_NEAR(s.p, 1 / (1 + exact), 1e-15) << rest;
  }
}

TEST(RowStats, ACertainLabelHasExactlyNoLoss) {
  RowState state;
  state.max = state.label_logit = 3;
  state.collision_sum = 1;
  const RowStats s = make_row_stats(state);
  EXPECT_EQ(s.logp, 0);
  EXPECT_EQ(s.one_minus_p, 0);
  EXPECT_EQ(s.p, 1);
  EXPECT_EQ(s.entropy, 0);
  EXPECT_EQ(s.log_sum_sq_probs, 0);
  EXPECT_EQ(s.lse, 3);
}

TEST(RowStats, ACommonOffsetCostsNothing) {
  RowState near, far;
  near.max = 0;
  near.label_logit = -2;
  far.max = 16384;
  far.label_logit = 16382;
  near.sum = far.sum = 1.7F;
  EXPECT_EQ(make_row_stats(near).logp, make_row_stats(far).logp);
  EXPECT_EQ(make_row_stats(near).p, make_row_stats(far).p);
}

TEST(RowStats, AgreeWithTheOracle) {
  const std::vector<double> z = {1.5, -0.25, 3.0, 2.75, -40.0};
  for (std::int64_t label = 0; label < 5; ++label) {
    oracle::SoftmaxRow row;
    row.compute({}, z, label);
    RowState state;
    state.max = 3;
    state.label_logit = static_cast<float>(z[static_cast<std::size_t>(label)]);
    double sum = 0, entropy = 0, collision = 0;
    for (std::int64_t j = 0; j < 5; ++j) {
      const double d = z[static_cast<std::size_t>(j)] - 3, e = std::exp(d);
      if (j != label) sum += e;
      entropy += d * e;
      collision += e * e;
    }
    state.sum = static_cast<float>(sum);
    state.entropy_sum = static_cast<float>(entropy);
    state.collision_sum = static_cast<float>(collision);
    const RowStats s = make_row_stats(state);
    const oracle::RowOutputs expected = row.outputs();
    EXPECT_NEAR(s.logp, expected.logp, 4 * kFloatRounding * std::max(1.0, -expected.logp)) << label;
    EXPECT_NEAR(s.lse, expected.lse, 4 * kFloatRounding * expected.lse) << label;
    EXPECT_NEAR(s.entropy, expected.entropy, 4 * kFloatRounding) << label;
    EXPECT_NEAR(s.log_sum_sq_probs, expected.log_sum_sq_probs, 8 * kFloatRounding) << label;
    EXPECT_NEAR(s.one_minus_p / row.one_minus_p_label(), 1, 4 * kFloatRounding) << label;
  }
}

TEST(RowStats, RowsWithoutADistributionSayWhichKindTheyAre) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float max : {-kInfinity, kInfinity, kNan}) {
    RowState state;
    state.max = max;
    const RowStats s = make_row_stats(state);
    EXPECT_TRUE(std::isnan(max) ? std::isnan(s.lse) : s.lse == static_cast<double>(max));
    for (const double x : {s.logp, s.p, s.one_minus_p, s.sum, s.entropy, s.log_sum_sq_probs}) EXPECT_TRUE(std::isnan(x));
  }
}

TEST(RowStats, ALabelAtMinusInfinityHasNoProbability) {
  RowState state;
  state.max = 1;
  state.sum = 1.5F;
  const RowStats s = make_row_stats(state);
  EXPECT_EQ(s.logp, -std::numeric_limits<double>::infinity());
  EXPECT_EQ(s.p, 0);
  EXPECT_EQ(s.one_minus_p, 1);
}

TEST(RowCoefficients, ComeFromUpstreamGradients) {
  const RowCoefficients c = coefficients_from_upstream(2, 3, 0.5, 1.25);
  EXPECT_EQ(c.target, 2);
  EXPECT_EQ(c.prob(), -2 + 3 - 0.625F);
  EXPECT_EQ(c.prob_logp, -0.5F);
  EXPECT_EQ(c.uniform, 0);
  // An entropy that does not exist (it was not asked for) does no harm without an upstream gradient.
  EXPECT_EQ(coefficients_from_upstream(1, 0, 0, std::numeric_limits<double>::quiet_NaN()).prob(), -1);
}

TEST(LogitTransform, ValueIsTheDefinition) {
  const LogitTransform plain = LogitTransform::make(2.0, 0, 4.0), capped = LogitTransform::make(0.5, 30, 0.25);
  for (const float x : {-1000.0F, -3.0F, -1e-3F, 0.0F, 1e-6F, 1.0F, 70.0F, 1e30F}) {
    EXPECT_EQ(plain.value(x), 0.5F * x);
    const double expected = 30 * std::tanh(0.5 * x / 30) / 0.25;
    EXPECT_NEAR(capped.value(x), expected, 3 * kFloatRounding * std::fabs(expected)) << x;
  }
  EXPECT_EQ(capped.value(kInfinity), 120);
  EXPECT_EQ(capped.value(-kInfinity), -120);
}

TEST(LogitTransform, DerivativeIsThatOfTheValue) {
  const LogitTransform capped = LogitTransform::make(0.5, 30, 0.25);
  for (const float x : {-200.0F, -3.0F, 0.0F, 1.0F, 70.0F}) {
    const auto z = [](double u) { return 30 * std::tanh(0.5 * u / 30) / 0.25; };
    const double h = 1e-4, expected = (z(x + h) - z(x - h)) / (2 * h);
    EXPECT_NEAR(capped.derivative(x), expected, 1e-7 * std::max(1.0, expected)) << x;
  }
  EXPECT_EQ(capped.derivative(kInfinity), 0);
  EXPECT_EQ(LogitTransform::make(2.0, 0, 4.0).derivative(123), 0.5);
}

}  // namespace
}  // namespace tileloss::test
