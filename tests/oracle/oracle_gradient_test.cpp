// The oracle's gradients against central differences of its own losses, for every option and all combinations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "oracle/oracle.h"
#include "support/synthetic.h"
#include "tests/oracle/stencil.h"

namespace tileloss::oracle {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Rows = std::vector<std::vector<double>>;

Rows make_rows(std::size_t rows, std::size_t columns, std::uint64_t seed) {
  Rows logits(rows, std::vector<double>(columns));
  for (std::size_t i = 0; i < rows; ++i) {
    tools::Random random(seed, tools::Stream::kLogits, static_cast<std::int64_t>(i));
    for (double& value : logits[i]) value = 2.0 * random.next_normal();
  }
  return logits;
}

struct CrossEntropyInputs {
  std::vector<std::int64_t> labels;
  std::vector<double> token_weights, class_weights, loss_grad;
};

double scalar_loss(const CrossEntropy& oracle, const Rows& logits, const CrossEntropyInputs& inputs) {
  std::vector<RowLoss> losses;
  SoftmaxRow softmax;
  double weighted = 0.0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    if (!oracle.is_ignored(row)) softmax.compute(oracle.options().transform, logits[i], inputs.labels[i]);
    losses.push_back(oracle.row_loss(row, softmax));
    weighted += oracle.upstream(row) * losses.back().total();
  }
  if (oracle.options().reduction == Reduction::kNone) return weighted;
  return oracle.upstream(0) * oracle.reduce(losses);
}

// The four coefficients make up the gradient by z.
void expect_coefficients(const SoftmaxRow& softmax, const GradientRow& gradient, const std::vector<double>& class_weights) {
  const RowCoefficients& c = gradient.coefficients;
  for (std::int64_t j = 0; j < softmax.vocab(); ++j) {
    const auto column = static_cast<std::size_t>(j);
    const double log_p = softmax.logits_z()[column] - softmax.max() - softmax.log_sum();
    const double u = class_weights.empty() ? 1.0 : class_weights[column];
    const double dz = (j == softmax.label() ? c.target : 0.0) + softmax.p(j) * (c.prob + c.prob_logp * log_p) + c.uniform * u;
    ASSERT_NEAR(dz * softmax.dz_dx(j), gradient.gradient[column], 1e-13 * (1.0 + gradient.magnitude[column])) << "column " << j;
  }
}

void expect_cross_entropy_gradient(const CrossEntropyOptions& options, const CrossEntropyInputs& inputs, Rows logits) {
  const CrossEntropy oracle(options, inputs.labels, inputs.token_weights, inputs.class_weights, inputs.loss_grad);
  SoftmaxRow softmax;
  GradientRow gradient;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    softmax.compute(options.transform, logits[i], std::max<std::int64_t>(inputs.labels[i], 0));
    oracle.row_gradient(static_cast<std::int64_t>(i), softmax, gradient);
    ASSERT_EQ(gradient.gradient.size(), logits[i].size());
    expect_coefficients(softmax, gradient, inputs.class_weights);
    for (std::size_t j = 0; j < logits[i].size(); ++j) {
      const double expected = derivative([&] { return scalar_loss(oracle, logits, inputs); }, logits[i][j]);
      ASSERT_NEAR(gradient.gradient[j], expected, 3e-11 * (1.0 + std::fabs(expected))) << "row " << i << " column " << j;
      ASSERT_LE(std::fabs(gradient.gradient[j]), gradient.magnitude[j] * (1.0 + 1e-12));
    }
  }
}

std::string describe(const CrossEntropyOptions& options, std::size_t columns) {
  return "V " + std::to_string(columns) + " scale " + std::to_string(options.transform.logit_scale) + " softcap " +
         std::to_string(options.transform.softcap) + " T " + std::to_string(options.transform.temperature) + " on " +
         std::to_string(static_cast<int>(options.transform.temperature_on)) + " smoothing " +
         std::to_string(options.label_smoothing) + " z_loss " + std::to_string(options.z_loss) + " reduction " +
         std::to_string(static_cast<int>(options.reduction)) + " num_items " + std::to_string(options.num_items);
}

std::vector<Transform> all_transforms() {
  std::vector<Transform> transforms;
  for (const double scale : {1.0, 0.7}) {
    for (const double softcap : {0.0, 3.0}) {
      for (const double temperature : {1.0, 0.6}) {
        for (const TemperatureOn on : {TemperatureOn::kLogits, TemperatureOn::kLogprob}) {
          transforms.push_back({scale, softcap, temperature, on});
        }
      }
    }
  }
  return transforms;
}

std::vector<CrossEntropyOptions> all_options() {
  std::vector<CrossEntropyOptions> all;
  for (const Transform& transform : all_transforms()) {
    for (const double smoothing : {0.0, 0.1, 1.0}) {
      if (smoothing != 0.0 && transform.temperature_on == TemperatureOn::kLogprob) continue;
      for (const double z_loss : {0.0, 0.05}) {
        for (const Reduction reduction : {Reduction::kNone, Reduction::kSum, Reduction::kMean}) {
          all.push_back({transform, smoothing, z_loss, reduction, kNan, -100});
          if (reduction == Reduction::kMean) all.push_back({transform, smoothing, z_loss, reduction, 7.5, -100});
        }
      }
    }
  }
  return all;
}

