// The oracle's accuracy where double precision is easily lost, and every row of the special-values table.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "oracle/oracle.h"
#include "support/synthetic.h"

namespace tileloss::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

SoftmaxRow make_softmax(const std::vector<double>& logits, std::int64_t label, const Transform& transform = {}) {
  SoftmaxRow softmax;
  softmax.compute(transform, logits, label);
  return softmax;
}

// One row, reduction sum, upstream 1.
struct OneRow {
  double loss = 0.0;
  std::vector<double> gradient;
};
OneRow cross_entropy_row(const std::vector<double>& logits, std::int64_t label, const CrossEntropyOptions& options = {},
                         const std::vector<double>& class_weights = {}) {
  const std::vector<std::int64_t> labels{label};
  CrossEntropyOptions summed = options;
  summed.reduction = Reduction::kSum;
  const CrossEntropy oracle(summed, labels, {}, class_weights, {});
  const SoftmaxRow softmax = make_softmax(logits, label, options.transform);
  GradientRow gradient;
  oracle.row_gradient(0, softmax, gradient);
  return {oracle.row_loss(0, softmax).total(), gradient.gradient};
}

void expect_close(double value, long double expected, double relative) {
  EXPECT_LE(std::fabs(static_cast<long double>(value) - expected), relative * std::fabs(expected)) << value;
}

bool all_nan(const std::vector<double>& values) {
  for (const double value : values) {
    if (!std::isnan(value)) return false;
  }
  return !values.empty();
}

TEST(OracleAccuracy, ConfidentTargetsKeepAllDigits) {
  // 1 - p = e/(1 + e), logp = -log(1 + e), H = log(1 + e) + d e/(1 + e) with e = exp(-d); d = 27.6 is p = 1 - 1e-12.
  for (const double d : {0.5, 3.0, 27.6, 40.0, 80.0, 600.0}) {
    for (const double offset : {0.0, 1e4, -1e4}) {
      const long double distance = static_cast<long double>(d + offset) - static_cast<long double>(offset);
      const long double e = expl(-distance);
      const SoftmaxRow softmax = make_softmax({offset, offset + d}, 1);
      expect_close(softmax.outputs().logp, -log1pl(e), 1e-14);
      expect_close(softmax.outputs().entropy, log1pl(e) + distance * e / (1 + e), 1e-14);
      expect_close(softmax.outputs().log_sum_sq_probs, log1pl(e * e) - 2 * log1pl(e), 1e-14);
      const OneRow row = cross_entropy_row({offset, offset + d}, 1);
      expect_close(row.gradient[1], -e / (1 + e), 1e-14);
      expect_close(row.gradient[0], e / (1 + e), 1e-14);
      // The same row with the other label.
      expect_close(cross_entropy_row({offset, offset + d}, 0).gradient[0], -1 / (1 + e), 1e-14);
    }
  }
}

TEST(OracleAccuracy, EntropyGradientOfAConfidentRowKeepsItsDigits) {
  const long double d = 30.0L, e = expl(-d);
  const long double entropy = log1pl(e) + d * e / (1 + e);
  GradientRow gradient;
  logprobs_gradient(make_softmax({0.0, 30.0}, 1), {0.0, 0.0, 1.0}, gradient);
  expect_close(gradient.gradient[1], -(entropy - log1pl(e)) / (1 + e), 1e-13);
  expect_close(gradient.gradient[0], -e / (1 + e) * (entropy - d - log1pl(e)), 1e-13);
}

TEST(OracleAccuracy, LongRowsAgreeWithLongDouble) {
  constexpr std::size_t kColumns = 151936;
  std::vector<double> logits(kColumns);
  tools::Random random(3, tools::Stream::kLogits, 0);
  for (double& value : logits) value = 3.0 * random.next_normal();
  long double max = logits[0], sum = 0, weighted = 0, squares = 0, total = 0;
  for (const double value : logits) max = std::max<long double>(max, value);
  for (const double value : logits) {
    const long double e = expl(value - max);
    sum += e;
    weighted += e * (value - max);
    squares += e * e;
    total += value;
  }
  const RowOutputs outputs = make_softmax(logits, 777).outputs();
  expect_close(outputs.lse, max + logl(sum), 1e-15);
  expect_close(outputs.logp, logits[777] - max - logl(sum), 1e-14);
  expect_close(outputs.entropy, logl(sum) - weighted / sum, 1e-14);
  expect_close(outputs.log_sum_sq_probs, logl(squares) - 2 * logl(sum), 1e-13);
  expect_close(outputs.mean_logit, total / kColumns, 1e-13);
}

