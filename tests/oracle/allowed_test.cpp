// A row whose softmax runs over some columns is the row of these columns alone; what stands outside has a gradient of 0.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "oracle/distillation.h"
#include "oracle/oracle.h"
#include "oracle/soft_labels.h"
#include "tests/oracle/stencil.h"

namespace tileloss::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Values = std::vector<double>;
using Set = std::vector<std::uint8_t>;

// Outside stand a NaN, an infinity, and numbers larger than any inside.
const Values kLogits{0.5, kNan, -1.0, 9.0, 2.0, kInfinity, 1.5};
const Values kTeacher{1.0, 7.0, -kInfinity, kNan, 0.5, 3.0, -0.5};
const Set kSet{1, 0, 1, 0, 1, 0, 1};
constexpr std::int64_t kLabel = 4, kLabelAmong = 2;

Values among(const Values& values) {
  Values chosen;
  for (std::size_t j = 0; j < values.size(); ++j) {
    if (kSet[j] != 0) chosen.push_back(values[j]);
  }
  return chosen;
}

// `values` in the set as `chosen`, exactly 0 outside.
void expect_spread(const Values& values, const Values& chosen, const std::string& what) {
  ASSERT_EQ(values.size(), kSet.size()) << what;
  std::size_t next = 0;
  for (std::size_t j = 0; j < values.size(); ++j) {
    const double expected = kSet[j] != 0 ? chosen[next++] : 0.0;
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(values[j])) << what << ", column " << j;
    } else if (kSet[j] == 0 || std::isinf(expected)) {
      EXPECT_EQ(values[j], expected) << what << ", column " << j;
    } else {
      EXPECT_NEAR(values[j], expected, 1e-15 * (1 + std::fabs(expected))) << what << ", column " << j;
    }
  }
}

void expect_same(double value, double expected, const std::string& what) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(value)) << what;
  } else if (std::isinf(expected)) {
    EXPECT_EQ(value, expected) << what;
  } else {
    EXPECT_NEAR(value, expected, 1e-15 * (1 + std::fabs(expected))) << what;
  }
}

CrossEntropyOptions summed(double label_smoothing) {
  CrossEntropyOptions options;
  options.label_smoothing = label_smoothing;
  options.reduction = Reduction::kSum;
  return options;
}

const std::vector<Transform> kTransforms{{}, {0.7, 0.0, 0.6}, {1.3, 3.0, 2.0}};

TEST(Allowed, BitsOfWordsAreColumnsFromTheLowestOn) {
  const std::vector<std::int32_t> words{1 << 3 | static_cast<std::int32_t>(1U << 31), 2, -1};
  const Set set = unpack_allowed(words, 40);
  ASSERT_EQ(set.size(), 40U);
  for (std::size_t j = 0; j < set.size(); ++j) EXPECT_EQ(set[j], j == 3 || j == 31 || j == 33 ? 1 : 0) << j;
  EXPECT_THROW(unpack_allowed(words, 97), std::invalid_argument);
}

TEST(Allowed, ValuesByHand) {
  // log(1, 2, 5) of five columns: p = 1/8, 2/8, 5/8.
  SoftmaxRow row;
  const Set set{0, 1, 1, 0, 1};
  row.compute({}, Values{100, 0, std::log(2), kNan, std::log(5)}, 2, set);
  const RowOutputs outputs = row.outputs();
  EXPECT_NEAR(outputs.logp, std::log(0.25), 1e-15);
  EXPECT_NEAR(outputs.lse, std::log(8), 1e-15);
  EXPECT_NEAR(outputs.entropy, std::log(8) - (2 * std::log(2) + 5 * std::log(5)) / 8, 1e-15);
  EXPECT_NEAR(outputs.log_sum_sq_probs, std::log(30.0 / 64), 1e-15);
  EXPECT_NEAR(outputs.mean_logit, std::log(10) / 3, 1e-15);
  EXPECT_EQ(outputs.argmax, 4);
  EXPECT_FALSE(outputs.correct);
  EXPECT_EQ(row.classes(), 3);
  // s = 0.3: 0.7 (-log p_y) and a tenth of each -log p.
  const std::vector<std::int64_t> labels{2};
  const CrossEntropy oracle(summed(0.3), labels, {}, {}, {});
  GradientRow gradient;
  oracle.row_gradient(0, row, gradient);
  EXPECT_NEAR(oracle.row_loss(0, row).total(), 0.7 * std::log(4) + 0.1 * (3 * std::log(8) - std::log(10)), 1e-15);
  const Values expected{0, 0.125 - 0.1, 0.25 - 0.7 - 0.1, 0, 0.625 - 0.1};
  for (std::size_t j = 0; j < expected.size(); ++j) EXPECT_NEAR(gradient.gradient[j], expected[j], 1e-15) << j;
  EXPECT_EQ(gradient.gradient[0], 0.0);
  EXPECT_EQ(gradient.gradient[3], 0.0);
}

