// The row stages by themselves: exact row statistics in, a row's loss and its four coefficients out, against the
// oracle.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "losses/cross_entropy.h"
#include "losses/logprobs.h"
#include "losses/registry.h"
#include "oracle/oracle.h"
#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using impl::CrossEntropy;
using impl::kEntropySum;
using impl::kNoSums;
using impl::kSmoothingSum;
using impl::Labels;
using impl::Logprobs;
using impl::LossContext;
using impl::RowCoefficients;
using impl::RowInput;
using impl::RowResult;
using impl::RowStage;
using impl::RowStats;

constexpr double kCoefficientRounding = 3e-7;  // coefficients are float32

const std::vector<double> kLogits = {0.3, -1.2, 2.0, 0.9, -3.5, 1.1};
const std::vector<float> kClassWeights = {0.5F, 1.25F, 2.0F, 0.75F, 1.5F, 0.25F};

// Exact statistics of a row of z.
RowStats stats_of(const std::vector<double>& z, std::int64_t label, const std::vector<float>& class_weights) {
  oracle::SoftmaxRow row;
  row.compute({}, z, label);
  RowStats s;
  s.max = row.max();
  s.sum = row.sum();
  s.log_sum = row.log_sum();
  s.lse = s.max + s.log_sum;
  s.logp = row.logp();
  s.p = row.p(label);
  s.one_minus_p = row.one_minus_p_label();
  s.entropy = row.entropy();
  for (std::size_t j = 0; j < z.size(); ++j) s.smoothing_sum += (class_weights.empty() ? 1.0 : class_weights[j]) * (z[j] - s.max);
  return s;
}

// The gradient form of losses.md.
std::vector<double> gradient_of(const RowCoefficients& c, const std::vector<double>& z, std::int64_t label,
                                const std::vector<float>& class_weights) {
  oracle::SoftmaxRow row;
  row.compute({}, z, label);
  std::vector<double> g;
  for (std::size_t j = 0; j < z.size(); ++j) {
    const double p = row.p(static_cast<std::int64_t>(j)), log_p = z[j] - row.max() - row.log_sum();
    g.push_back(p * (c.prob() + c.prob_logp * log_p) + c.uniform * (class_weights.empty() ? 1.0 : class_weights[j]));
  }
  g[static_cast<std::size_t>(label)] += c.target;
  return g;
}

// One call of two rows with the same logits, labels 2 and 4; a third row is ignored.
struct Setting {
  tileloss_cross_entropy_options options = cross_entropy_options();
  bool class_weights = false;
  bool token_weights = false;
  double upstream = 1;
};

class CrossEntropyStage {
 public:
  explicit CrossEntropyStage(const Setting& setting) : setting_(setting) {
    context_.options = &setting_.options;
    context_.rows = 3;
    context_.classes = static_cast<std::int64_t>(kLogits.size());
    context_.temperature = setting_.options.logit.temperature;
    context_.temperature_on_logprob = setting_.options.logit.temperature_on == TILELOSS_TEMPERATURE_ON_LOGPROB;
    context_.labels = Labels(tileloss_make_vector(labels_, TILELOSS_INT64, 3), -100);
    context_.token_weights = setting_.token_weights ? input(token_weights_, 3) : RowInput({}, 1);
    context_.class_weights = setting_.class_weights ? input(kClassWeights.data(), 6) : RowInput({}, 1);
    upstream_ = static_cast<float>(setting_.upstream);
    context_.loss_grad = input(&upstream_, 1);
    stage_ = CrossEntropy::info().make(context_);
    stage_->prepare();
  }