TEST(OracleAccuracy, ASaturatedSoftcapKeepsItsSlope) {
  for (const double x : {1e-6, 0.3, 5.0, 60.0, 200.0, -200.0}) {
    Transform transform;
    transform.softcap = 30.0;
    const SoftmaxRow softmax = make_softmax({x, 0.0}, 1, transform);
    const long double v = static_cast<long double>(x) / 30.0L;
    expect_close(softmax.logits_z()[0], 30.0L * tanhl(v), 1e-15);
    expect_close(softmax.dz_dx(0), 1.0L / (coshl(v) * coshl(v)), 1e-14);
  }
}

TEST(OracleOutputs, ArgmaxIsTheLowestIndexOfTheMaximum) {
  EXPECT_EQ(make_softmax({1.0, 3.0, 3.0, 2.0}, 1).outputs().argmax, 1);
  EXPECT_TRUE(make_softmax({1.0, 3.0, 3.0, 2.0}, 1).outputs().correct);
  EXPECT_FALSE(make_softmax({1.0, 3.0, 3.0, 2.0}, 2).outputs().correct);
  // A tie with the target: both have the same probability, whoever is counted as the largest.
  EXPECT_DOUBLE_EQ(make_softmax({3.0, 3.0}, 1).outputs().logp, -std::log(2.0));
  EXPECT_DOUBLE_EQ(make_softmax({3.0, 3.0}, 1).one_minus_p_label(), 0.5);
}

TEST(OracleOutputs, TemperatureOnLogprobDividesLogpOnly) {
  const std::vector<double> logits{0.3, -1.0, 2.0};
  const RowOutputs plain = make_softmax(logits, 0).outputs();
  Transform transform;
  transform.temperature = 0.5;
  transform.temperature_on = TemperatureOn::kLogprob;
  const RowOutputs older = make_softmax(logits, 0, transform).outputs();
  EXPECT_DOUBLE_EQ(older.logp, plain.logp / 0.5);
  EXPECT_DOUBLE_EQ(older.lse, plain.lse);
  EXPECT_DOUBLE_EQ(older.entropy, plain.entropy);
  EXPECT_DOUBLE_EQ(older.mean_logit, plain.mean_logit);
}

TEST(OracleSpecialValues, AMinusInfinityOffTargetIsAColumnOfProbabilityZero) {
  const OneRow row = cross_entropy_row({1.0, -kInfinity, 2.0}, 0);
  const OneRow without = cross_entropy_row({1.0, 2.0}, 0);
  EXPECT_EQ(row.loss, without.loss);
  EXPECT_EQ(row.gradient[1], 0.0);
  const RowOutputs outputs = make_softmax({1.0, -kInfinity, 2.0}, 0).outputs();
  EXPECT_EQ(outputs.entropy, make_softmax({1.0, 2.0}, 0).outputs().entropy);
  EXPECT_EQ(outputs.mean_logit, -kInfinity);
  GradientRow gradient;
  logprobs_gradient(make_softmax({1.0, -kInfinity, 2.0}, 0), {1.0, 1.0, 1.0}, gradient);
  EXPECT_EQ(gradient.gradient[1], 0.0);
}

TEST(OracleSpecialValues, SmoothingOverAMinusInfinityIsInfinite) {
  CrossEntropyOptions options;
  options.label_smoothing = 0.3;
  const OneRow row = cross_entropy_row({1.0, -kInfinity, 2.0}, 0, options, {1.0, 0.5, 1.0});
  EXPECT_EQ(row.loss, kInfinity);
  EXPECT_DOUBLE_EQ(row.gradient[1], -0.3 / 3.0 * 0.5);
  EXPECT_TRUE(std::isnan(cross_entropy_row({1.0, -kInfinity, 2.0}, 0, options, {1.0, 0.0, 1.0}).loss));
}

