// The row stage of policy_loss by hand: values worked out from the definitions, ties, special values, metrics.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "losses/policy_loss.h"

namespace tileloss::test {
namespace {

using impl::HostSteps;
using impl::Labels;
using impl::LossContext;
using impl::PolicyLoss;
using impl::RowInput;
using impl::RowResult;
using impl::RowStats;
using impl::Sequences;

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

// A few tokens whose logp and entropy are given: no logits, no sweep.
struct Batch {
  std::vector<double> logp, entropy;
  std::vector<float> old_logp, ref_logp, sampler_logp, advantages, loss_grad;
  std::vector<std::int64_t> offsets;
  std::vector<std::uint8_t> mask;
  tileloss_policy_loss_options options = [] {
    tileloss_policy_loss_options o;
    tileloss_policy_loss_options_init(&o);
    o.aggregation = TILELOSS_AGGREGATION_SUM;
    return o;
  }();
};

struct Outcome {
  double loss = 0;
  std::vector<double> g;  // dloss / dlogp
  std::vector<double> h;  // dloss / dH
  std::vector<float> metrics = std::vector<float>(TILELOSS_POLICY_METRICS, -7.0F);
};

class GivenRows {
 public:
  explicit GivenRows(const Batch& batch) : batch_(batch) {}
  RowStats stats(std::int64_t i) const {
    RowStats s;
    s.logp = batch_.logp[static_cast<std::size_t>(i)];
    s.entropy = batch_.entropy.empty() ? 0 : batch_.entropy[static_cast<std::size_t>(i)];
    return s;
  }

