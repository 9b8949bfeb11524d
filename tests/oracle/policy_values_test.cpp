// The policy losses by hand: the closed formulas of each kind, ties, special values, aggregations, masks and metrics.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "oracle/policy.h"

namespace tileloss::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Batch {
  PolicyOptions options;
  std::vector<double> logp, entropy, old_logp, ref_logp, sampler_logp, advantages, loss_grad;
  std::vector<std::int64_t> offsets;
  std::vector<std::uint8_t> used;

  PolicyResult run() const {
    PolicyInputs inputs;
    const std::vector<std::uint8_t> all(logp.size(), 1);
    inputs.used = used.empty() ? all : used;
    inputs.offsets = offsets;
    inputs.advantages = advantages;
    inputs.old_logp = old_logp;
    inputs.ref_logp = ref_logp;
    inputs.sampler_logp = sampler_logp;
    inputs.loss_grad = loss_grad;
    return policy_loss(options, inputs, logp, entropy.empty() ? std::vector<double>(logp.size(), 1.0) : entropy);
  }
};

// One token: l and dl/dlogp.
struct Point {
  double loss, gradient;
};
Point one_token(PolicyOptions options, double advantage, double logp, double old_logp) {
  options.aggregation = Aggregation::kNone;
  Batch batch;
  batch.options = options;
  batch.logp = {logp};
  batch.old_logp = {old_logp};
  batch.advantages = {advantage};
  batch.offsets = {0, 1};
  const PolicyResult result = batch.run();
  return {result.token_loss[0], result.dlogp[0]};
}

void expect_point(const Point& point, double loss, double gradient) {
  EXPECT_NEAR(point.loss, loss, 1e-14 * (1.0 + std::fabs(loss)));
  EXPECT_NEAR(point.gradient, gradient, 1e-14 * (1.0 + std::fabs(gradient)));
}

constexpr double kOld = -1.25;
const std::vector<double> kRatios{0.3, 0.75, 0.95, 1.1, 1.25, 1.7, 2.5, 6.0};

TEST(PolicyKinds, ClipIsTheFormulaOfTheTable) {
  for (const double delta : {kNan, 1.6}) {
    for (const double dual : {kNan, 2.0}) {
      PolicyOptions options;
      options.epsilon_high = 0.3;
      options.delta = delta;
      options.dual_clip = dual;
      for (const double a : {0.7, -1.3}) {
        for (const double rho : kRatios) {
          const double capped = std::isnan(delta) ? rho : std::min(rho, delta);
          const double first = capped * a, second = std::clamp(rho, 0.8, 1.3) * a;
          double loss = -std::min(first, second);
          const bool moves = (first <= second && capped == rho) || (second < first && rho >= 0.8 && rho <= 1.3);
          double gradient = moves ? -rho * a : 0.0;
          if (!std::isnan(dual) && a < 0.0 && loss > -dual * a) {
            loss = -dual * a;
            gradient = 0.0;
          }
          SCOPED_TRACE(rho);
          expect_point(one_token(options, a, kOld + std::log(rho), kOld), loss, gradient);
        }
      }
    }
  }
}

TEST(PolicyKinds, OthersAreTheFormulasOfTheTable) {
  for (const double a : {0.7, -1.3}) {
    for (const double rho : kRatios) {
      SCOPED_TRACE(rho);
      const double logp = kOld + std::log(rho);
      PolicyOptions options;
      options.kind = PolicyKind::kCispo;
      options.epsilon_high = 2.0;
      expect_point(one_token(options, a, logp, kOld), -std::min(rho, 2.0) * a * logp, -std::min(rho, 2.0) * a);
      options.cispo_cap = CispoCap::kOnePlus;
      options.cap_low = 0.9;
      expect_point(one_token(options, a, logp, kOld), -std::clamp(rho, 0.9, 3.0) * a * logp, -std::clamp(rho, 0.9, 3.0) * a);

      options.kind = PolicyKind::kSapo;
      const double tau = a > 0.0 ? 1.0 : 1.05;
      const double s = 1.0 / (1.0 + std::exp(-tau * (rho - 1.0)));
      expect_point(one_token(options, a, logp, kOld), -4.0 / tau * s * a, -4.0 * s * (1.0 - s) * rho * a);

      options.kind = PolicyKind::kReinforce;
      expect_point(one_token(options, a, logp, kOld), -a * logp, -a);

      options.kind = PolicyKind::kVespo;
      const double k = a >= 0.0 ? 2.0 : 3.0, lambda = a >= 0.0 ? 3.0 : 2.0;
      const double phi = std::exp(lambda + k * std::log(rho) - lambda * rho);
      expect_point(one_token(options, a, logp, kOld), -phi * a * logp, -phi * a);
    }
  }
}