TEST(OracleSpecialValues, AMinusInfinityTargetHasInfiniteLossAndTheFormulasGradient) {
  const OneRow row = cross_entropy_row({1.0, -kInfinity}, 1);
  EXPECT_EQ(row.loss, kInfinity);
  EXPECT_EQ(row.gradient[0], 1.0);
  EXPECT_EQ(row.gradient[1], -1.0);
  EXPECT_EQ(make_softmax({1.0, -kInfinity}, 1).outputs().logp, -kInfinity);
  EXPECT_TRUE(std::isnan(cross_entropy_row({1.0, -kInfinity}, 1, {}, {1.0, 0.0}).loss));
  CrossEntropyOptions options;
  options.label_smoothing = 1.0;
  EXPECT_TRUE(std::isnan(cross_entropy_row({1.0, -kInfinity}, 1, options).loss));
}

TEST(OracleSpecialValues, RowsWithoutADistributionAreNaN) {
  struct Case {
    std::vector<double> logits;
    double lse;
    std::int64_t argmax;
  };
  const std::vector<Case> cases{{{-kInfinity, -kInfinity}, -kInfinity, 0},
                                {{1.0, kInfinity}, kInfinity, 1},
                                {{kInfinity, kInfinity}, kInfinity, 0},
                                {{1.0, kNan}, kNan, -1},
                                {{kNan, kInfinity}, kNan, -1}};
  for (const Case& c : cases) {
    const RowOutputs outputs = make_softmax(c.logits, 0).outputs();
    EXPECT_TRUE(outputs.lse == c.lse || (std::isnan(outputs.lse) && std::isnan(c.lse)));
    EXPECT_TRUE(std::isnan(outputs.logp));
    EXPECT_TRUE(std::isnan(outputs.entropy));
    EXPECT_TRUE(std::isnan(outputs.log_sum_sq_probs));
    EXPECT_EQ(outputs.argmax, c.argmax);
    const OneRow row = cross_entropy_row(c.logits, 0);
    EXPECT_TRUE(std::isnan(row.loss));
    EXPECT_TRUE(all_nan(row.gradient));
    GradientRow gradient;
    logprobs_gradient(make_softmax(c.logits, 0), {0.0, 0.0, 1.0}, gradient);
    EXPECT_TRUE(all_nan(gradient.gradient));
  }
}

TEST(OracleSpecialValues, SoftcapMakesInfinitiesFinite) {
  Transform transform;
  transform.softcap = 5.0;
  const SoftmaxRow softmax = make_softmax({kInfinity, -kInfinity, 0.0}, 2, transform);
  EXPECT_EQ(softmax.logits_z()[0], 5.0);
  EXPECT_EQ(softmax.logits_z()[1], -5.0);
  GradientRow gradient;
  logprobs_gradient(softmax, {1.0, 0.0, 0.0}, gradient);
  EXPECT_EQ(gradient.gradient[0], 0.0);
  EXPECT_GT(gradient.gradient[2], 0.0);
}

TEST(OracleSpecialValues, OneColumnHasNoGradientButZLossAndLse) {
  CrossEntropyOptions options;
  EXPECT_EQ(cross_entropy_row({3.0}, 0, options).loss, 0.0);
  EXPECT_EQ(cross_entropy_row({3.0}, 0, options).gradient[0], 0.0);
  options.z_loss = 0.1;
  EXPECT_DOUBLE_EQ(cross_entropy_row({3.0}, 0, options).gradient[0], 2.0 * 0.1 * 3.0);
  EXPECT_EQ(make_softmax({3.0}, 0).outputs().entropy, 0.0);
  GradientRow gradient;
  logprobs_gradient(make_softmax({3.0}, 0), {1.0, 0.25, 1.0}, gradient);
  EXPECT_EQ(gradient.gradient[0], 0.25);
}

TEST(OracleCrossEntropy, IgnoredRowsAreNeitherReadNorCounted) {
  const std::vector<std::int64_t> labels{1, -100, 0};
  const std::vector<double> weights{1.0, kNan, 3.0};
  const CrossEntropy oracle({}, labels, weights, {}, {});
  SoftmaxRow softmax;
  GradientRow gradient;
  softmax.compute({}, std::vector<double>{kNan, kNan}, 0);
  EXPECT_TRUE(oracle.is_ignored(1));
  EXPECT_EQ(oracle.row_loss(1, softmax).total(), 0.0);
  oracle.row_gradient(1, softmax, gradient);
  EXPECT_EQ(gradient.gradient, (std::vector<double>{0.0, 0.0}));
  EXPECT_DOUBLE_EQ(oracle.reduce(std::vector<RowLoss>{{2.0, 0.0}, {0.0, 0.0}, {6.0, 0.0}}), 8.0 / 4.0);
}