TEST(Allowed, CrossEntropyIsThatOfTheColumnsOfTheSet) {
  const std::vector<std::int64_t> labels{kLabel}, labels_among{kLabelAmong};
  const Values weights{0.5, 100, 0.9, -100, 1.3, kNan, 1.7};
  for (const Transform& transform : kTransforms) {
    for (const bool weighted : {false, true}) {
      CrossEntropyOptions options = summed(0.2);
      options.transform = transform;
      options.z_loss = 0.05;
      const Values own = weighted ? weights : Values(), own_among = weighted ? among(weights) : Values();
      const CrossEntropy oracle(options, labels, {}, own, {}), other(options, labels_among, {}, own_among, {});
      SoftmaxRow row, chosen;
      row.compute(transform, kLogits, kLabel, kSet);
      chosen.compute(transform, among(kLogits), kLabelAmong);
      GradientRow gradient, expected;
      oracle.row_gradient(0, row, gradient);
      other.row_gradient(0, chosen, expected);
      expect_spread(gradient.gradient, expected.gradient, "gradient");
      expect_spread(gradient.magnitude, expected.magnitude, "magnitude");
      expect_same(oracle.row_loss(0, row).total(), other.row_loss(0, chosen).total(), "loss");
      expect_same(oracle.row_loss(0, row).smoothing_weight, other.row_loss(0, chosen).smoothing_weight, "smoothing_weight");
    }
  }
}

TEST(Allowed, LogprobsAndTheirDifferencesAreThoseOfTheSet) {
  const RowUpstream upstream{-0.7, 1.3, 0.9, -2.1};
  for (const Transform& transform : kTransforms) {
    Values logits = kLogits;
    SoftmaxRow row;
    const auto value = [&] {
      row.compute(transform, logits, kLabel, kSet);
      const RowOutputs o = row.outputs();
      return upstream.logp * o.logp + upstream.lse * o.lse + upstream.entropy * o.entropy + upstream.mean * o.mean_logit;
    };
    value();
    GradientRow gradient;
    logprobs_gradient(row, upstream, gradient);
    for (std::size_t j = 0; j < logits.size(); ++j) {
      const double expected = derivative(value, logits[j]);
      EXPECT_NEAR(gradient.gradient[j], expected, 3e-11 * (1 + std::fabs(expected))) << j;
      EXPECT_TRUE(kSet[j] != 0 || gradient.gradient[j] == 0.0) << j;
    }
  }
}

TEST(Allowed, DistillationIsThatOfTheColumnsOfTheSetOnBothSides) {
  for (const Divergence divergence : {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJeffreys, Divergence::kJsd,
                                      Divergence::kSkewForwardKl, Divergence::kSkewReverseKl, Divergence::kTotalVariation}) {
    for (const Transform& transform : kTransforms) {
      DistillationOptions options;
      options.divergence = divergence;
      options.student = transform;
      options.label_weight = 0.3;
      options.label_temperature = 1.4;
      const std::vector<std::int64_t> labels{kLabel};
      const Distillation oracle(options, 1, labels, {}, {});
      DistillationRow row, chosen;
      row.compute(options, kLogits, kTeacher, kLabel, kSet);
      chosen.compute(options, among(kLogits), among(kTeacher), kLabelAmong);
      DistillationGradient gradient, expected;
      oracle.row_gradient(0, row, gradient);
      oracle.row_gradient(0, chosen, expected);
      const std::string what = "divergence " + std::to_string(static_cast<int>(divergence));
      expect_spread(gradient.dlogits, expected.dlogits, what);
      expect_spread(gradient.magnitude, expected.magnitude, what + ", magnitude");
      expect_same(oracle.row_loss(0, row), oracle.row_loss(0, chosen), what);
      expect_same(row.outputs().teacher_entropy, chosen.outputs().teacher_entropy, what);
      EXPECT_EQ(row.outputs().agreement, chosen.outputs().agreement) << what;
    }
  }
}