TEST(PolicyTies, GiveTheFullGradientOnABound) {
  PolicyOptions options;
  options.epsilon_low = options.epsilon_high = 0.0;  // rho = 1 lies on both bounds
  for (const double a : {2.0, -2.0}) expect_point(one_token(options, a, kOld, kOld), -a, -a);
  options = {};
  options.delta = std::exp(0.5);
  expect_point(one_token(options, -2.0, kOld + 0.5, kOld), 2.0 * std::exp(0.5), 2.0 * std::exp(0.5));
  options = {};
  options.dual_clip = std::exp(0.5);
  expect_point(one_token(options, -2.0, kOld + 0.5, kOld), 2.0 * std::exp(0.5), 2.0 * std::exp(0.5));
  options = {};
  options.log_ratio_clamp = 0.125;
  expect_point(one_token(options, -1.0, kOld + 0.125, kOld), std::exp(0.125), std::exp(0.125));
  expect_point(one_token(options, -1.0, kOld + 0.25, kOld), std::exp(0.125), 0.0);
}

TEST(PolicyValues, TheUpperBoundIsAsFarAsTheLowerUnlessGiven) {
  PolicyOptions options;
  options.epsilon_low = 0.5;
  expect_point(one_token(options, 1.0, kOld + 1.0, kOld), -1.5, 0.0);
}

TEST(PolicySpecialValues, ALogpOfMinusInfinity) {
  PolicyOptions options;
  for (const double a : {1.0, -1.0}) {
    options.kind = PolicyKind::kClip;
    options.epsilon_high = 0.2;
    expect_point(one_token(options, a, -kInfinity, kOld), a > 0.0 ? 0.0 : 0.8, 0.0);
    options.kind = PolicyKind::kSapo;
    const double tau = a > 0.0 ? 1.0 : 1.05;
    expect_point(one_token(options, a, -kInfinity, kOld), -4.0 / tau * a / (1.0 + std::exp(tau)), 0.0);
    options.kind = PolicyKind::kCispo;
    EXPECT_TRUE(std::isnan(one_token(options, a, -kInfinity, kOld).loss));
    for (const PolicyKind kind : {PolicyKind::kReinforce, PolicyKind::kVespo}) {
      options.kind = kind;
      EXPECT_EQ(one_token(options, a, -kInfinity, kOld).loss, a * kInfinity);
    }
  }
  Batch batch;
  batch.logp = {-kInfinity};
  batch.advantages = {1.0};
  batch.offsets = {0, 1};
  batch.ref_logp = {-1.0};
  batch.options.beta = 0.1;
  EXPECT_TRUE(std::isnan(batch.run().token_loss[0]));  // k3
  batch.old_logp = {-1.0};
  batch.options.kl_importance = true;
  for (const KlEstimator estimator : {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3}) {
    batch.options.kl_estimator = estimator;
    EXPECT_TRUE(std::isnan(batch.run().token_loss[0]));
  }
}

TEST(PolicySpecialValues, ARatioOfInfinityHasNoGradientWhereItIsClippedOrSaturated) {
  PolicyOptions options;
  expect_point(one_token(options, 1.0, 0.0, -1e4), -1.2, 0.0);
  EXPECT_EQ(one_token(options, -1.0, 0.0, -1e4).loss, kInfinity);
  EXPECT_EQ(one_token(options, -1.0, 0.0, -1e4).gradient, kInfinity);
  options.delta = 4.0;
  expect_point(one_token(options, -1.0, 0.0, -1e4), 4.0, 0.0);
  options.delta = kNan;
  options.dual_clip = 3.0;
  expect_point(one_token(options, -1.0, 0.0, -1e4), 3.0, 0.0);
  options.kind = PolicyKind::kSapo;
  expect_point(one_token(options, 1.0, 0.0, -1e4), -4.0, 0.0);
}