TEST(OracleCrossEntropy, TheMeanDividesItsPartsByDifferentSums) {
  const std::vector<std::int64_t> labels{1, 0};
  const std::vector<double> weights{1.0, 3.0}, classes{2.0, 0.5};
  const std::vector<RowLoss> losses{{6.0, 1.0}, {7.0, 3.0}};
  CrossEntropyOptions options;
  EXPECT_DOUBLE_EQ(CrossEntropy(options, labels, weights, classes, {}).reduce(losses), 13.0 / 6.5 + 4.0 / 4.0);
  options.num_items = 10.0;
  EXPECT_DOUBLE_EQ(CrossEntropy(options, labels, weights, classes, {}).reduce(losses), 13.0 / 10.0 + 4.0 / 10.0);
  options.reduction = Reduction::kSum;
  EXPECT_DOUBLE_EQ(CrossEntropy(options, labels, weights, classes, {}).reduce(losses), 17.0);
}

TEST(OracleCrossEntropy, TheSmoothingIsItsShareOfTheLoss) {
  const std::vector<std::int64_t> labels{1};
  const std::vector<double> weights{3.0}, logits{0.5, -1.0, 2.0};
  CrossEntropyOptions options;
  SoftmaxRow softmax;
  softmax.compute(options.transform, logits, 1);
  const RowLoss plain = CrossEntropy(options, labels, weights, {}, {}).row_loss(0, softmax);
  EXPECT_EQ(plain.smoothing, 0.0);
  options.label_smoothing = 0.1;
  const RowLoss loss = CrossEntropy(options, labels, weights, {}, {}).row_loss(0, softmax);
  double mean = 0.0;
  for (const double z : logits) mean += (softmax.outputs().lse - z) / 3.0;
  EXPECT_NEAR(loss.smoothing, 3.0 * 0.1 * mean, 1e-14);
  EXPECT_NEAR(loss.cross_entropy - loss.smoothing, 0.9 * plain.cross_entropy, 1e-14);
}

TEST(OracleCrossEntropy, ADenominatorOfZeroGivesZero) {
  const std::vector<std::int64_t> labels{-100, -100};
  EXPECT_EQ(CrossEntropy({}, labels, {}, {}, {}).reduce(std::vector<RowLoss>(2)), 0.0);
  EXPECT_EQ(CrossEntropy({}, {}, {}, {}, {}).reduce({}), 0.0);
  const std::vector<std::int64_t> used{0};
  const std::vector<double> zero{0.0};
  const CrossEntropy oracle({}, used, zero, {}, {});
  EXPECT_EQ(oracle.reduce(std::vector<RowLoss>{{kInfinity, 0.0}}), 0.0);
  GradientRow gradient;
  oracle.row_gradient(0, make_softmax({1.0, 2.0}, 0), gradient);
  EXPECT_EQ(gradient.gradient, (std::vector<double>{0.0, 0.0}));
}

TEST(OracleCrossEntropy, RefusesWhatDoesNotGoTogether) {
  const std::vector<std::int64_t> labels{0, 1};
  const std::vector<double> three{1.0, 1.0, 1.0}, two{1.0, 1.0};
  CrossEntropyOptions options;
  EXPECT_THROW(CrossEntropy(options, labels, three, {}, {}), std::invalid_argument);
  EXPECT_THROW(CrossEntropy(options, labels, {}, {}, two), std::invalid_argument);
  options.label_smoothing = 0.1;
  options.transform.temperature_on = TemperatureOn::kLogprob;
  EXPECT_THROW(CrossEntropy(options, labels, {}, {}, {}), std::invalid_argument);
  EXPECT_THROW(make_softmax({1.0, 2.0}, 2), std::invalid_argument);
  EXPECT_THROW(make_softmax({1.0, 2.0}, -1), std::invalid_argument);
}

}  // namespace
}  // namespace tileloss::oracle