 private:
  const Batch& batch_;
};

tileloss_vector view(const std::vector<float>& v) {
  return v.empty() ? tileloss_vector{} : tileloss_make_vector(v.data(), TILELOSS_FLOAT32, static_cast<std::int64_t>(v.size()));
}

Outcome run(const Batch& b) {
  const auto rows = static_cast<std::int64_t>(b.logp.size());
  const std::vector<std::int64_t> labels(b.logp.size(), 0);
  Outcome out;
  LossContext c;
  c.options = &b.options;
  c.rows = rows;
  c.temperature = b.options.logit.temperature;
  c.temperature_on_logprob = b.options.logit.temperature_on == TILELOSS_TEMPERATURE_ON_LOGPROB;
  const tileloss_vector mask = b.mask.empty() ? tileloss_vector{} : tileloss_make_vector(b.mask.data(), TILELOSS_UINT8, rows);
  c.labels = Labels(tileloss_make_vector(labels.data(), TILELOSS_INT64, rows), -100, mask);
  c.loss_grad = RowInput(view(b.loss_grad), 1);
  c.old_logp = RowInput(view(b.old_logp), 0);
  c.ref_logp = RowInput(view(b.ref_logp), 0);
  c.sampler_logp = RowInput(view(b.sampler_logp), 0);
  c.advantages = RowInput(view(b.advantages), 0);
  if (!b.offsets.empty()) {
    const auto size = static_cast<std::int64_t>(b.offsets.size());
    c.sequences = Sequences(tileloss_make_vector(b.offsets.data(), TILELOSS_INT64, size), 0, rows);
  } else {
    c.sequences = Sequences({}, rows, rows);
  }
  c.metrics = view(out.metrics);
  const std::string error = PolicyLoss::info().check(c);
  EXPECT_EQ(error, "");
  std::vector<double> scratch(static_cast<std::size_t>(PolicyLoss(c).scratch_bytes()) / 8 + 1);
  c.scratch = reinterpret_cast<std::byte*>(scratch.data());
  PolicyLoss stage(c);
  HostSteps steps(stage);
  stage.prepare(steps);
  const GivenRows given(b);
  if (stage.couples_rows()) stage.couple(steps, given);
  for (std::int64_t i = 0; i < rows; ++i) {
    if (!c.labels.is_used(i)) {
      out.g.push_back(0);
      out.h.push_back(0);
      continue;
    }
    const RowResult r = stage.row(i, given.stats(i));
    out.loss += r.loss;
    out.g.push_back(r.coefficients.target);
    out.h.push_back(-r.coefficients.prob_logp);
  }
  stage.finish(steps);
  return out;
}

// One token of ratio rho and advantage A.
Outcome token(tileloss_policy_kind kind, double ratio, float advantage, auto&& change) {
  Batch b;
  b.logp = {std::log(ratio)};
  b.old_logp = {0};
  b.advantages = {advantage};
  b.options.kind = kind;
  b.options.epsilon_high.value = 0.25;
  b.options.epsilon_low.value = 0.5;
  change(b);
  return run(b);
}
const auto kAsItIs = [](Batch&) {};

TEST(PolicyClip, InsideOutsideAndBothSigns) {
  const struct {
    double ratio;
    float advantage;
    double loss, g;
  } cases[] = {{1.1, 2, -2.2, -2.2}, {2, 2, -2.5, 0},  {0.25, 2, -0.5, -0.5}, {1.1, -2, 2.2, 2.2},
               {2, -2, 4, 4},        {0.25, -2, 1, 0}, {1.7, 0, 0, 0}};
  for (const auto& k : cases) {
    const Outcome o = token(TILELOSS_POLICY_CLIP, k.ratio, k.advantage, kAsItIs);
    EXPECT_NEAR(o.loss, k.loss, 1e-14) << k.ratio << " " << k.advantage;
    EXPECT_NEAR(o.g[0], k.g, 1e-14) << k.ratio << " " << k.advantage;
  }
}

TEST(PolicyClip, TheUpperBoundIsAsFarAsTheLowerUnlessGiven) {
  float low = 0.125F;
  const auto drop = [](Batch& b) { b.options.epsilon_high.value = kNan; };
  EXPECT_NEAR(token(TILELOSS_POLICY_CLIP, 2, 2, drop).loss, -3, 1e-14);
  const auto behind = [&](Batch& b) { drop(b), b.options.epsilon_low.pointer = &low; };
  EXPECT_NEAR(token(TILELOSS_POLICY_CLIP, 2, 2, behind).loss, -2.25, 1e-14);
}

// rho = 1 exactly, and both bounds on it.
TEST(PolicyClip, OnABoundTheGradientIsTheFullOne) {
  for (const float advantage : {3.0F, -3.0F}) {
    const Outcome o = token(TILELOSS_POLICY_CLIP, 1, advantage,
                            [](Batch& b) { b.options.epsilon_low.value = b.options.epsilon_high.value = 0; });
    EXPECT_EQ(o.loss, -advantage);
    EXPECT_EQ(o.g[0], -advantage);
    EXPECT_EQ(o.metrics[TILELOSS_METRIC_CLIP_FRACTION], 0);
  }
  const Outcome delta = token(TILELOSS_POLICY_CLIP, 1, -3, [](Batch& b) { b.options.delta.value = 1; });
  EXPECT_EQ(delta.g[0], 3);
  const Outcome dual = token(TILELOSS_POLICY_CLIP, 1, -3, [](Batch& b) {
    b.logp[0] = std::log(2.0);
    b.options.dual_clip.value = std::exp(std::log(2.0));
  });
  EXPECT_NEAR(dual.g[0], 6, 1e-14);  // l_clip = -c A is not above it
}

TEST(PolicyClip, DeltaAndDualClipBoundIt) {
  const Outcome delta = token(TILELOSS_POLICY_CLIP, 5, -2, [](Batch& b) { b.options.delta.value = 3; });
  EXPECT_NEAR(delta.loss, 6, 1e-14);
  EXPECT_EQ(delta.g[0], 0);
  const Outcome dual = token(TILELOSS_POLICY_CLIP, 5, -2, [](Batch& b) { b.options.dual_clip.value = 3; });
  EXPECT_NEAR(dual.loss, 6, 1e-14);
  EXPECT_EQ(dual.g[0], 0);
  const Outcome positive = token(TILELOSS_POLICY_CLIP, 1.125, 2, [](Batch& b) { b.options.dual_clip.value = 1.01; });
  EXPECT_NEAR(positive.loss, -2.25, 1e-14);  // only where A < 0
}

TEST(PolicyKinds, ValuesAndGradients) {
  const Outcome raw = token(TILELOSS_POLICY_CISPO, 8, 2, [](Batch& b) { b.options.epsilon_high.value = 5; });
  EXPECT_NEAR(raw.loss, -5 * 2 * std::log(8.0), 1e-13);
  EXPECT_EQ(raw.g[0], -10);
  EXPECT_EQ(raw.metrics[TILELOSS_METRIC_CISPO_CLIP_FRACTION], 1);
  const Outcome one_plus = token(TILELOSS_POLICY_CISPO, 8, 2, [](Batch& b) {
    b.options.epsilon_high.value = 5;
    b.options.cispo_cap = TILELOSS_CISPO_CAP_ONE_PLUS;
  });
  EXPECT_EQ(one_plus.g[0], -12);
  const Outcome low = token(TILELOSS_POLICY_CISPO, 0.1, -2, [](Batch& b) {
    b.options.epsilon_high.value = 5;
    b.options.cap_low.value = 0.5;
  });
  EXPECT_EQ(low.g[0], 1);
  for (const float a : {2.0F, -2.0F}) {
    const double tau = a > 0 ? 1.0 : 1.05, s = 1 / (1 + std::exp(-tau * 0.5));
    const Outcome sapo = token(TILELOSS_POLICY_SAPO, 1.5, a, kAsItIs);
    EXPECT_NEAR(sapo.loss, -4 / tau * s * static_cast<double>(a), 1e-14);
    EXPECT_NEAR(sapo.g[0], -4 * s * (1 - s) * 1.5 * static_cast<double>(a), 1e-14);
  }
  const Outcome reinforce = token(TILELOSS_POLICY_REINFORCE, 0.5, 3, kAsItIs);
  EXPECT_NEAR(reinforce.loss, -3 * std::log(0.5), 1e-14);
  EXPECT_EQ(reinforce.g[0], -3);
  const double w = 0.5, phi = std::exp(3 + 2 * std::log(w) - 3 * w);
  const Outcome vespo = token(TILELOSS_POLICY_VESPO, 0.5, 3, kAsItIs);
  EXPECT_NEAR(vespo.g[0], -3 * phi, 1e-13);
  EXPECT_NEAR(vespo.metrics[TILELOSS_METRIC_PHI_MEAN], phi, 1e-6);
}

TEST(PolicyKinds, WithoutOldLogpTheRatioIsOneWithGradient) {
  for (const tileloss_policy_kind kind : {TILELOSS_POLICY_CLIP, TILELOSS_POLICY_SAPO, TILELOSS_POLICY_CISPO}) {
    const Outcome o = token(kind, 0.3, 2, [](Batch& b) { b.old_logp.clear(); });
    EXPECT_EQ(o.metrics[TILELOSS_METRIC_RATIO_MEAN], 1);
    EXPECT_NEAR(o.g[0], kind == TILELOSS_POLICY_CISPO ? -0.5 : -2, 1e-14) << kind;  // cispo's cap is 0.25
  }
}

TEST(PolicySpecialValues, LogpMinusInfinity) {
  const auto lost = [](Batch& b) { b.logp[0] = -kInf; };
  for (const tileloss_policy_kind kind : {TILELOSS_POLICY_CLIP, TILELOSS_POLICY_SAPO}) {
    const Outcome o = token(kind, 1, 2, lost);
    EXPECT_TRUE(std::isfinite(o.loss)) << kind;
    EXPECT_EQ(o.g[0], 0) << kind;
  }
  EXPECT_TRUE(std::isnan(token(TILELOSS_POLICY_CISPO, 1, 2, lost).loss));
  EXPECT_EQ(token(TILELOSS_POLICY_REINFORCE, 1, 2, lost).loss, kInf);
  EXPECT_EQ(token(TILELOSS_POLICY_REINFORCE, 1, -2, lost).loss, -kInf);
  EXPECT_EQ(token(TILELOSS_POLICY_VESPO, 1, 2, lost).loss, kInf);
  const Outcome k3 = token(TILELOSS_POLICY_CLIP, 1, 2, [](Batch& b) {
    b.logp[0] = -kInf;
    b.ref_logp = {-1};
    b.options.beta.value = 0.1;
  });
  EXPECT_TRUE(std::isnan(k3.loss));
}

TEST(PolicySpecialValues, AnInfiniteRatioHasNoGradientWhereABoundRules) {
  const auto huge = [](Batch& b) { b.old_logp[0] = -std::numeric_limits<float>::infinity(); };
  const Outcome clipped = token(TILELOSS_POLICY_CLIP, 1, 2, huge);
  EXPECT_EQ(clipped.loss, -2.5);
  EXPECT_EQ(clipped.g[0], 0);
  const Outcome none = token(TILELOSS_POLICY_CLIP, 1, 0, huge);
  EXPECT_EQ(none.loss, 0);
  EXPECT_EQ(none.g[0], 0);
  const Outcome gate = token(TILELOSS_POLICY_SAPO, 1, 2, huge);
  EXPECT_EQ(gate.loss, -8);
  EXPECT_EQ(gate.g[0], 0);
}

TEST(PolicySpecialValues, NanIsPassedOnByEveryKind) {
  for (tileloss_policy_kind kind = TILELOSS_POLICY_CLIP; kind <= TILELOSS_POLICY_REINFORCE; ++kind) {
    for (const float advantage : {1.0F, 0.0F}) {
      const Outcome o = token(kind, 1, advantage, [](Batch& b) { b.logp[0] = kNan; });
      EXPECT_TRUE(std::isnan(o.loss)) << kind;
      EXPECT_TRUE(std::isnan(o.g[0])) << kind;
    }
  }
}

// Two sequences of two tokens and an empty one; the fourth token is masked.
Batch three_sequences() {
  Batch b;
  b.logp = {-1.0, -2.0, -0.5, -3.0};
  b.entropy = {1.0, 2.0, 3.0, 9.0};
  b.old_logp = {-1.25F, -2.0F, -0.75F, 99.0F};
  b.ref_logp = {-1.5F, -2.0F, -0.25F, 99.0F};
  b.sampler_logp = {-1.0F, -2.5F, -0.5F, 99.0F};
  b.advantages = {1.0F, -1.0F, 7.0F};
  b.offsets = {0, 2, 4, 4};
  b.mask = {1, 1, 1, 0};
  b.options.kind = TILELOSS_POLICY_REINFORCE;
  return b;
}

TEST(PolicyAggregation, EveryWeight) {
  const double l[] = {1.0, 2.0, -0.5};  // -A logp
  const struct {
    tileloss_aggregation aggregation;
    double num_items;
    double w[3];
  } cases[] = {{TILELOSS_SEQ_MEAN_TOKEN_MEAN, kNan, {1 / 6.0, 1 / 6.0, 1 / 3.0}},
               {TILELOSS_TOKEN_MEAN, kNan, {1 / 3.0, 1 / 3.0, 1 / 3.0}},
               {TILELOSS_TOKEN_MEAN, 8, {1 / 8.0, 1 / 8.0, 1 / 8.0}},
               {TILELOSS_TOKEN_MEAN, 0, {0, 0, 0}},
               {TILELOSS_SEQ_MEAN_TOKEN_SUM_NORM, kNan, {1 / 30.0, 1 / 30.0, 1 / 30.0}},
               {TILELOSS_SEQ_MEAN_TOKEN_SUM, kNan, {1 / 3.0, 1 / 3.0, 1 / 3.0}},
               {TILELOSS_AGGREGATION_SUM, kNan, {1, 1, 1}},
               {TILELOSS_AGGREGATION_SUM, 0.5, {2, 2, 2}},
               {TILELOSS_AGGREGATION_NONE, kNan, {1, 1, 1}}};
  for (const auto& k : cases) {
    Batch b = three_sequences();
    b.options.aggregation = k.aggregation;
    b.options.num_items.value = k.num_items;
    if (k.aggregation == TILELOSS_SEQ_MEAN_TOKEN_SUM_NORM) b.options.max_length = 10;
    const Outcome o = run(b);
    EXPECT_NEAR(o.loss, l[0] * k.w[0] + l[1] * k.w[1] + l[2] * k.w[2], 1e-15) << k.aggregation;
    EXPECT_NEAR(o.g[0], -k.w[0], 1e-15) << k.aggregation;
    EXPECT_NEAR(o.g[2], k.w[2], 1e-15) << k.aggregation;
    EXPECT_EQ(o.g[3], 0);
  }
}

TEST(PolicySequenceLevel, TheRatioIsTheMeansAndReachesEveryToken) {
  Batch b = three_sequences();
  b.options.kind = TILELOSS_POLICY_CLIP;
  b.options.ratio_level = TILELOSS_LEVEL_SEQUENCE;
  const Outcome o = run(b);
  const double first = std::exp(0.125), second = std::exp(0.25);  // within [0.8, 1.2], above it
  EXPECT_NEAR(o.loss, -2 * first + second, 1e-14);
  EXPECT_NEAR(o.g[0], -first, 1e-14);  // rho_b / 2 from each of the two tokens
  EXPECT_NEAR(o.g[1], -first, 1e-14);
  EXPECT_NEAR(o.g[2], second, 1e-14);  // A < 0: the plain branch
  EXPECT_NEAR(o.metrics[TILELOSS_METRIC_RATIO_MEAN], (first + second + 1) / 3, 1e-6);
}

TEST(PolicyKl, EstimatorsAndTheirImportance) {
  const double d[] = {-0.5, 0.0, 0.25};  // ref - logp
  for (const tileloss_kl_estimator k : {TILELOSS_KL_K1, TILELOSS_KL_K2, TILELOSS_KL_K3}) {
    for (const bool importance : {false, true}) {
      Batch b = three_sequences();
      b.advantages = {0, 0, 0};
      b.options.beta.value = 2;
      b.options.kl_estimator = k;
      b.options.kl_importance = importance ? 1 : 0;
      const Outcome o = run(b);
      double sum = 0;
      for (std::size_t i = 0; i < 3; ++i) {
        const double rho = importance ? std::exp(b.logp[i] - static_cast<double>(b.old_logp[i])) : 1;
        const double value = k == TILELOSS_KL_K1 ? -d[i] : k == TILELOSS_KL_K2 ? d[i] * d[i] / 2 : std::exp(d[i]) - d[i] - 1;
        const double slope = k == TILELOSS_KL_K1 ? 1 : k == TILELOSS_KL_K2 ? -d[i] : 1 - std::exp(d[i]);
        sum += 2 * rho * value;
        EXPECT_NEAR(o.g[i], 2 * (rho * slope + (importance ? rho * value : 0)), 1e-14) << k << importance;
      }
      EXPECT_NEAR(o.loss, sum, 1e-14);
      EXPECT_NEAR(o.metrics[TILELOSS_METRIC_KL], sum / 6, 1e-6);
    }
  }
}

TEST(PolicyKl, BeyondAClampTheGradientIsZero) {
  Batch b = three_sequences();
  b.advantages = {0, 0, 0};
  b.options.beta.value = 1;
  b.options.kl_log_ratio_clamp = 0.3;
  Outcome o = run(b);
  EXPECT_EQ(o.g[0], 0);
  EXPECT_NEAR(o.g[2], 1 - std::exp(0.25), 1e-15);
  b.options.kl_log_ratio_clamp = kNan;
  b.options.kl_clamp = 0.05;
  o = run(b);
  EXPECT_EQ(o.g[0], 0);  // k3 = 0.107
  EXPECT_NEAR(o.loss, 0.05 + (std::exp(0.25) - 1.25), 1e-15);
}

TEST(PolicySampler, TruncatesMasksAndWeighsBothLevels) {
  Batch b = three_sequences();  // old - sampler: -0.25, 0.5, -0.25
  b.options.sampler_correction = TILELOSS_SAMPLER_TRUNCATE;
  b.options.sampler_max = 1.5;
  Outcome o = run(b);
  EXPECT_NEAR(o.g[0], -std::exp(-0.25), 1e-15);
  EXPECT_EQ(o.g[1], -1.5);
  EXPECT_NEAR(o.metrics[TILELOSS_METRIC_SAMPLER_RATIO_MAX], 1.5, 1e-6);
  b.options.sampler_correction = TILELOSS_SAMPLER_MASK;
  o = run(b);
  EXPECT_EQ(o.g[1], 0);
  EXPECT_EQ(o.metrics[TILELOSS_METRIC_SAMPLER_RATIO_MIN], 0);
  b.options.sampler_level = TILELOSS_LEVEL_SEQUENCE;
  o = run(b);
  EXPECT_NEAR(o.g[0], -std::exp(0.25), 1e-15);
  EXPECT_NEAR(o.g[1], -std::exp(0.25), 1e-15);
  EXPECT_NEAR(o.metrics[TILELOSS_METRIC_SAMPLER_RATIO_MEAN], (std::exp(0.25) + std::exp(-0.25) + 1) / 3, 1e-6);
  b.sampler_logp[1] = std::numeric_limits<float>::quiet_NaN();  // counts 0
  o = run(b);
  EXPECT_NEAR(o.g[1], -std::exp(-0.25), 1e-15);
}

TEST(PolicyMasks, OffPolicyDropsNegativeTokensOfStraySequences) {
  Batch b = three_sequences();
  b.options.off_policy_threshold = -0.1;  // mean(sampler - logp): -0.25, 0
  Outcome o = run(b);
  EXPECT_EQ(o.g[0], -1);  // below the threshold
  EXPECT_EQ(o.g[2], 0);   // above it, and A < 0
  EXPECT_EQ(o.metrics[TILELOSS_METRIC_DROPPED_SEQUENCES], 1);
  b.advantages[1] = 1;
  o = run(b);
  EXPECT_EQ(o.g[2], -1);
  EXPECT_EQ(o.metrics[TILELOSS_METRIC_DROPPED_SEQUENCES], 0);
}

TEST(PolicyMasks, EntropyQuantileIsInterpolatedAndEntropyBonusFollowsIt) {
  Batch b = three_sequences();
  b.options.entropy_quantile = 0.75;  // the 0.25 quantile of {1, 2, 3}: 1.5
  b.options.entropy_coef.value = 0.5;
  Outcome o = run(b);
  EXPECT_EQ(o.g[0], 0);
  EXPECT_EQ(o.g[1], -1);
  EXPECT_EQ(o.h[0], 0);
  EXPECT_EQ(o.h[1], -0.25);
  EXPECT_EQ(o.h[2], -0.25);
  b.options.entropy_quantile = kNan;
  b.options.entropy_threshold.value = 3.0;  // a bound keeps its token
  o = run(b);
  EXPECT_EQ(o.g[1], 0);
  EXPECT_EQ(o.g[2], 1);
  EXPECT_EQ(o.h[2], -0.5);
  b.options.entropy_reduction = TILELOSS_ENTROPY_AS_LOSS;
  o = run(b);
  EXPECT_EQ(o.h[0], -0.5);  // not masked
}

TEST(PolicyMasks, AQuantileThatIsATokensOwnEntropyKeepsIt) {
  // 0.3 of the way through 11 tokens is place 3, in double 3 + 4e-16.
  Batch b;
  for (int i = 0; i < 11; ++i) {
    b.logp.push_back(-1);
    b.entropy.push_back(1 + 0.1 * i);
  }
  b.advantages = {1.0F};
  b.options.kind = TILELOSS_POLICY_REINFORCE;
  b.options.entropy_quantile = 0.7;
  ASSERT_GT((1 - b.options.entropy_quantile) * 10, 3.0);
  const Outcome o = run(b);
  for (std::size_t i = 0; i < 11; ++i) EXPECT_EQ(o.g[i], i < 3 ? 0 : -1) << i;
}

TEST(PolicyMasks, ANanEntropyIsNotAmongTheTokensKept) {
  Batch b = three_sequences();
  b.options.entropy_threshold.value = 1.5;
  b.options.entropy_coef.value = 0.5;
  b.entropy[1] = kNan;
  const Outcome o = run(b);
  EXPECT_EQ(o.h[2], -0.5);  // the only one kept
}

TEST(PolicyAggregation, NumItemsOfZeroIsZeroWhateverTheTokensAre) {
  Batch b = three_sequences();
  b.options.aggregation = TILELOSS_TOKEN_MEAN;
  b.options.num_items.value = 0;
  for (const double logp : {-kInf, kNan}) {
    b.logp[1] = logp;
    const Outcome o = run(b);
    EXPECT_EQ(o.loss, 0);
    for (const double g : o.g) EXPECT_EQ(g, 0);
  }
}

TEST(PolicyMasks, LogRatioClampStopsTheGradient) {
  Batch b = three_sequences();
  b.options.kind = TILELOSS_POLICY_SAPO;
  b.options.log_ratio_clamp = 0.1;  // D: 0.25, 0, 0.25
  const Outcome o = run(b);
  EXPECT_EQ(o.g[0], 0);
  EXPECT_EQ(o.g[1], -1);
  EXPECT_NEAR(o.metrics[TILELOSS_METRIC_RATIO_MEAN], (2 * std::exp(0.1) + 1) / 3, 1e-6);
}

TEST(PolicyMetrics, NothingInUseGivesZeroAndNan) {
  Batch b = three_sequences();
  b.mask = {0, 0, 0, 0};
  b.options.kind = TILELOSS_POLICY_CLIP;
  const Outcome o = run(b);
  EXPECT_EQ(o.loss, 0);
  for (const int m : {TILELOSS_METRIC_KL, TILELOSS_METRIC_ENTROPY, TILELOSS_METRIC_CLIP_FRACTION, TILELOSS_METRIC_RATIO_MEAN,
                      TILELOSS_METRIC_DROPPED_SEQUENCES, TILELOSS_METRIC_TOKENS}) {
    EXPECT_EQ(o.metrics[static_cast<std::size_t>(m)], 0) << m;
  }
  for (const int m : {TILELOSS_METRIC_CISPO_CLIP_FRACTION, TILELOSS_METRIC_SAMPLER_RATIO_MEAN, TILELOSS_METRIC_PHI_MEAN})
    EXPECT_TRUE(std::isnan(o.metrics[static_cast<std::size_t>(m)])) << m;
}

// The table of names, the enumeration of the header and the number of metrics are three lists of one thing.
TEST(PolicyMetrics, NamesAreInTheOrderOfTheEnumeration) {
  std::vector<std::string> names(1);
  for (const char* at = impl::kPolicyLossMetricNames; *at != '\0'; ++at) {
    if (*at == '|') {
      names.emplace_back();
    } else {
      names.back() += *at;
    }
  }
  ASSERT_EQ(names.size(), static_cast<std::size_t>(TILELOSS_POLICY_METRICS));
  EXPECT_EQ(names[TILELOSS_METRIC_KL], "kl");
  EXPECT_EQ(names[TILELOSS_METRIC_CLIP_FRACTION], "clip_fraction");
  EXPECT_EQ(names[TILELOSS_METRIC_CISPO_CLIP_FRACTION], "cispo_clip_fraction");
  EXPECT_EQ(names[TILELOSS_METRIC_RATIO_MEAN], "ratio_mean");
  EXPECT_EQ(names[TILELOSS_METRIC_SAMPLER_RATIO_MAX], "sampler_ratio_max");
  EXPECT_EQ(names[TILELOSS_METRIC_PHI_MEAN], "phi_mean");
  EXPECT_EQ(names[TILELOSS_METRIC_TOKENS], "tokens");
}

}  // namespace
}  // namespace tileloss::test
