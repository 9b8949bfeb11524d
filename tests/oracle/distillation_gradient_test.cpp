// The distillation losses' gradients against central differences of their own values: every divergence, transform and option.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "oracle/distillation.h"
#include "oracle/soft_labels.h"
#include "support/synthetic.h"
#include "tests/oracle/stencil.h"

namespace tileloss::oracle {
namespace {

using Rows = std::vector<std::vector<double>>;

constexpr std::size_t kRows = 4;
constexpr std::size_t kColumns = 6;  // the last is padding
constexpr std::int64_t kValid = 5;

struct Kind {
  Divergence divergence;
  double beta;
};
const std::vector<Kind> kKinds{
    {Divergence::kForwardKl, 0.5},     {Divergence::kReverseKl, 0.5},     {Divergence::kJeffreys, 0.5},
    {Divergence::kJsd, 0.5},           {Divergence::kJsd, 0.9},           {Divergence::kSkewForwardKl, 0.1},
    {Divergence::kSkewForwardKl, 0.0}, {Divergence::kSkewForwardKl, 0.7}, {Divergence::kSkewReverseKl, 0.1},
    {Divergence::kSkewReverseKl, 0.0}, {Divergence::kSkewReverseKl, 0.7}, {Divergence::kTotalVariation, 0.5}};

Rows make_rows(std::uint64_t seed) {
  Rows logits(kRows, std::vector<double>(kColumns));
  for (std::size_t i = 0; i < kRows; ++i) {
    tools::Random random(seed, tools::Stream::kLogits, static_cast<std::int64_t>(i));
    for (double& value : logits[i]) value = 2.0 * random.next_normal();
  }
  return logits;
}

struct Case {
  DistillationOptions options;
  std::vector<std::int64_t> labels;
  std::vector<double> token_weights, loss_grad;
  // Computes a row of the case's logits; the second argument is the row.
  std::function<void(DistillationRow&, const std::vector<double>&, std::size_t)> compute;
};

// The upstream gradient times the loss.
double scalar_loss(const Case& c, const Rows& logits) {
  const Distillation oracle(c.options, kRows, c.labels, c.token_weights, c.loss_grad);
  DistillationRow values;
  std::vector<double> losses;
  double weighted = 0.0;
  for (std::size_t i = 0; i < kRows; ++i) {
    const auto row = static_cast<std::int64_t>(i);
    if (!oracle.is_ignored(row)) c.compute(values, logits[i], i);
    losses.push_back(oracle.row_loss(row, values));
    weighted += oracle.upstream(row) * losses.back();
  }
  return c.options.reduction == Reduction::kNone ? weighted : oracle.upstream(0) * oracle.reduce(losses);
}

void expect_gradient(const Case& c, Rows logits) {
  const Distillation oracle(c.options, kRows, c.labels, c.token_weights, c.loss_grad);
  DistillationRow values;
  DistillationGradient gradient;
  for (std::size_t i = 0; i < kRows; ++i) {
    const auto row = static_cast<std::int64_t>(i);
    c.compute(values, logits[i], i);
    oracle.row_gradient(row, values, gradient);
    ASSERT_EQ(gradient.dlogits.size(), kColumns);
    for (std::size_t j = 0; j < kColumns; ++j) {
      const double expected = derivative([&] { return scalar_loss(c, logits); }, logits[i][j]);
      ASSERT_NEAR(gradient.dlogits[j], expected, 3e-11 * (1.0 + std::fabs(expected))) << "row " << i << " column " << j;
      ASSERT_LE(std::fabs(gradient.dlogits[j]), gradient.magnitude[j] * (1.0 + 1e-12)) << "row " << i << " column " << j;
      if (oracle.is_ignored(row) || static_cast<std::int64_t>(j) >= kValid) {
        ASSERT_EQ(gradient.dlogits[j], 0.0);
        ASSERT_EQ(gradient.dz[j], 0.0);
      } else {
        ASSERT_DOUBLE_EQ(gradient.dlogits[j], gradient.dz[j] * values.student().dz_dx(static_cast<std::int64_t>(j)));
      }
    }
  }
}

std::string describe(const DistillationOptions& options) {
  return "divergence " + std::to_string(static_cast<int>(options.divergence)) + " beta " + std::to_string(options.beta) +
         " scale " + std::to_string(options.student.logit_scale) + " softcap " + std::to_string(options.student.softcap) + " T " +
         std::to_string(options.student.temperature) + " label_weight " + std::to_string(options.label_weight) + " reduction " +
         std::to_string(static_cast<int>(options.reduction)) + " num_items " + std::to_string(options.num_items);
}

TEST(DistillationGradient, EveryDivergenceTransformAndMixtureMatchesDifferences) {
  const Rows teacher = make_rows(5);
  for (const Kind& kind : kKinds) {
    for (const Transform& transform : {Transform{}, Transform{0.7, 0.0, 0.6}, Transform{1.3, 3.0, 2.0}}) {
      for (const double label : {0.0, 0.3, 1.0}) {
        Case c;
        c.options.divergence = kind.divergence;
        c.options.beta = kind.beta;
        c.options.student = transform;
        c.options.teacher.logit_scale = 0.9;
        if (transform.softcap != 0.0) c.options.teacher = {1.1, 4.0, 0.8};
        c.options.scale_by_temperature_squared = label != 0.0;
        c.options.label_weight = label;
        c.options.divergence_weight = 1.0 - label;
        if (kind.beta != 0.5) c.options.label_temperature = 1.4;
        c.options.valid_vocab = kValid;
        c.labels = {1, 4, -100, 0};
        c.token_weights = {1.0, 0.5, 7.0, 2.0};
        c.compute = [&](DistillationRow& row, const std::vector<double>& logits, std::size_t i) {
          row.compute(c.options, logits, teacher[i], c.labels[i] == -100 ? 0 : c.labels[i]);
        };
        SCOPED_TRACE(describe(c.options));
        ASSERT_NO_FATAL_FAILURE(expect_gradient(c, make_rows(3)));
      }
    }
  }
}

TEST(DistillationGradient, EveryReductionAndUpstreamGradientMatchesDifferences) {
  const Rows teacher = make_rows(5);
  for (const Reduction reduction : {Reduction::kNone, Reduction::kSum, Reduction::kMean}) {
    for (const double num_items : {DistillationOptions::kNotGiven, 7.0}) {
      for (const bool labelled : {false, true}) {
        Case c;
        c.options.divergence = Divergence::kJeffreys;
        c.options.reduction = reduction;
        c.options.num_items = num_items;
        c.options.valid_vocab = kValid;
        if (labelled) c.labels = {1, 4, -100, 0};
        c.token_weights = {1.0, 0.5, 7.0, 2.0};
        c.loss_grad = reduction == Reduction::kNone ? std::vector<double>{2.0, -1.0, 5.0, 0.25} : std::vector<double>{-1.5};
        c.compute = [&](DistillationRow& row, const std::vector<double>& logits, std::size_t i) {
          row.compute(c.options, logits, teacher[i]);
        };
        SCOPED_TRACE(describe(c.options));
        ASSERT_NO_FATAL_FAILURE(expect_gradient(c, make_rows(3)));
      }
    }
  }
}

TEST(DistillationGradient, EverySparseTailMatchesDifferences) {
  const std::vector<std::int64_t> ids{3, 0, 1};
  const std::vector<double> log_q{std::log(0.2), std::log(0.5), std::log(0.1)};
  for (const Kind& kind : kKinds) {
    for (const Tail tail : {Tail::kIgnore, Tail::kLump, Tail::kRenormalise}) {
      for (const double label : {0.0, 0.3}) {
        Case c;
        c.options.divergence = kind.divergence;
        c.options.beta = kind.beta;
        c.options.student = {1.3, 3.0, 0.6};
        c.options.label_weight = label;
        c.options.divergence_weight = 1.0 - label;
        c.options.valid_vocab = kValid;
        c.labels = {1, 4, 2, 0};
        c.compute = [&](DistillationRow& row, const std::vector<double>& logits, std::size_t i) {
          row.compute_sparse(c.options, logits, ids, log_q, tail, c.labels[i]);
        };
        SCOPED_TRACE(describe(c.options) + " tail " + std::to_string(static_cast<int>(tail)));
        ASSERT_NO_FATAL_FAILURE(expect_gradient(c, make_rows(3)));
      }
    }
  }
}

TEST(SoftLabels, GradientMatchesDifferences) {
  const std::vector<double> q{0.3, 0.0, 1.1, 0.05, 0.2, 0.0};
  for (const Transform& transform : {Transform{}, Transform{1.3, 3.0, 0.6}}) {
    for (const double smoothing : {0.0, 0.2, 1.0}) {
      std::vector<double> logits = make_rows(3)[0];
      SoftLabelsRow row, moved;
      soft_labels_row(transform, logits, q, smoothing, row);
      for (std::size_t j = 0; j < logits.size(); ++j) {
        const auto loss = [&] {
          soft_labels_row(transform, logits, q, smoothing, moved);
          return moved.loss;
        };
        const double expected = derivative(loss, logits[j]);
        EXPECT_NEAR(row.dlogits[j], expected, 3e-11 * (1.0 + std::fabs(expected))) << "column " << j;
        EXPECT_LE(std::fabs(row.dlogits[j]), row.magnitude[j] * (1.0 + 1e-12));
      }
    }
  }
}

}  // namespace
}  // namespace tileloss::oracle