  RowResult row(std::int64_t i, const std::vector<double>& z) const {
    return stage_->row(i, stats_of(z, labels_[i], setting_.class_weights ? kClassWeights : std::vector<float>{}));
  }
  oracle::CrossEntropy oracle() {
    for (std::size_t i = 0; i < 3; ++i) oracle_labels_[i] = labels_[i];
    doubles_.assign(token_weights_, token_weights_ + 3);
    class_doubles_.assign(kClassWeights.begin(), kClassWeights.end());
    upstream_double_ = upstream_;
    return {make_oracle_options(setting_.options), oracle_labels_,
            setting_.token_weights ? std::span<const double>(doubles_) : std::span<const double>{},
            setting_.class_weights ? std::span<const double>(class_doubles_) : std::span<const double>{},
            std::span(&upstream_double_, 1)};
  }
  std::int64_t label(std::int64_t i) const { return labels_[i]; }
  std::uint32_t forward_sums() const { return stage_->forward_sums(); }

 private:
  static RowInput input(const float* data, std::int64_t size) { return {tileloss_make_vector(data, TILELOSS_FLOAT32, size), 0}; }

  const Setting setting_;
  const std::int64_t labels_[3] = {2, 4, -100};
  const float token_weights_[3] = {0.5F, 1.75F, 100.0F};
  float upstream_ = 1;
  std::int64_t oracle_labels_[3] = {};
  std::vector<double> doubles_, class_doubles_;
  double upstream_double_ = 1;
  LossContext context_;
  std::unique_ptr<RowStage> stage_;
};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const tileloss_reduction reduction : {TILELOSS_REDUCTION_NONE, TILELOSS_REDUCTION_SUM, TILELOSS_REDUCTION_MEAN}) {
    for (int bits = 0; bits < 64; ++bits) {
      Setting s;
      s.options.reduction = reduction;
      s.class_weights = (bits & 1) != 0;
      s.token_weights = (bits & 2) != 0;
      if ((bits & 4) != 0) s.options.label_smoothing = 0.3;
      if ((bits & 8) != 0) s.options.z_loss = 0.01;
      if ((bits & 16) != 0) s.upstream = -2.5;
      if ((bits & 32) != 0) s.options.num_items.value = 7;
      all.push_back(s);
    }
  }
  return all;
}

TEST(CrossEntropyRow, LossAndGradientAreTheOraclesForEveryCombinationOfOptions) {
  for (const Setting& setting : settings()) {
    CrossEntropyStage stage(setting);
    const oracle::CrossEntropy oracle = stage.oracle();
    const bool per_row = setting.options.reduction == TILELOSS_REDUCTION_NONE;
    double sum = 0;
    std::vector<oracle::RowLoss> losses;
    for (std::int64_t i = 0; i < 2; ++i) {
      oracle::SoftmaxRow softmax;
      softmax.compute({}, kLogits, stage.label(i));
      losses.push_back(oracle.row_loss(i, softmax));
      const RowResult result = stage.row(i, kLogits);
      if (per_row) {
        EXPECT_NEAR(result.loss, losses.back().total(), 1e-13);
      }
      sum += result.loss;
      oracle::GradientRow expected;
      oracle.row_gradient(i, softmax, expected);
      const std::vector<double> g =
          gradient_of(result.coefficients, kLogits, stage.label(i), setting.class_weights ? kClassWeights : std::vector<float>{});
      for (std::size_t j = 0; j < g.size(); ++j) EXPECT_NEAR(g[j], expected.gradient[j], kCoefficientRounding * 5);
    }
    if (!per_row) {
      EXPECT_NEAR(sum, oracle.reduce(losses), 1e-13);
    }
  }
}

TEST(CrossEntropyRow, AsksForTheSmoothingSumOnlyWhenItSmooths) {
  Setting setting;
  EXPECT_EQ(CrossEntropyStage(setting).forward_sums(), kNoSums);
  setting.options.label_smoothing = 0.1;
  EXPECT_EQ(CrossEntropyStage(setting).forward_sums(), kSmoothingSum);
}