TEST(PolicySpecialValues, AnAdvantageOfZeroGivesZeroUnlessLogpIsNan) {
  for (const PolicyKind kind :
       {PolicyKind::kClip, PolicyKind::kCispo, PolicyKind::kSapo, PolicyKind::kVespo, PolicyKind::kReinforce}) {
    PolicyOptions options;
    options.kind = kind;
    options.epsilon_high = 0.2;
    for (const double logp : {-1.0, 0.0, -kInfinity}) {
      const Point point = one_token(options, 0.0, logp, -1e4);
      EXPECT_TRUE(point.loss == 0.0 && point.gradient == 0.0);
    }
    EXPECT_TRUE(std::isnan(one_token(options, 0.0, kNan, kOld).loss));
    const bool has_ratio = kind != PolicyKind::kVespo && kind != PolicyKind::kReinforce;
    EXPECT_EQ(std::isnan(one_token(options, 0.0, -1.0, kNan).loss), has_ratio);
    EXPECT_TRUE(std::isnan(one_token(options, 1.0, kNan, kOld).loss));
  }
}

// Two sequences of 3 and 1 tokens and an empty one; reinforce, so that l = -A logp.
Batch make_batch() {
  Batch batch;
  batch.options.kind = PolicyKind::kReinforce;
  batch.logp = {-1.0, -2.0, -4.0, -8.0};
  batch.advantages = {1.0, -1.0, 5.0};
  batch.offsets = {0, 3, 4, 4};
  return batch;
}

TEST(PolicyAggregation, IsExactAndCountsEmptySequences) {
  Batch batch = make_batch();
  const auto loss = [&](Aggregation aggregation, double num_items = kNan) {
    batch.options.aggregation = aggregation;
    batch.options.num_items = num_items;
    batch.options.max_length = 10;
    return batch.run().loss;
  };
  EXPECT_DOUBLE_EQ(loss(Aggregation::kSeqMeanTokenMean), (7.0 / 3.0 - 8.0) / 3.0);
  EXPECT_DOUBLE_EQ(loss(Aggregation::kTokenMean), -1.0 / 4.0);
  EXPECT_DOUBLE_EQ(loss(Aggregation::kTokenMean, 8.0), -1.0 / 8.0);
  EXPECT_DOUBLE_EQ(loss(Aggregation::kSeqMeanTokenSumNorm), -1.0 / 30.0);
  EXPECT_DOUBLE_EQ(loss(Aggregation::kSeqMeanTokenSum), -1.0 / 3.0);
  EXPECT_DOUBLE_EQ(loss(Aggregation::kSum), -1.0);
  EXPECT_DOUBLE_EQ(loss(Aggregation::kSum, 2.0), -0.5);
  EXPECT_EQ(loss(Aggregation::kTokenMean, 0.0), 0.0);
  EXPECT_EQ(batch.run().dlogp, std::vector<double>(4, 0.0));
  batch.options.num_items = kNan;
  batch.options.aggregation = Aggregation::kNone;
  batch.loss_grad = {1.0, 2.0, 3.0, 4.0};
  EXPECT_EQ(batch.run().token_loss, (std::vector<double>{1.0, 2.0, 4.0, -8.0}));
  EXPECT_EQ(batch.run().dlogp, (std::vector<double>{-1.0, -2.0, -3.0, 4.0}));
}

