// The row stage of policy_loss by itself: a few tokens' losses, gradients and metrics are the oracle's, which its own tests have
// by hand (oracle/policy_values_test.cpp).
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "losses/policy_loss.h"
#include "oracle/policy.h"
#include "support/oracle_options.h"

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
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

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

oracle::PolicyResult expected(const Batch& b) {
  const auto widened = [](const std::vector<float>& v) { return std::vector<double>(v.begin(), v.end()); };
  const std::vector<double> old_logp = widened(b.old_logp), ref_logp = widened(b.ref_logp), advantages = widened(b.advantages);
  const std::vector<double> sampler_logp = widened(b.sampler_logp), loss_grad = widened(b.loss_grad);
  const auto rows = static_cast<std::int64_t>(b.logp.size());
  const std::vector<std::uint8_t> all(b.logp.size(), 1);
  const std::vector<std::int64_t> one_sequence = {0, rows};
  oracle::PolicyInputs inputs;
  inputs.used = b.mask.empty() ? all : b.mask;
  inputs.offsets = b.offsets.empty() ? one_sequence : b.offsets;
  inputs.advantages = advantages;
  inputs.old_logp = old_logp;
  inputs.ref_logp = ref_logp;
  inputs.sampler_logp = sampler_logp;
  inputs.loss_grad = loss_grad;
  return oracle::policy_loss(tools::make_oracle_options(b.options, rows), inputs, b.logp,
                             b.entropy.empty() ? std::vector<double>(b.logp.size()) : b.entropy);
}

void expect_near(double value, double expected, double tolerance, const char* name) {
  if (std::isfinite(expected)) {
    EXPECT_NEAR(value, expected, tolerance * (1 + std::fabs(expected))) << name;
  } else {
    EXPECT_TRUE(std::isnan(expected) ? std::isnan(value) : value == expected) << name << " " << value << " " << expected;
  }
}

void expect_the_oracles(const Batch& b) {
  const Outcome o = run(b);
  const oracle::PolicyResult r = expected(b);
  double loss = r.loss;
  if (b.options.aggregation == TILELOSS_AGGREGATION_NONE) {
    loss = 0;
    for (const double token : r.token_loss) loss += token;
  }
  expect_near(o.loss, loss, 1e-14, "loss");
  for (std::size_t i = 0; i < b.logp.size(); ++i) {
    // Of a row whose softmax is NaN nothing else can come.
    if (std::isnan(b.logp[i]) && r.token_weight[i] != 0) {
      EXPECT_TRUE(std::isnan(o.g[i]));
    } else {
      expect_near(o.g[i], r.dlogp[i], 1e-14, "dlogp");
    }
    expect_near(o.h[i], r.dentropy[i], 1e-14, "dentropy");
  }
  for (std::size_t m = 0; m < o.metrics.size(); ++m) {
    expect_near(static_cast<double>(o.metrics[m]), r.metrics[m], 1e-6, ("metric " + std::to_string(m)).c_str());
  }
}

using Changes = std::vector<std::pair<const char*, std::function<void(Batch&)>>>;

void expect_the_oracles(const Batch& b, const Changes& changes) {
  for (const auto& [name, change] : changes) {
    for (tileloss_policy_kind kind = TILELOSS_POLICY_CLIP; kind <= TILELOSS_POLICY_REINFORCE; ++kind) {
      SCOPED_TRACE(std::string(name) + ", kind " + std::to_string(kind));
      Batch changed = b;
      changed.options.kind = kind;
      change(changed);
      const bool is_cispo = kind == TILELOSS_POLICY_CISPO, is_vespo = kind == TILELOSS_POLICY_VESPO;
      if (is_cispo && std::isnan(changed.options.epsilon_high.value)) continue;  // refused, as is the next
      if (is_vespo && changed.options.sampler_level == TILELOSS_LEVEL_SEQUENCE) continue;
      expect_the_oracles(changed);
    }
  }
}

