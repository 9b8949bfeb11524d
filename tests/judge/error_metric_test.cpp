#include "judge/gates/error_metric.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "judge/oracles/row_outputs.h"
#include "support/synthetic.h"
#include "tests/shared/input_families.h"

namespace tileloss::tools {
namespace {

using oracle::NumberFormat;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A row of logits in a format, its oracle gradient, and an output to corrupt.
struct Row {
  Row(NumberFormat row_format, std::int64_t columns, const char* distribution = "normal",
      const oracle::CrossEntropyOptions& options = {})
      : format(row_format), labels{columns / 3} {
    std::vector<unsigned char> stored(static_cast<std::size_t>(columns) * oracle::format_info(format).bytes);
    fill_logits_row(*find_distribution(distribution), 5, 0, labels[0], format, stored.data(), columns);
    std::vector<double> logits(static_cast<std::size_t>(columns));
    oracle::decode_row(format, stored.data(), logits);
    softmax.compute(options.transform, logits, labels[0]);
    oracle::CrossEntropy(options, labels, {}, {}, {}).row_gradient(0, softmax, gradient);
    output.resize(stored.size());
    round_reference();
  }

  // The best possible output.
  void round_reference() { oracle::encode_row(format, gradient.gradient, output.data()); }
  double get(std::int64_t column) const { return oracle::decode_at(format, output.data(), column); }
  void set(std::int64_t column, double value) { oracle::encode_at(format, output.data(), column, value); }
  double ulp(std::int64_t column) const {
    const double value = std::fabs(gradient.gradient[static_cast<std::size_t>(column)]);
    const oracle::FormatInfo& info = oracle::format_info(format);
    return std::max(std::exp2(std::floor(std::log2(value)) - info.mantissa_bits), info.smallest_step);
  }
  GradientMetric measure() const {
    GradientMetric metric(format);
    metric.add_row(0, output.data(), softmax.vocab(), make_row_reference(softmax, gradient));
    return metric;
  }
  bool passes() const { return all_pass(measure().gates()); }
  std::int64_t label() const { return labels[0]; }
  // An off-target column whose gradient is well above the format's smallest normal number, if there is one: the largest.
  std::int64_t large_off_target() const {
    std::int64_t best = label() == 0 ? 1 : 0;
    for (std::int64_t j = 0; j < softmax.vocab(); ++j) {
      if (j != label() && std::fabs(gradient.gradient[static_cast<std::size_t>(j)]) >
                              std::fabs(gradient.gradient[static_cast<std::size_t>(best)])) {
        best = j;
      }
    }
    return best;
  }