TEST(PolicyAggregation, RowsNotInUseCountNowhere) {
  Batch batch = make_batch();
  batch.used = {1, 0, 1, 0};
  batch.logp[1] = batch.logp[3] = kNan;
  batch.old_logp = {-1.0, kNan, -4.0, kInfinity};
  batch.options.aggregation = Aggregation::kTokenMean;
  const PolicyResult result = batch.run();
  EXPECT_DOUBLE_EQ(result.loss, 5.0 / 2.0);
  EXPECT_EQ(result.dlogp, (std::vector<double>{-0.5, 0.0, -0.5, 0.0}));
  EXPECT_EQ(result.metrics[kMetricTokens], 2.0);
  batch.used = {0, 0, 0, 0};
  EXPECT_EQ(batch.run().loss, 0.0);
  EXPECT_EQ(batch.run().metrics[kMetricRatioMean], 0.0);
}

TEST(PolicySequenceRatio, IsTheGeometricMeanAndSpreadsItsGradient) {
  Batch batch;
  batch.options.ratio_level = Level::kSequence;
  batch.logp = {-1.0, -2.0, -3.0};
  batch.old_logp = {-1.1, -2.2, -2.85};
  batch.advantages = {2.0};
  batch.offsets = {0, 3};
  const PolicyResult result = batch.run();
  const double rho = std::exp((0.1 + 0.2 - 0.15) / 3.0);
  EXPECT_NEAR(result.loss, -2.0 * rho, 1e-15);
  for (const double gradient : result.dlogp) EXPECT_NEAR(gradient, -2.0 * rho / 3.0, 1e-15);
  batch.logp[1] = kNan;
  for (const double gradient : batch.run().dlogp) EXPECT_TRUE(std::isnan(gradient));
}

TEST(PolicyMasks, OfAFactorOfZeroMakesAnInfiniteLossZero) {
  Batch batch = make_batch();
  batch.options.aggregation = Aggregation::kNone;
  batch.logp[3] = -kInfinity;
  batch.sampler_logp = {-1.0, -2.0, -4.0, -8.0};
  batch.old_logp = {-1.0, -2.5, -4.0, 0.0};
  batch.options.sampler_correction = SamplerCorrection::kMask;
  batch.options.sampler_max = 2.0;
  const PolicyResult result = batch.run();
  EXPECT_EQ(result.token_loss[3], 0.0);
  EXPECT_EQ(result.dlogp[3], 0.0);
  EXPECT_DOUBLE_EQ(result.token_loss[1], 2.0 * std::exp(-0.5));
  EXPECT_DOUBLE_EQ(result.metrics[kMetricSamplerRatioMean], (2.0 + std::exp(-0.5)) / 4.0);
  EXPECT_EQ(result.metrics[kMetricSamplerRatioMin], 0.0);
  EXPECT_EQ(result.metrics[kMetricSamplerRatioMax], 1.0);
  batch.logp[3] = kNan;
  EXPECT_TRUE(std::isnan(batch.run().token_loss[3]));
  batch.options.sampler_level = Level::kSequence;
  batch.sampler_logp[0] = kNan;  // counts 0
  EXPECT_DOUBLE_EQ(batch.run().token_loss[0], std::exp(-0.5));
}

TEST(PolicyMasks, OffPolicyDropsOnlyNegativeAdvantagesBeyondTheThreshold) {
  Batch batch = make_batch();
  batch.options.aggregation = Aggregation::kNone;
  batch.advantages = {-1.0, -1.0, 0.0};
  batch.old_logp = {-0.5, kNan, -3.5, -7.9};  // means 1 / 3 (NaN counts 0) and 0.1
  batch.options.off_policy_threshold = 0.3;
  const PolicyResult result = batch.run();
  EXPECT_EQ(result.token_loss[0], 0.0);
  EXPECT_EQ(result.token_loss[3], -8.0);
  EXPECT_EQ(result.metrics[kMetricDroppedSequences], 1.0);
  batch.advantages[0] = 1.0;
  EXPECT_EQ(batch.run().token_loss[0], 1.0);
  EXPECT_EQ(batch.run().metrics[kMetricDroppedSequences], 0.0);
}