// Ratios inside, on and outside every bound, infinite ones and NaN; advantages of both signs and 0.
TEST(PolicyStage, OfOneTokenIsTheOracles) {
  float low = 0.125F;
  const Changes changes = {
      {"as it is", [](Batch&) {}},
      {"one bound", [](Batch& b) { b.options.epsilon_high.value = kNan; }},
      {"one bound, behind a pointer",
       [&](Batch& b) {
         b.options.epsilon_high.value = kNan;
         b.options.epsilon_low.pointer = &low;
       }},
      {"bounds of 1", [](Batch& b) { b.options.epsilon_low.value = b.options.epsilon_high.value = 0; }},
      {"delta", [](Batch& b) { b.options.delta.value = 3; }},
      {"delta on it", [](Batch& b) { b.options.delta.value = std::exp(std::log(2.0)); }},
      {"dual_clip", [](Batch& b) { b.options.dual_clip.value = 1.01; }},
      {"dual_clip on it", [](Batch& b) { b.options.dual_clip.value = std::exp(std::log(2.0)); }},
      {"a cap far off", [](Batch& b) { b.options.epsilon_high.value = 5; }},
      {"one plus the cap, and a lower one",
       [](Batch& b) {
         b.options.epsilon_high.value = 5;
         b.options.cispo_cap = TILELOSS_CISPO_CAP_ONE_PLUS;
         b.options.cap_low.value = 0.5;
       }},
      {"no old_logp", [](Batch& b) { b.old_logp.clear(); }},
      {"an old_logp of -inf", [](Batch& b) { b.old_logp[0] = kMinusInf; }},
      {"a penalty",
       [](Batch& b) {
         b.ref_logp = {-1};
         b.options.beta.value = 0.1;
       }},
  };
  for (const double ratio : {0.0, 0.1, 0.25, 1.0, 1.1, 1.7, 2.0, 5.0, 8.0, kInf, kNan}) {
    for (const float advantage : {2.0F, -2.0F, 0.0F}) {
      SCOPED_TRACE("ratio " + std::to_string(ratio) + ", advantage " + std::to_string(advantage));
      Batch b;
      b.logp = {std::log(ratio)};
      b.old_logp = {0};
      b.advantages = {advantage};
      b.options.epsilon_high.value = 0.25;
      b.options.epsilon_low.value = 0.5;
      expect_the_oracles(b, changes);
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
  b.options.epsilon_high.value = 0.2;
  return b;
}

TEST(PolicyStage, OfEveryAggregationIsTheOracles) {
  for (tileloss_aggregation a = TILELOSS_SEQ_MEAN_TOKEN_MEAN; a <= TILELOSS_AGGREGATION_NONE; ++a) {
    for (const double num_items : {kNan, 8.0, 0.5, 0.0}) {
      const bool counts = a == TILELOSS_TOKEN_MEAN || a == TILELOSS_AGGREGATION_SUM;
      if (!counts && !std::isnan(num_items)) continue;
      SCOPED_TRACE(std::to_string(a) + ", num_items " + std::to_string(num_items));
      Batch b = three_sequences();
      b.options.aggregation = a;
      b.options.num_items.value = num_items;
      if (a == TILELOSS_SEQ_MEAN_TOKEN_SUM_NORM) b.options.max_length = 10;
      if (a == TILELOSS_AGGREGATION_NONE) b.loss_grad = {2, 3, -1, 5};
      expect_the_oracles(b, {{"as it is", [](Batch&) {}},
                             {"a logp of -inf", [](Batch& changed) { changed.logp[1] = -kInf; }},
                             {"a logp of NaN", [](Batch& changed) { changed.logp[1] = kNan; }},
                             {"no row in use", [](Batch& changed) {
                                changed.mask = {0, 0, 0, 0};
                              }}});
    }
  }
}

TEST(PolicyStage, OfEveryPenaltyIsTheOracles) {
  for (const tileloss_kl_estimator estimator : {TILELOSS_KL_K1, TILELOSS_KL_K2, TILELOSS_KL_K3}) {
    for (const bool importance : {false, true}) {
      SCOPED_TRACE(std::to_string(estimator) + (importance ? ", by importance" : ""));
      Batch b = three_sequences();
      b.options.beta.value = 2;
      b.options.kl_estimator = estimator;
      b.options.kl_importance = importance ? 1 : 0;
      expect_the_oracles(b, {{"as it is", [](Batch&) {}},
                             {"of sequences", [](Batch& changed) { changed.options.ratio_level = TILELOSS_LEVEL_SEQUENCE; }},
                             {"clamped log ratio", [](Batch& changed) { changed.options.kl_log_ratio_clamp = 0.3; }},
                             {"clamped", [](Batch& changed) { changed.options.kl_clamp = 0.05; }},
                             {"a logp of -inf", [](Batch& changed) { changed.logp[1] = -kInf; }}});
    }
  }
}

TEST(PolicyStage, OfEveryCorrectionAndMaskIsTheOracles) {
  const auto sampler = [](tileloss_sampler_correction correction, tileloss_level level) {
    return [=](Batch& b) {  // old - sampler: -0.25, 0.5, -0.25
      b.options.sampler_correction = correction;
      b.options.sampler_level = level;
      b.options.sampler_max = 1.5;
    };
  };
  const auto entropy = [](double quantile, double threshold, tileloss_entropy_reduction reduction) {
    return [=](Batch& b) {
      b.options.entropy_quantile = quantile;
      b.options.entropy_threshold.value = threshold;
      b.options.entropy_reduction = reduction;
      b.options.entropy_coef.value = 0.5;
    };
  };
  const auto nan_entropy = [&](Batch& b) {
    entropy(kNan, 1.5, TILELOSS_ENTROPY_TOKEN_MEAN)(b);
    b.entropy[1] = kNan;
  };
  const auto nan_sampler = [&](Batch& b) {
    sampler(TILELOSS_SAMPLER_TRUNCATE, TILELOSS_LEVEL_SEQUENCE)(b);
    b.sampler_logp[1] = std::numeric_limits<float>::quiet_NaN();
  };
  const auto off_policy = [](Batch& b) { b.options.off_policy_threshold = -0.1; };  // mean(sampler - logp): -0.25, 0
  expect_the_oracles(three_sequences(),
                     {{"of sequences", [](Batch& b) { b.options.ratio_level = TILELOSS_LEVEL_SEQUENCE; }},
                      {"clamped log ratio", [](Batch& b) { b.options.log_ratio_clamp = 0.1; }},  // D: 0.25, 0, 0.25
                      {"truncated", sampler(TILELOSS_SAMPLER_TRUNCATE, TILELOSS_LEVEL_TOKEN)},
                      {"masked", sampler(TILELOSS_SAMPLER_MASK, TILELOSS_LEVEL_TOKEN)},
                      {"truncated sequences", sampler(TILELOSS_SAMPLER_TRUNCATE, TILELOSS_LEVEL_SEQUENCE)},
                      {"masked sequences", sampler(TILELOSS_SAMPLER_MASK, TILELOSS_LEVEL_SEQUENCE)},
                      {"a sampler's NaN", nan_sampler},
                      {"off policy", off_policy},
                      {"off policy, of another sign",
                       [&](Batch& b) {
                         off_policy(b);
                         b.advantages[1] = 1;
                       }},
                      {"a quantile", entropy(0.75, kNan, TILELOSS_ENTROPY_TOKEN_MEAN)},  // the 0.25 quantile of {1, 2, 3}: 1.5
                      {"a threshold that is a token's", entropy(kNan, 3.0, TILELOSS_ENTROPY_TOKEN_MEAN)},
                      {"entropy as a loss", entropy(kNan, 3.0, TILELOSS_ENTROPY_AS_LOSS)},
                      {"an entropy of NaN", nan_entropy}});
}

TEST(PolicyStage, AQuantileThatIsATokensOwnEntropyKeepsIt) {
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