  NumberFormat format;
  std::vector<std::int64_t> labels;
  oracle::SoftmaxRow softmax;
  oracle::GradientRow gradient;
  std::vector<unsigned char> output;
};

std::string name_of(NumberFormat format) { return oracle::format_info(format).name; }

double gate_value(const std::vector<Gate>& gates, const std::string& name) {
  for (const Gate& gate : gates) {
    if (gate.name == name) return gate.value;
  }
  ADD_FAILURE() << "no gate " << name;
  return kNan;
}

TEST(GradientMetric, ACorrectRoundingIsWithinHalfAnUlp) {
  oracle::CrossEntropyOptions with_everything;
  with_everything.label_smoothing = 0.1;
  with_everything.z_loss = 1e-3;
  with_everything.transform = {0.9, 30.0, 1.3, oracle::TemperatureOn::kLogits};
  for (const NumberFormat format : test::kFormats) {
    for (const std::string_view distribution : distribution_names()) {
      for (const std::int64_t columns : {2, 17, 1000, 5000}) {
        for (const auto& options : {oracle::CrossEntropyOptions{}, with_everything}) {
          const Row row(format, columns, std::string(distribution).c_str(), options);
          const GradientMetric metric = row.measure();
          EXPECT_LE(metric.worst_ulp_target().value, 0.5) << name_of(format) << " " << distribution << " " << columns;
          EXPECT_LE(metric.worst_ulp_off_target().value, 0.5) << name_of(format) << " " << distribution << " " << columns;
          EXPECT_TRUE(all_pass(metric.gates())) << name_of(format) << " " << distribution << " " << columns;
        }
      }
    }
  }
}

TEST(GradientMetric, TwoUlpsInOneElementAreRejectedInTheHalfFormats) {
  for (const NumberFormat format : {NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
    Row row(format, 1000);
    for (const std::int64_t column : {row.label(), row.large_off_target()}) {
      row.round_reference();
      ASSERT_TRUE(row.passes());
      row.set(column, row.get(column) + 2.0 * row.ulp(column));
      const GradientMetric metric = row.measure();
      EXPECT_FALSE(all_pass(metric.gates())) << name_of(format);
      const bool on_target = column == row.label();
      const Worst worst = on_target ? metric.worst_ulp_target() : metric.worst_ulp_off_target();
      EXPECT_GE(worst.value, 1.5);
      EXPECT_EQ(worst.at.row, 0);
      EXPECT_EQ(worst.at.column, column);
      EXPECT_GT(gate_value(metric.gates(), on_target ? "dlogits/ulp_target" : "dlogits/ulp_off_target"), 1.0);
      EXPECT_LE(gate_value(metric.gates(), on_target ? "dlogits/ulp_off_target" : "dlogits/ulp_target"), 1.0);
    }
  }
}

TEST(GradientMetric, Float32IsAllowedFourUlpsAndTheDistanceFromTheMaximum) {
  Row row(NumberFormat::kFloat32, 1000);
  const std::int64_t column = row.large_off_target();
  const double distance = row.softmax.max() - row.softmax.logits_z()[static_cast<std::size_t>(column)];
  row.set(column, row.get(column) + (3.0 + distance) * row.ulp(column));
  EXPECT_TRUE(row.passes());
  row.set(column, row.get(column) + 3.0 * row.ulp(column));
  EXPECT_FALSE(row.passes());
}

TEST(GradientMetric, Float32AtAConfidentTargetIsAllowedTheDistanceOfTheOthers) {
  // 1 - p is made of exps 32 below the target.
  Row row(NumberFormat::kFloat32, 1000, "confident");
  row.set(row.label(), row.get(row.label()) + 30.0 * row.ulp(row.label()));
  EXPECT_TRUE(row.passes());
  row.set(row.label(), row.get(row.label()) + 30.0 * row.ulp(row.label()));
  EXPECT_FALSE(row.passes());
}

TEST(GradientMetric, Float32UnderATransformIsAllowedTheSizeOfTheLogits) {
  oracle::CrossEntropyOptions options;
  options.transform.temperature = 0.7;
  for (const auto& [transform, passes] : {std::pair{oracle::Transform{}, false}, std::pair{options.transform, true}}) {
    Row row(NumberFormat::kFloat32, 1000, "offset_plus", {.transform = transform});
    const std::int64_t column = row.large_off_target();
    row.set(column, row.get(column) + 5000.0 * row.ulp(column));
    EXPECT_EQ(row.passes(), passes);
  }
}

TEST(GradientMetric, AnErrorAtTheSmallestProbabilityIsSeen) {
  // 80 below the spike: 1e-35 in bfloat16 and float32, where its ULP is judged like any other's.
  for (const NumberFormat format : {NumberFormat::kBfloat16, NumberFormat::kFloat32}) {
    oracle::CrossEntropyOptions options;
    options.reduction = oracle::Reduction::kSum;
    Row row(format, 1000, "spike_first", options);
    // The target is not the spike, hence the row's largest gradient is 1 and its floor 2^-48: only a row without such a
    // large component shows the small ones.
    row.labels[0] = 0;
    std::vector<double> logits(row.softmax.logits_z().begin(), row.softmax.logits_z().end());
    row.softmax.compute({}, logits, 0);
    oracle::CrossEntropy(options, row.labels, {}, {}, {}).row_gradient(0, row.softmax, row.gradient);
    row.round_reference();
    ASSERT_TRUE(row.passes());
    const std::int64_t column = row.large_off_target();
    ASSERT_LT(row.get(column), 1e-30);
    row.set(column, 0.5 * row.get(column));
    EXPECT_FALSE(row.passes()) << name_of(format);
  }
}

TEST(GradientMetric, TheFloorBelongsToTheRow) {
  Row row(NumberFormat::kFloat32, 3);
  // 2^-50 of the row's largest component: off by a factor of two is excused; 2^-40 is not.
  row.gradient.gradient = {0x1p-50, 1.0, -1.0};
  row.gradient.magnitude = {0x1p-50, 1.0, 1.0};
  row.round_reference();
  row.set(0, 0x1p-49);
  EXPECT_TRUE(row.passes());
  row.gradient.gradient[0] = row.gradient.magnitude[0] = 0x1p-40;
  row.set(0, 0x1p-39);
  EXPECT_FALSE(row.passes());
  // Scale the row down: still excused, still not.
  row.gradient.gradient = row.gradient.magnitude = {0x1p-80, 0x1p-30, 0x1p-30};
  row.round_reference();
  row.set(0, 0x1p-79);
  EXPECT_TRUE(row.passes());
  row.gradient.gradient[0] = row.gradient.magnitude[0] = 0x1p-70;
  row.set(0, 0x1p-69);
  EXPECT_FALSE(row.passes());
}

TEST(GradientMetric, CancellationIsExcusedByTheSizeOfItsTermsOnly) {
  Row row(NumberFormat::kFloat32, 3);
  // 1e-5 left of two terms of 0.5: float32 leaves an error of a few 2^-24.
  row.gradient.gradient = {1e-5, 0.5, -0.5};
  row.gradient.magnitude = {1.0, 0.5, 0.5};
  row.round_reference();
  row.set(0, 1e-5 + 3.0 * 0x1p-24);
  EXPECT_TRUE(row.passes());
  row.set(0, 1e-5 + 40.0 * 0x1p-24);
  EXPECT_FALSE(row.passes());
  row.gradient.magnitude[0] = 1e-5;
  row.set(0, 1e-5 + 3.0 * 0x1p-24);
  EXPECT_FALSE(row.passes());
}

TEST(GradientMetric, TruncationStaysUnderAnUlpAndIsCaughtByTheNorm) {
  for (const NumberFormat format : {NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
    Row row(format, 5000);
    for (std::int64_t j = 0; j < row.softmax.vocab(); ++j) {
      const double value = row.gradient.gradient[static_cast<std::size_t>(j)];
      if (std::fabs(row.get(j)) > std::fabs(value)) row.set(j, row.get(j) - std::copysign(row.ulp(j), value));
    }
    const GradientMetric metric = row.measure();
    EXPECT_LE(metric.worst_budget_off_target().value, 1.0) << name_of(format);
    EXPECT_GT(gate_value(metric.gates(), "dlogits/normwise"), 1.0) << name_of(format);
    EXPECT_FALSE(all_pass(metric.gates())) << name_of(format);
  }
}

TEST(GradientMetric, SubnormalResultsAreComparedInFixedSteps) {
  // Probabilities near 2^-20 are a few steps of 2^-24 in float16.
  Row row(NumberFormat::kFloat16, 3);
  row.gradient.gradient = {5.3 * 0x1p-24, 0.5, -0.5};
  row.gradient.magnitude = {5.3 * 0x1p-24, 0.5, 0.5};
  row.round_reference();
  EXPECT_TRUE(row.passes());
  row.set(0, 7.0 * 0x1p-24);
  EXPECT_FALSE(row.passes());
  // bfloat16 and float32 results below 2^-126 may be flushed.
  Row flushed(NumberFormat::kBfloat16, 3);
  flushed.gradient.gradient = flushed.gradient.magnitude = {0x1p-127, 1e-30, 1e-30};
  flushed.gradient.scale = 0.0;
  flushed.round_reference();
  flushed.set(0, 0.0);
  EXPECT_TRUE(flushed.passes());
}

TEST(GradientMetric, NonFiniteOnlyWhereTheOracleIs) {
  for (const NumberFormat format : test::kFormats) {
    Row row(format, 100);
    row.set(7, kNan);
    EXPECT_EQ(row.measure().nonfinite_mismatches(), 1);
    EXPECT_EQ(row.measure().first_nonfinite_mismatch().column, 7);
    EXPECT_FALSE(row.passes());
    row.gradient.gradient[7] = kNan;
    EXPECT_TRUE(row.passes());
    row.set(7, 1.0);
    EXPECT_FALSE(row.passes());
    row.gradient.gradient[7] = kInfinity;
    row.set(7, kInfinity);
    EXPECT_TRUE(row.passes());
    row.set(7, -kInfinity);
    EXPECT_FALSE(row.passes());
    row.set(7, kNan);
    EXPECT_FALSE(row.passes());
  }
}

TEST(GradientMetric, AReferenceBeyondTheFormatIsInfinite) {
  Row row(NumberFormat::kFloat16, 3);
  row.gradient.gradient = row.gradient.magnitude = {65520.0, 1.0, 1.0};
  row.round_reference();
  EXPECT_EQ(row.get(0), kInfinity);
  EXPECT_TRUE(row.passes());
  row.set(0, 65504.0);
  EXPECT_FALSE(row.passes());
}

TEST(GradientMetric, PaddingAndIgnoredRowsMustBeZero) {
  Row row(NumberFormat::kBfloat16, 100);
  std::vector<std::uint16_t> padded(103, 0);
  std::copy(row.output.begin(), row.output.end(), reinterpret_cast<unsigned char*>(padded.data()));
  for (const std::uint16_t bits : {0x0000, 0x8000, 0x0001, 0x7fc0}) {
    padded[101] = bits;
    GradientMetric metric(row.format);
    metric.add_row(0, padded.data(), 103, make_row_reference(row.softmax, row.gradient));
    EXPECT_EQ(metric.nonzero_where_ignored(), (bits & 0x7fff) == 0 ? 0 : 1) << bits;
    EXPECT_EQ(all_pass(metric.gates()), (bits & 0x7fff) == 0);
  }
  GradientMetric ignored(row.format);
  ignored.add_ignored_row(4, row.output.data(), 100);
  EXPECT_EQ(ignored.nonzero_where_ignored(), 100);
  EXPECT_EQ(ignored.first_nonzero_where_ignored().row, 4);
  EXPECT_FALSE(all_pass(ignored.gates()));
}

TEST(GradientMetric, MostlyZeroReferencesAreMistrusted) {
  Row row(NumberFormat::kFloat16, 5000);
  EXPECT_FALSE(row.measure().mistrusted());
  for (double& value : row.gradient.gradient) value *= 1e-6;
  row.round_reference();
  EXPECT_TRUE(row.measure().mistrusted());
  EXPECT_TRUE(GradientMetric(NumberFormat::kFloat16).mistrusted());
}

TEST(GradientMetric, FiguresAreWhatTheirNamesSay) {
  Row row(NumberFormat::kFloat32, 4);
  row.gradient.gradient = row.gradient.magnitude = {0.5, 0.25, 0.25, 0.0};
  row.round_reference();
  row.set(1, 0.375);
  const GradientMetric metric = row.measure();
  EXPECT_DOUBLE_EQ(metric.max_abs().value, 0.125);
  EXPECT_EQ(metric.max_abs().at.column, 1);
  EXPECT_DOUBLE_EQ(metric.max_rel().value, 0.5);
  EXPECT_DOUBLE_EQ(metric.mean_abs(), 0.125 / 4.0);
  EXPECT_DOUBLE_EQ(metric.worst_normwise().value, 0.125 / std::sqrt(0.375));
  EXPECT_DOUBLE_EQ(metric.zero_fraction(), 0.25);
  GradientTolerances tolerances;
  tolerances.max_abs = 0.1;
  tolerances.max_rel = 0.6;
  EXPECT_EQ(gate_value(metric.gates(tolerances), "dlogits_max_abs"), 0.125);
  EXPECT_EQ(metric.gates(tolerances).size(), metric.gates().size() + 2);
}

TEST(GradientMetric, MergedMetricsAreThoseOfAllRows) {
  Row row(NumberFormat::kBfloat16, 300);
  Row corrupted(NumberFormat::kBfloat16, 300);
  corrupted.set(5, 1.0);
  corrupted.set(6, kNan);
  GradientMetric both(row.format), first(row.format), second(row.format);
  for (GradientMetric* metric : {&both, &first})
    metric->add_row(0, row.output.data(), 300, make_row_reference(row.softmax, row.gradient));
  for (GradientMetric* metric : {&both, &second}) {
    metric->add_row(1, corrupted.output.data(), 300, make_row_reference(corrupted.softmax, corrupted.gradient));
  }
  first.merge(second);
  EXPECT_EQ(first.worst_ulp_off_target().value, both.worst_ulp_off_target().value);
  EXPECT_EQ(first.worst_ulp_off_target().at.row, 1);
  EXPECT_EQ(first.max_abs().at.column, 5);
  EXPECT_EQ(first.nonfinite_mismatches(), 1);
  EXPECT_EQ(first.first_nonfinite_mismatch().row, 1);
  EXPECT_EQ(first.elements(), both.elements());
  EXPECT_DOUBLE_EQ(first.mean_abs(), both.mean_abs());
  EXPECT_DOUBLE_EQ(first.worst_normwise().value, both.worst_normwise().value);
}

TEST(OutputMetric, IsRelativeWithAFloorFromTheTermsThatCancel) {
  const auto passes = [](double output, double expected, double magnitude) {
    OutputMetric metric("lse");
    metric.add(0, output, expected, magnitude);
    return all_pass(metric.gates());
  };
  EXPECT_TRUE(passes(12.0 * (1.0 + 3e-6), 12.0, 0.0));
  EXPECT_FALSE(passes(12.0 * (1.0 + 5e-6), 12.0, 0.0));
  EXPECT_TRUE(passes(-1e-12 * (1.0 + 3e-6), -1e-12, 0.0));
  EXPECT_FALSE(passes(-1.1e-12, -1e-12, 0.0));
  EXPECT_TRUE(passes(2e-6, 1e-6, 20.0));
  EXPECT_FALSE(passes(2e-5, 1e-6, 20.0));
  EXPECT_TRUE(passes(0.0, 0.0, 0.0));
  EXPECT_TRUE(passes(kInfinity, kInfinity, 0.0));
  EXPECT_TRUE(passes(kNan, kNan, kNan));
  EXPECT_FALSE(passes(kNan, 1.0, 0.0));
  EXPECT_FALSE(passes(1.0, kNan, kNan));
  EXPECT_FALSE(passes(-kInfinity, kInfinity, 0.0));
}

TEST(OutputMetric, AnAbsoluteLimitIsAGateOfItsOwn) {
  OutputMetric metric("logp");
  metric.add(3, 1.00000001, 1.0);
  EXPECT_EQ(metric.gates().size(), 2U);
  EXPECT_FALSE(all_pass(metric.gates(1e-9)));
  EXPECT_TRUE(all_pass(metric.gates(1e-7)));
  EXPECT_EQ(metric.max_abs().at.row, 3);
}

TEST(ArgmaxAgrees, ExactlyWithoutATransformAndUpToSaturationWithOne) {
  oracle::SoftmaxRow softmax;
  const std::vector<double> logits{600.0, 1.0, 601.0};
  softmax.compute({}, logits, 0);
  EXPECT_TRUE(argmax_agrees(softmax, 2));
  EXPECT_FALSE(argmax_agrees(softmax, 0));
  oracle::Transform transform;
  transform.softcap = 30.0;
  softmax.compute(transform, logits, 0);
  EXPECT_TRUE(argmax_agrees(softmax, 2));
  EXPECT_TRUE(argmax_agrees(softmax, 0));
  EXPECT_FALSE(argmax_agrees(softmax, 1));
  EXPECT_FALSE(argmax_agrees(softmax, -1));
  EXPECT_FALSE(argmax_agrees(softmax, 3));
}

TEST(OutputMetric, OfAnExactOutputCountsWhatDiffers) {
  OutputMetric metric("argmax", true);
  metric.add(0, 5, 5);
  EXPECT_TRUE(all_pass(metric.gates()));
  metric.add(8, 5, 4);
  metric.add(9, 5, 4);
  EXPECT_EQ(metric.mismatches(), 2);
  EXPECT_FALSE(all_pass(metric.gates()));
}

TEST(Gate, NaNFails) {
  EXPECT_FALSE(make_gate("x", kNan, 1.0).pass);
  EXPECT_TRUE(make_gate("x", 1.0, 1.0).pass);
}

}  // namespace
}  // namespace tileloss::tools