TEST(PolicyMasks, EntropyQuantileIsInterpolatedAndItsBoundIsKept) {
  Batch batch = make_batch();
  batch.options.aggregation = Aggregation::kNone;
  batch.entropy = {3.0, 1.0, 4.0, 2.0};
  batch.options.entropy_quantile = 0.5;  // position 1.5: threshold 2.5
  EXPECT_EQ(batch.run().token_loss, (std::vector<double>{1.0, 0.0, 4.0, 0.0}));
  batch.options.entropy_quantile = 1.0;  // position 0: everything
  EXPECT_EQ(batch.run().token_loss, (std::vector<double>{1.0, 2.0, 4.0, -8.0}));
  batch.options.entropy_quantile = kNan;
  batch.options.entropy_threshold = 2.0;
  EXPECT_EQ(batch.run().token_loss, (std::vector<double>{1.0, 0.0, 4.0, -8.0}));
  batch.options.aggregation = Aggregation::kTokenMean;
  batch.options.entropy_coef = 0.1;
  const PolicyResult bonus = batch.run();
  EXPECT_DOUBLE_EQ(bonus.loss, -3.0 / 4.0 - 0.1 * 9.0 / 3.0);
  EXPECT_EQ(bonus.dentropy[1], 0.0);
  EXPECT_DOUBLE_EQ(bonus.dentropy[0], -0.1 / 3.0);
  batch.entropy[2] = kNan;  // is not among those kept
  EXPECT_DOUBLE_EQ(batch.run().dentropy[0], -0.1 / 2.0);
  batch.options.entropy_threshold = kNan;
  batch.options.entropy_quantile = 0.5;
  for (const double loss : batch.run().token_loss) EXPECT_TRUE(std::isnan(loss));
}

TEST(PolicyKl, IsNeitherMaskedNorReweighted) {
  Batch batch = make_batch();
  batch.options.aggregation = Aggregation::kNone;
  batch.options.beta = 0.5;
  batch.options.kl_estimator = KlEstimator::kK1;
  batch.ref_logp = {-2.0, -2.0, -2.0, -2.0};
  batch.options.entropy_threshold = 100.0;  // drops all
  EXPECT_EQ(batch.run().token_loss, (std::vector<double>{0.5, 0.0, -1.0, -3.0}));
  EXPECT_DOUBLE_EQ(batch.run().metrics[kMetricKl], (1.0 + 0.0 - 2.0 - 6.0) / 4.0);
  batch.options.kl_clamp = 1.0;  // on the bound full gradient, beyond it none
  const PolicyResult clamped = batch.run();
  EXPECT_EQ(clamped.token_loss, (std::vector<double>{0.5, 0.0, -0.5, -0.5}));
  EXPECT_EQ(clamped.dlogp, (std::vector<double>{0.5, 0.5, 0.0, 0.0}));
  batch.options.kl_clamp = kNan;
  batch.options.kl_estimator = KlEstimator::kK3;
  EXPECT_NEAR(batch.run().token_loss[0], 0.5 * (std::exp(-1.0) + 1.0 - 1.0), 1e-15);
  EXPECT_NEAR(batch.run().dlogp[0], 0.5 * (1.0 - std::exp(-1.0)), 1e-15);
  batch.options.kl_estimator = KlEstimator::kK2;
  EXPECT_EQ(batch.run().token_loss, (std::vector<double>{0.25, 0.0, 1.0, 9.0}));
  EXPECT_EQ(batch.run().dlogp, (std::vector<double>{0.5, 0.0, -1.0, -3.0}));
}

