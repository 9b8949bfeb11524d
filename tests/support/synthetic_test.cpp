#include "support/synthetic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "oracle/oracle.h"
#include "tests/shared/input_families.h"

namespace tileloss::tools {
namespace {

using oracle::NumberFormat;

std::vector<double> make_row(const char* distribution, NumberFormat format, std::int64_t columns, std::int64_t label = -1,
                             std::int64_t row = 0, std::uint64_t seed = 1) {
  std::vector<unsigned char> stored(static_cast<std::size_t>(columns) * oracle::format_info(format).bytes);
  fill_logits_row(*find_distribution(distribution), seed, row, label, format, stored.data(), columns);
  std::vector<double> values(static_cast<std::size_t>(columns));
  oracle::decode_row(format, stored.data(), values);
  return values;
}

struct Moments {
  double mean = 0.0, variance = 0.0, kurtosis = 0.0;
};
Moments moments(const std::vector<double>& values) {
  Moments m;
  const auto count = static_cast<double>(values.size());
  for (const double value : values) m.mean += value / count;
  double fourth = 0.0;
  for (const double value : values) {
    const double d = value - m.mean;
    m.variance += d * d / count;
    fourth += d * d * d * d / count;
  }
  m.kurtosis = fourth / (m.variance * m.variance) - 3.0;
  return m;
}

TEST(Random, DependsOnSeedStreamRowAndCounterOnly) {
  const Random random(7, Stream::kLogits, 3);
  const std::uint64_t value = random.bits(10);
  EXPECT_EQ(Random(7, Stream::kLogits, 3).bits(10), value);
  EXPECT_NE(Random(8, Stream::kLogits, 3).bits(10), value);
  EXPECT_NE(Random(7, Stream::kLabels, 3).bits(10), value);
  EXPECT_NE(Random(7, Stream::kLogits, 4).bits(10), value);
  EXPECT_NE(random.bits(11), value);
}

TEST(Random, IsTheSameOnEveryMachine) {
  // SplitMix64 is integer arithmetic; these values pin the keys' mixing as well. Results on file depend on them.
  const Random random(1, Stream::kLogits, 0);
  EXPECT_EQ(random.bits(0), 0x0a45b3e0d5967d37ULL);
  EXPECT_EQ(random.bits(1), 0x9f2700594737daf3ULL);
}

TEST(Random, SequencesAndBounds) {
  Random random(1, Stream::kShapes, 0);
  std::vector<int> counts(7, 0);
  for (int i = 0; i < 70000; ++i) {
    const std::int64_t value = random.next_below(7);
    ASSERT_GE(value, 0);
    ASSERT_LT(value, 7);
    ++counts[static_cast<std::size_t>(value)];
  }
  for (const int count : counts) EXPECT_NEAR(count, 10000, 500);
  EXPECT_NE(random.next_bits(), random.next_bits());
  const double uniform = random.next_uniform();
  EXPECT_GE(uniform, 0.0);
  EXPECT_LT(uniform, 1.0);
}

TEST(Random, NormalsHaveTheMomentsTheyClaim) {
  Random random(2, Stream::kLogits, 0);
  std::vector<double> values(1000000);
  for (double& value : values) value = random.next_normal();
  const Moments m = moments(values);
  EXPECT_NEAR(m.mean, 0.0, 0.005);
  EXPECT_NEAR(m.variance, 1.0, 0.005);
  EXPECT_NEAR(m.kurtosis, -0.15, 0.02);
  EXPECT_GT(*std::max_element(values.begin(), values.end()), 4.0);
}

TEST(Distributions, HaveTheirNamedShape) {
  for (const NumberFormat format : test::kFormats) {
    EXPECT_NEAR(moments(make_row("normal", format, 100000)).variance, 1.0, 0.02);
    EXPECT_NEAR(std::sqrt(moments(make_row("narrow", format, 100000)).variance), 0.01, 0.0003);
    EXPECT_NEAR(std::sqrt(moments(make_row("wide", format, 100000)).variance), 30.0, 0.5);
    EXPECT_NEAR(moments(make_row("uniform", format, 100000)).variance, 1.0 / 3.0, 0.01);
    EXPECT_NEAR(moments(make_row("offset_plus", format, 100000)).mean, 1e4, 2.0);
    EXPECT_NEAR(moments(make_row("offset_minus", format, 100000)).mean, -1e4, 2.0);
    EXPECT_GT(moments(make_row("offset_plus", format, 100000)).variance, 100.0);
  }
}

TEST(Distributions, SpikesStandEightyAboveTheRestAtTheirColumn) {
  const auto spike_of = [](const char* name, std::int64_t columns) {
    const std::vector<double> row = make_row(name, NumberFormat::kBfloat16, columns);
    const auto largest = std::max_element(row.begin(), row.end());
    EXPECT_GT(*largest, 74.0);
    return largest - row.begin();
  };
  EXPECT_EQ(spike_of("spike_first", 5000), 0);
  EXPECT_EQ(spike_of("spike_last", 5000), 4999);
  EXPECT_EQ(spike_of("spike_tile_edge", 5000), 4095);
  EXPECT_EQ(spike_of("spike_tile_edge", 4096), 4095);
  EXPECT_EQ(spike_of("spike_tile_edge", 100), 0);
}

TEST(Distributions, ConfidentTargetsAreAboveOneMinusAMillionth) {
  for (const NumberFormat format : test::kFormats) {
    for (std::int64_t row = 0; row < 5; ++row) {
      constexpr std::int64_t kColumns = 262144;
      const std::int64_t label = make_label({kColumns, 0.0, -100}, 1, row);
      oracle::SoftmaxRow softmax;
      softmax.compute({}, make_row("confident", format, kColumns, label, row), label);
      EXPECT_LT(softmax.one_minus_p_label(), 1e-6);
      EXPECT_GT(softmax.one_minus_p_label(), 0.0);
    }
  }
}

TEST(Distributions, RowsDoNotDependOnEachOtherOrOnTheirLength) {
  const std::vector<double> row = make_row("normal", NumberFormat::kFloat32, 1000, -1, 5);
  const std::vector<double> shorter = make_row("normal", NumberFormat::kFloat32, 10, -1, 5);
  EXPECT_TRUE(std::equal(shorter.begin(), shorter.end(), row.begin()));
  EXPECT_NE(row, make_row("normal", NumberFormat::kFloat32, 1000, -1, 6));
  EXPECT_NE(row, make_row("normal", NumberFormat::kFloat32, 1000, -1, 5, 2));
}

TEST(Distributions, NamesAreKnown) {
  EXPECT_EQ(distribution_names().size(), 10U);
  for (const std::string_view name : distribution_names()) EXPECT_TRUE(find_distribution(name).has_value()) << name;
  EXPECT_FALSE(find_distribution("gaussian").has_value());
}

TEST(Labels, AreInRangeAndIgnoredAsOftenAsAsked) {
  const std::vector<std::int64_t> labels = make_labels({50, 0.25, -7}, 3, 20000);
  const auto ignored = std::count(labels.begin(), labels.end(), -7);
  EXPECT_NEAR(static_cast<double>(ignored), 5000.0, 250.0);
  for (const std::int64_t label : labels) EXPECT_TRUE(label == -7 || (label >= 0 && label < 50));
  EXPECT_EQ(std::count(labels.begin(), labels.end(), 0) > 0, true);
  EXPECT_EQ(std::count(labels.begin(), labels.end(), 49) > 0, true);
  EXPECT_EQ(make_labels({50, 0.0, -7}, 3, 5), make_labels({50, 0.0, -7}, 3, 5));
}

}  // namespace
}  // namespace tileloss::tools
