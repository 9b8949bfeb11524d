// The policy losses' gradients against central differences of their own values, through the logits: every kind, ratio level,
// aggregation and option. What the definitions detach is held where it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "oracle/oracle.h"
#include "oracle/policy.h"
#include "support/synthetic.h"

namespace tileloss::oracle {
namespace {

constexpr std::size_t kRows = 9;
constexpr std::size_t kColumns = 3;
constexpr double kStep = 1e-3;
// The stencil's four points move logp by less than 4 steps; no decision may turn within that.
constexpr double kClear = 8 * kStep;

// Four sequences, the second empty; row 2 masked, row 7 ignored.
const std::vector<std::int64_t> kOffsets{0, 4, 4, 6, 9};
const std::vector<std::uint8_t> kUsed{1, 1, 0, 1, 1, 1, 1, 0, 1};

struct Case {
  Transform transform;
  PolicyOptions options;
  bool has_old = true;
  std::vector<std::vector<double>> logits;
  std::vector<std::int64_t> labels;
  std::vector<double> advantages, old_logp, ref_logp, sampler_logp, loss_grad;
};

// The upstream gradient times the loss, and what its gradient is made of.
struct Value {
  double loss = 0.0;
  PolicyResult result;
  std::vector<double> logp, entropy;
  std::vector<SoftmaxRow> softmax;
};

Value evaluate(const Case& c, const Value* detached) {
  Value value;
  value.softmax.resize(kRows);
  for (std::size_t i = 0; i < kRows; ++i) {
    value.softmax[i].compute(c.transform, c.logits[i], c.labels[i]);
    value.logp.push_back(value.softmax[i].outputs().logp);
    value.entropy.push_back(value.softmax[i].entropy());
  }
  PolicyInputs inputs;
  inputs.used = kUsed;
  inputs.offsets = kOffsets;
  inputs.advantages = c.advantages;
  if (c.has_old) inputs.old_logp = c.old_logp;
  inputs.ref_logp = c.ref_logp;
  inputs.sampler_logp = c.sampler_logp;
  inputs.loss_grad = c.loss_grad;
  if (detached != nullptr) {
    inputs.detached_logp = detached->logp;
    inputs.detached_entropy = detached->entropy;
  }
  value.result = policy_loss(c.options, inputs, value.logp, value.entropy);
  if (c.options.aggregation == Aggregation::kNone) {
    for (std::size_t i = 0; i < kRows; ++i) value.loss += c.loss_grad[i] * value.result.token_loss[i];
  } else {
    value.loss = c.loss_grad[0] * value.result.loss;
  }
  return value;
}

void draw(Case& c, std::uint64_t seed) {
  c.logits.assign(kRows, std::vector<double>(kColumns));
  tools::Random random(seed, tools::Stream::kLogits, 0);
  c.labels.clear();
  c.advantages.clear();
  for (auto* values : {&c.old_logp, &c.ref_logp, &c.sampler_logp}) values->clear();
  const std::size_t advantages = c.options.advantage_level == Level::kToken ? kRows : kOffsets.size() - 1;
  for (std::size_t i = 0; i < advantages; ++i) c.advantages.push_back((i % 3 == 0 ? -1.0 : 1.0) * (0.5 + random.next_uniform()));
  for (std::size_t i = 0; i < kRows; ++i) {
    for (double& x : c.logits[i]) x = random.next_normal();
    c.labels.push_back(random.next_below(kColumns));
    SoftmaxRow softmax;
    softmax.compute(c.transform, c.logits[i], c.labels[i]);
    const double logp = softmax.outputs().logp;
    for (auto* values : {&c.old_logp, &c.ref_logp, &c.sampler_logp}) values->push_back(logp + 0.4 * random.next_normal());
  }
  c.loss_grad.assign(c.options.aggregation == Aggregation::kNone ? kRows : 1, 1.0);
  for (double& gradient : c.loss_grad) gradient = random.next_normal();
}

// Draws until every decision is clear.
Value draw_clear(Case& c) {
  for (std::uint64_t seed = 1; seed < 500; ++seed) {
    draw(c, seed);
    Value value = evaluate(c, nullptr);
    if (*std::min_element(value.result.margin.begin(), value.result.margin.end()) > kClear) return value;
  }
  ADD_FAILURE() << "no clear inputs";
  return evaluate(c, nullptr);
}

void expect_gradient(Case c) {
  const Value base = draw_clear(c);
  for (std::size_t i = 0; i < kRows; ++i) {
    GradientRow gradient;
    logprobs_gradient(base.softmax[i], {base.result.dlogp[i], 0.0, base.result.dentropy[i]}, gradient);
    ASSERT_TRUE(kUsed[i] != 0 || (base.result.dlogp[i] == 0.0 && base.result.dentropy[i] == 0.0));
    for (std::size_t j = 0; j < kColumns; ++j) {
      double& x = c.logits[i][j];
      const double at = x;
      const auto value = [&](double offset) {
        x = at + offset * kStep;
        return evaluate(c, &base).loss;
      };
      const double expected = (8.0 * (value(1.0) - value(-1.0)) - (value(2.0) - value(-2.0))) / (12.0 * kStep);
      x = at;
      ASSERT_NEAR(gradient.gradient[j], expected, 2e-10 * (1.0 + std::fabs(expected))) << "row " << i << " column " << j;
    }
  }
}

struct Variant {
  std::string name;
  void (*apply)(Case& c);
};

const std::vector<Variant> kVariants{
    {"plain", [](Case&) {}},
    {"no old_logp", [](Case& c) { c.has_old = false; }},
    {"advantages of tokens", [](Case& c) { c.options.advantage_level = Level::kToken; }},
    {"temperature of logprob",
     [](Case& c) {
       c.transform = {1.0, 0.0, 0.6, TemperatureOn::kLogprob};
     }},
    {"scale, softcap, temperature",
     [](Case& c) {
       c.transform = {0.7, 3.0, 0.8, TemperatureOn::kLogits};
     }},
    {"delta, dual clip, caps",
     [](Case& c) {
       c.options.delta = 1.5;
       c.options.dual_clip = 1.3;
       c.options.cap_low = 0.8;
       c.options.cispo_cap = CispoCap::kOnePlus;
     }},
    {"log ratio clamp", [](Case& c) { c.options.log_ratio_clamp = 0.3; }},
    {"sampler truncate",
     [](Case& c) {
       c.options.sampler_correction = SamplerCorrection::kTruncate;
       c.options.sampler_max = 1.2;
     }},
    {"sampler mask, off-policy mask",
     [](Case& c) {
       c.options.sampler_correction = SamplerCorrection::kMask;
       c.options.sampler_level = c.options.kind == PolicyKind::kVespo ? Level::kToken : Level::kSequence;
       c.options.sampler_min = 0.5;
       c.options.sampler_max = 1.5;
       c.options.off_policy_threshold = 0.1;
     }},
    {"entropy quantile and loss",
     [](Case& c) {
       c.options.entropy_quantile = 0.6;
       c.options.entropy_coef = 0.3;
       c.options.entropy_reduction = EntropyReduction::kAsLoss;
     }},
    {"entropy threshold and bonus",
     [](Case& c) {
       c.options.entropy_threshold = 0.9;
       c.options.entropy_coef = 0.3;
       if (c.options.aggregation == Aggregation::kNone) c.options.entropy_reduction = EntropyReduction::kAsLoss;
     }},
    {"k1", [](Case& c) { c.options.beta = 0.5, c.options.kl_estimator = KlEstimator::kK1; }},
    {"k2 with importance",
     [](Case& c) { c.options.beta = 0.5, c.options.kl_estimator = KlEstimator::kK2, c.options.kl_importance = true; }},
    {"k3 with importance", [](Case& c) { c.options.beta = 0.5, c.options.kl_importance = true; }},
    {"k3, clamped",
     [](Case& c) {
       c.options.beta = 0.5;
       c.options.kl_log_ratio_clamp = 0.6;
       c.options.kl_clamp = 0.1;
     }},
    {"num_items",
     [](Case& c) {
       if (c.options.aggregation == Aggregation::kTokenMean || c.options.aggregation == Aggregation::kSum)
         c.options.num_items = 3.5;
     }},
};

const std::vector<std::string> kKinds{"clip", "cispo", "sapo", "vespo", "reinforce"};

class PolicyGradient : public testing::TestWithParam<int> {};

TEST_P(PolicyGradient, MatchesCentralDifferencesForEveryLevelAggregationAndOption) {
  for (const Level level : {Level::kToken, Level::kSequence}) {
    for (int aggregation = 0; aggregation <= static_cast<int>(Aggregation::kNone); ++aggregation) {
      for (const Variant& variant : kVariants) {
        SCOPED_TRACE(variant.name + ", level " + std::to_string(static_cast<int>(level)) + ", aggregation " +
                     std::to_string(aggregation));
        Case c;
        c.options.kind = static_cast<PolicyKind>(GetParam());
        c.options.ratio_level = level;
        c.options.aggregation = static_cast<Aggregation>(aggregation);
        c.options.max_length = 5;
        if (c.options.kind == PolicyKind::kCispo) c.options.epsilon_high = 1.3;
        variant.apply(c);
        expect_gradient(c);
        if (HasFatalFailure() || HasNonfatalFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Of, PolicyGradient, testing::Range(0, 5),
                         [](const auto& kind) { return kKinds[static_cast<std::size_t>(kind.param)]; });

// Inputs on both sides of every decision, or the differences above would have compared zeros.
TEST(PolicyGradientInputs, HaveTokensOnBothSidesOfTheClip) {
  Case c;
  const Value value = draw_clear(c);
  int clipped = 0, moving = 0;
  for (std::size_t i = 0; i < kRows; ++i) {
    if (kUsed[i] == 0) continue;
    (value.result.dlogp[i] == 0.0 ? clipped : moving) += 1;
  }
  EXPECT_GT(clipped, 0);
  EXPECT_GT(moving, 0);
}

}  // namespace
}  // namespace tileloss::oracle