// l times its factor, beta times the KL and, as a loss of its own, the entropy make up a token's loss; as a mean the entropy's
// bonuses add up to what the loss lacks.
TEST(PolicyTerms, MakeUpTheLoss) {
  for (const auto reduction : {EntropyReduction::kAsLoss, EntropyReduction::kTokenMean}) {
    Batch batch;
    batch.options.aggregation = Aggregation::kTokenMean;
    batch.options.beta = 0.3;
    batch.options.entropy_coef = 0.2;
    batch.options.entropy_reduction = reduction;
    batch.options.sampler_correction = SamplerCorrection::kTruncate;
    batch.options.sampler_max = 1.1;
    batch.logp = {-1.0, -0.4, -2.0};
    batch.entropy = {0.7, 1.5, 0.2};
    batch.old_logp = {-1.1, -0.3, -2.0};
    batch.ref_logp = {-0.8, -0.6, -2.5};
    batch.sampler_logp = {-1.3, -0.3, -1.9};
    batch.advantages = {0.7, -1.3};
    batch.offsets = {0, 2, 3};
    const PolicyResult result = batch.run();
    double loss = 0.0;
    for (std::size_t i = 0; i < 3; ++i) {
      const PolicyTerms& terms = result.terms[i];
      EXPECT_NEAR(terms.ratio, std::exp(batch.logp[i] - batch.old_logp[i]), 1e-14);
      EXPECT_NEAR(terms.factor, std::min(std::exp(batch.old_logp[i] - batch.sampler_logp[i]), 1.1), 1e-14);
      EXPECT_NE(terms.surrogate, 0.0);
      EXPECT_NE(terms.entropy_bonus, 0.0);
      const bool as_loss = reduction == EntropyReduction::kAsLoss;
      const double own = terms.factor * terms.surrogate + 0.3 * terms.kl + (as_loss ? terms.entropy_bonus : 0.0);
      EXPECT_NEAR(result.token_loss[i], own, 1e-14);
      loss += result.token_weight[i] * own + (as_loss ? 0.0 : terms.entropy_bonus);
    }
    EXPECT_NEAR(result.loss, loss, 1e-14);
  }
}

TEST(PolicyMetrics, OfSequencesAverageOverSequences) {
  Batch batch;
  batch.logp = {-1.0, -1.0, -1.0};
  batch.old_logp = {-2.0, -1.0, -0.5};
  batch.advantages = {1.0, -1.0, 1.0};
  batch.offsets = {0, 2, 3, 3};
  PolicyResult result = batch.run();
  EXPECT_DOUBLE_EQ(result.metrics[kMetricClipHighFraction], 1.0 / 3.0);
  EXPECT_DOUBLE_EQ(result.metrics[kMetricClipLowFraction], 1.0 / 3.0);
  EXPECT_DOUBLE_EQ(result.metrics[kMetricClipFraction], 2.0 / 3.0);
  EXPECT_DOUBLE_EQ(result.metrics[kMetricRatioMean], (std::exp(1.0) + 1.0 + std::exp(-0.5)) / 3.0);
  EXPECT_TRUE(std::isnan(result.metrics[kMetricKl]) && std::isnan(result.metrics[kMetricPhiMean]));
  batch.options.ratio_level = Level::kSequence;
  result = batch.run();
  EXPECT_DOUBLE_EQ(result.metrics[kMetricClipHighFraction], 1.0 / 3.0);
  EXPECT_DOUBLE_EQ(result.metrics[kMetricRatioMean], (std::exp(0.5) + std::exp(-0.5) + 1.0) / 3.0);
}

TEST(PolicyMargin, IsTheDistanceToTheNearestDecision) {
  Batch batch = make_batch();
  batch.options.kind = PolicyKind::kClip;
  batch.old_logp = {-1.0, -2.0 - std::log(1.2001), -4.0, -8.0};
  const PolicyResult result = batch.run();
  EXPECT_NEAR(result.margin[1], 0.0001 / 1.2, 1e-12);
  EXPECT_NEAR(result.margin[0], 0.2 / 1.2, 1e-12);
}

TEST(PolicyOptionsThatDoNotGoTogether, AreRefused) {
  Batch batch = make_batch();
  batch.options.kind = PolicyKind::kCispo;
  EXPECT_THROW(batch.run(), std::invalid_argument);
  batch = make_batch();
  batch.options.beta = 0.1;
  EXPECT_THROW(batch.run(), std::invalid_argument);
  batch = make_batch();
  batch.offsets = {0, 3, 2, 4};
  EXPECT_THROW(batch.run(), std::invalid_argument);
  batch = make_batch();
  batch.options.aggregation = Aggregation::kNone;
  batch.options.entropy_coef = 0.1;
  EXPECT_THROW(batch.run(), std::invalid_argument);
}

}  // namespace
}  // namespace tileloss::oracle