TEST(OracleGradient, CrossEntropyMatchesCentralDifferencesForEveryCombination) {
  constexpr std::size_t kRows = 3;
  int combinations = 0;
  for (const std::size_t columns : {1UL, 2UL, 5UL}) {
    const Rows logits = make_rows(kRows, columns, columns);
    const auto last = static_cast<std::int64_t>(columns - 1);
    for (const CrossEntropyOptions& options : all_options()) {
      for (int weights = 0; weights < 4; ++weights) {
        CrossEntropyInputs inputs;
        inputs.labels = {0, -100, last};
        if ((weights & 1) != 0) inputs.token_weights = {0.3, 5.0, 1.7};
        if ((weights & 2) != 0) {
          for (std::size_t j = 0; j < columns; ++j) inputs.class_weights.push_back(0.5 + 0.4 * static_cast<double>(j));
        }
        inputs.loss_grad = {-1.5};
        if (options.reduction == Reduction::kNone) inputs.loss_grad = {0.5, 9.0, -2.0};
        SCOPED_TRACE(describe(options, columns) + " weights " + std::to_string(weights));
        expect_cross_entropy_gradient(options, inputs, logits);
        if (HasFatalFailure()) return;
        ++combinations;
      }
    }
  }
  EXPECT_EQ(combinations, 3 * 4 * (8 * 3 + 8) * 2 * 4);
}

TEST(OracleGradient, LogprobsMatchesCentralDifferencesForEveryCombination) {
  for (const std::size_t columns : {1UL, 2UL, 7UL}) {
    for (const Transform& transform : all_transforms()) {
      for (const RowUpstream& upstream :
           std::vector<RowUpstream>{{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}, {-0.7, 1.3, 0.9, -2.1}}) {
        std::vector<double> logits = make_rows(1, columns, 40 + columns)[0];
        const auto label = static_cast<std::int64_t>(columns / 2);
        SoftmaxRow softmax;
        const auto value = [&] {
          softmax.compute(transform, logits, label);
          const RowOutputs outputs = softmax.outputs();
          return upstream.logp * outputs.logp + upstream.lse * outputs.lse + upstream.entropy * outputs.entropy +
                 upstream.mean * outputs.mean_logit;
        };
        value();
        GradientRow gradient;
        logprobs_gradient(softmax, upstream, gradient);
        expect_coefficients(softmax, gradient, {});
        for (std::size_t j = 0; j < columns; ++j) {
          const double expected = derivative(value, logits[j]);
          ASSERT_NEAR(gradient.gradient[j], expected, 3e-11 * (1.0 + std::fabs(expected))) << "V " << columns << " column " << j;
          ASSERT_LE(std::fabs(gradient.gradient[j]), gradient.magnitude[j] * (1.0 + 1e-12));
        }
      }
    }
  }
}

TEST(OracleGradient, SeveralLabelsMatchCentralDifferences) {
  // One is there twice; the likeliest is the row's own.
  const std::vector<LabelUpstream> labels{{2, 0.7}, {5, -1.9}, {2, 0.4}, {0, 2.3}};
  const RowUpstream others{9.0, 1.3, 0.9, -2.1};  // that of logp is nobody's
  for (const Transform& transform : all_transforms()) {
    std::vector<double> logits = make_rows(1, 7, 40)[0];
    SoftmaxRow softmax;
    const auto value = [&] {
      double sum = 0;
      std::int64_t likeliest = 2;
      softmax.compute(transform, logits, 0);
      for (const LabelUpstream& label : labels) {
        softmax.set_label(label.column);
        sum += label.logp * softmax.outputs().logp;
        if (softmax.p(label.column) > softmax.p(likeliest)) likeliest = label.column;
      }
      softmax.set_label(likeliest);
      const RowOutputs outputs = softmax.outputs();
      return sum + others.lse * outputs.lse + others.entropy * outputs.entropy + others.mean * outputs.mean_logit;
    };
    value();
    GradientRow gradient;
    logprobs_gradient(softmax, others, labels, gradient);
    for (std::size_t j = 0; j < logits.size(); ++j) {
      const double expected = derivative(value, logits[j]);
      ASSERT_NEAR(gradient.gradient[j], expected, 3e-11 * (1.0 + std::fabs(expected))) << "column " << j;
      ASSERT_LE(std::fabs(gradient.gradient[j]), gradient.magnitude[j] * (1.0 + 1e-12));
    }
  }
}

TEST(OracleGradient, TheDerivativeByLogpIsThatOfTheLoss) {
  // d loss / d logp, by scaling the label's term: the gradient at the label, less what the others' terms put there.
  const std::vector<std::int64_t> labels{2};
  const std::vector<double> weights{0.8}, grad{3.0};
  CrossEntropyOptions options;
  options.reduction = Reduction::kSum;
  const CrossEntropy oracle(options, labels, weights, {}, grad);
  const Rows logits = make_rows(1, 5, 3);
  SoftmaxRow softmax;
  GradientRow gradient;
  softmax.compute(options.transform, logits[0], 2);
  oracle.row_gradient(0, softmax, gradient);
  EXPECT_DOUBLE_EQ(gradient.dlogp, -0.8 * 3.0);
  EXPECT_DOUBLE_EQ(gradient.gradient[2], gradient.dlogp * softmax.one_minus_p_label());
  EXPECT_DOUBLE_EQ(gradient.scale, 0.8 * 3.0);
}

}  // namespace
}  // namespace tileloss::oracle