TEST(CrossEntropyRow, TemperatureOnLogprobDividesTheTargetTermOnly) {
  Setting plain, divided;
  plain.options.z_loss = divided.options.z_loss = 0.1;
  plain.options.reduction = divided.options.reduction = TILELOSS_REDUCTION_SUM;
  divided.options.logit.temperature.value = 4;
  divided.options.logit.temperature_on = TILELOSS_TEMPERATURE_ON_LOGPROB;
  const RowResult a = CrossEntropyStage(plain).row(0, kLogits), b = CrossEntropyStage(divided).row(0, kLogits);
  const RowStats s = stats_of(kLogits, 2, {});
  EXPECT_NEAR(a.loss, -s.logp + 0.1 * s.lse * s.lse, 1e-14);
  EXPECT_NEAR(b.loss, -s.logp / 4 + 0.1 * s.lse * s.lse, 1e-14);
  EXPECT_EQ(b.coefficients.target, a.coefficients.target / 4);
}

TEST(LogprobsRow, CoefficientsGiveTheOraclesGradient) {
  const std::int64_t labels[1] = {3};
  for (const double temperature : {1.0, 2.5}) {
    for (const auto& [g_logp, g_lse, g_entropy, g_mean] : {std::tuple{1.0F, 0.0F, 0.0F, 0.0F},
                                                           {0.0F, 1.0F, 0.0F, 0.0F},
                                                           {0.0F, 0.0F, 1.0F, 0.0F},
                                                           {0.0F, 0.0F, 0.0F, 1.0F},
                                                           {-0.5F, 2.0F, 1.5F, -0.7F}}) {
      LossContext context;
      context.rows = 1;
      context.classes = 6;
      context.temperature = temperature;
      context.temperature_on_logprob = true;
      context.labels = Labels(tileloss_make_vector(labels, TILELOSS_INT64, 1), -100);
      context.logp_grad = RowInput(tileloss_make_vector(&g_logp, TILELOSS_FLOAT32, 1), 0);
      context.lse_grad = RowInput(tileloss_make_vector(&g_lse, TILELOSS_FLOAT32, 1), 0);
      context.entropy_grad = RowInput(tileloss_make_vector(&g_entropy, TILELOSS_FLOAT32, 1), 0);
      context.mean_logit_grad = RowInput(tileloss_make_vector(&g_mean, TILELOSS_FLOAT32, 1), 0);
      const auto stage = Logprobs::info().make(context);
      EXPECT_EQ(stage->backward_sums(), kEntropySum);
      const RowResult result = stage->row(0, stats_of(kLogits, 3, {}));
      oracle::SoftmaxRow softmax;
      softmax.compute({.temperature = temperature, .temperature_on = oracle::TemperatureOn::kLogprob}, kLogits, 3);
      oracle::GradientRow expected;
      oracle::logprobs_gradient(softmax, {g_logp, g_lse, g_entropy, g_mean}, expected);
      const std::vector<double> g = gradient_of(result.coefficients, kLogits, 3, {});
      for (std::size_t j = 0; j < g.size(); ++j) EXPECT_NEAR(g[j], expected.gradient[j], kCoefficientRounding * 5);
    }
  }
}

// The LM head's logits that are kept in 16 bits, which wait for such a gradient, have none of several labels (head_plan.cpp).
TEST(Registry, AGradientOfSeveralLabelsIsNoMultipleOfP) {
  bool has_any = false;
  for (const impl::RegisteredLoss& loss : impl::losses()) {
    if (!loss.info.takes_several_labels) continue;
    has_any = true;
    EXPECT_FALSE(loss.info.make(LossContext())->is_multiple_of_p()) << loss.name;
  }
  EXPECT_TRUE(has_any);
}

TEST(Registry, ListsTheBuiltInFunctionsInOrder) {
  ASSERT_GE(tileloss_function_count(), 2);
  for (std::int64_t i = 0; i < 2; ++i) {
    tileloss_function_info info;
    info.struct_size = sizeof info;
    ASSERT_TRUE(succeeds(tileloss_get_function_info(i, &info)));
    EXPECT_STREQ(info.name, i == 0 ? "logprobs" : "cross_entropy");
    EXPECT_EQ(info.is_loss, i);
    EXPECT_EQ(info.options_size, i == 0 ? sizeof(tileloss_logprobs_options) : sizeof(tileloss_cross_entropy_options));
  }
}

}  // namespace
}  // namespace tileloss::test