TEST(Allowed, AKnownColumnOutsideTheSetIsNone) {
  const std::vector<std::int64_t> ids{6, 3, 0, 1}, ids_among{3, 0};
  const Values log_q{std::log(0.2), std::log(0.6), std::log(0.1), kNan}, log_q_among{log_q[0], log_q[2]};
  for (const Divergence divergence : {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJsd}) {
    for (const Tail tail : {Tail::kIgnore, Tail::kLump, Tail::kRenormalise}) {
      DistillationOptions options;
      options.divergence = divergence;
      const Distillation oracle(options, 1, {}, {}, {});
      DistillationRow row, chosen;
      row.compute_sparse(options, kLogits, ids, log_q, tail, kLabel, kSet);
      chosen.compute_sparse(options, among(kLogits), ids_among, log_q_among, tail, kLabelAmong);
      DistillationGradient gradient, expected;
      oracle.row_gradient(0, row, gradient);
      oracle.row_gradient(0, chosen, expected);
      expect_spread(gradient.dlogits, expected.dlogits, "gradient");
      expect_same(row.outputs().divergence, chosen.outputs().divergence, "divergence");
      expect_same(row.outputs().teacher_entropy, chosen.outputs().teacher_entropy, "teacher_entropy");
      EXPECT_EQ(row.outputs().agreement, chosen.outputs().agreement);
    }
  }
}

TEST(Allowed, SoftLabelsAreThoseOfTheSet) {
  const Values q{0.3, 0, 0, 0, 1.1, 0, 0.2};
  for (const Transform& transform : kTransforms) {
    SoftLabelsRow row, chosen;
    soft_labels_row(transform, kLogits, q, 0.2, row, kSet);
    soft_labels_row(transform, among(kLogits), among(q), 0.2, chosen);
    expect_spread(row.dlogits, chosen.dlogits, "gradient");
    expect_same(row.loss, chosen.loss, "loss");
  }
  // A class outside meets p = 0: it weighs in the gradient of the others, and the loss is infinite.
  Values outside = q;
  outside[3] = 0.5;
  SoftLabelsRow row, without;
  soft_labels_row({}, kLogits, outside, 0, row, kSet);
  soft_labels_row({}, kLogits, q, 0, without, kSet);
  SoftmaxRow softmax;
  softmax.compute({}, kLogits, kLabel, kSet);
  EXPECT_EQ(row.loss, kInfinity);
  for (std::int64_t j = 0; j < std::ssize(q); ++j) {
    const auto at = static_cast<std::size_t>(j);
    EXPECT_NEAR(row.dlogits[at], without.dlogits[at] + 0.5 * softmax.p(j), 1e-15) << j;
  }
}

TEST(Allowed, ALabelOutsideTheSetHasNoProbability) {
  const std::vector<std::int64_t> labels{3};
  const CrossEntropy oracle(summed(0), labels, {}, {}, {});
  SoftmaxRow row;
  row.compute({}, kLogits, 3, kSet);
  GradientRow gradient;
  oracle.row_gradient(0, row, gradient);
  EXPECT_EQ(row.outputs().logp, -kInfinity);
  EXPECT_EQ(oracle.row_loss(0, row).total(), kInfinity);
  for (std::int64_t j = 0; j < row.vocab(); ++j) {
    EXPECT_NEAR(gradient.gradient[static_cast<std::size_t>(j)], row.p(j), 1e-15) << j;
  }
  EXPECT_EQ(gradient.gradient[3], 0.0);
}

TEST(Allowed, AnEmptySetIsARowOfMinusInfinity) {
  const std::vector<std::int64_t> labels{0};
  const CrossEntropy oracle(summed(0.1), labels, {}, {}, {});
  SoftmaxRow row, infinite;
  row.compute({}, kLogits, 0, Set(kLogits.size(), 0));
  infinite.compute({}, Values(kLogits.size(), -kInfinity), 0);
  GradientRow gradient;
  oracle.row_gradient(0, row, gradient);
  EXPECT_TRUE(std::isnan(oracle.row_loss(0, row).total()));
  EXPECT_TRUE(std::all_of(gradient.gradient.begin(), gradient.gradient.end(), [](double g) { return std::isnan(g); }));
  EXPECT_EQ(row.outputs().lse, -kInfinity);
  EXPECT_EQ(row.outputs().mean_logit, infinite.outputs().mean_logit);
  EXPECT_EQ(row.outputs().argmax, infinite.outputs().argmax);
}

TEST(Allowed, ANanInTheSetLeavesZerosOutside) {
  Values logits = kLogits;
  logits[2] = kNan;
  SoftmaxRow row;
  row.compute({}, logits, kLabel, kSet);
  GradientRow gradient;
  logprobs_gradient(row, {1, 0, 1, 1}, gradient);
  expect_spread(gradient.gradient, Values(4, kNan), "gradient");
  EXPECT_EQ(row.outputs().argmax, -1);
}

}  // namespace
}  // namespace tileloss::oracle
