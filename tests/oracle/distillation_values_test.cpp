// The distillation losses against values that another program computed from their definitions (tests/data/README.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "oracle/distillation.h"
#include "oracle/soft_labels.h"

namespace tileloss::oracle {
namespace {

using Rows = std::vector<std::vector<double>>;

const nlohmann::json& values() {
  static const nlohmann::json json = [] {
    std::ifstream file(std::filesystem::path(TILELOSS_SOURCE_DIR) / "tests" / "data" / "distillation-values.json");
    return nlohmann::json::parse(file);
  }();
  return json;
}

Divergence divergence_of(const nlohmann::json& value) {
  static const std::map<std::string, Divergence> names{{"forward_kl", Divergence::kForwardKl},
                                                       {"reverse_kl", Divergence::kReverseKl},
                                                       {"jsd", Divergence::kJsd},
                                                       {"jeffreys", Divergence::kJeffreys},
                                                       {"skew_forward", Divergence::kSkewForwardKl},
                                                       {"skew_reverse", Divergence::kSkewReverseKl},
                                                       {"total_variation", Divergence::kTotalVariation}};
  return names.at(value["divergence"].get<std::string>());
}

Transform transform_of(const nlohmann::json& value) {
  return {value["scale"], value["softcap"], value["temperature"], TemperatureOn::kLogits};
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, double tolerance, const char* what) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t j = 0; j < found.size(); ++j) EXPECT_NEAR(found[j], expected[j], tolerance) << what << ", column " << j;
}

struct Found {
  double loss = 0.0;
  Rows dlogits;
};

template <typename Compute>
Found evaluate(const Distillation& oracle, std::size_t rows, std::size_t columns, Compute&& compute) {
  Found found;
  DistillationRow values;
  DistillationGradient gradient;
  std::vector<double> losses;
  for (std::size_t i = 0; i < rows; ++i) {
    const auto row = static_cast<std::int64_t>(i);
    if (oracle.is_ignored(row)) {
      losses.push_back(0.0);
      found.dlogits.emplace_back(columns, 0.0);
      continue;
    }
    compute(values, i);
    losses.push_back(oracle.row_loss(row, values));
    oracle.row_gradient(row, values, gradient);
    found.dlogits.push_back(gradient.dlogits);
  }
  found.loss = oracle.reduce(losses);
  return found;
}

void expect_case(const Found& found, const nlohmann::json& expected) {
  EXPECT_NEAR(found.loss, expected["loss"].get<double>(), 1e-14 * (1.0 + std::fabs(found.loss)));
  const auto dlogits = expected["dlogits"].get<Rows>();
  ASSERT_EQ(found.dlogits.size(), dlogits.size());
  for (std::size_t i = 0; i < dlogits.size(); ++i) expect_near(found.dlogits[i], dlogits[i], 3e-15, "dlogits");
}

TEST(DistillationValues, DenseTeachersAgreeWithAutograd) {
  const auto student = values()["student"].get<Rows>(), teacher = values()["teacher"].get<Rows>();
  const auto labels = values()["labels"].get<std::vector<std::int64_t>>();
  const auto weights = values()["token_weights"].get<std::vector<double>>();
  ASSERT_EQ(values()["dense"].size(), 30U);
  for (const nlohmann::json& expected : values()["dense"]) {
    SCOPED_TRACE(expected.dump().substr(0, 400));
    DistillationOptions options;
    options.divergence = divergence_of(expected);
    options.beta = expected["beta"];
    options.student = transform_of(expected["student"]);
    options.teacher = transform_of(expected["teacher"]);
    options.scale_by_temperature_squared = expected["temperature_squared"];
    options.label_weight = expected["label_weight"];
    options.divergence_weight = expected["divergence_weight"];
    options.reduction = expected["reduction"] == "mean" ? Reduction::kMean : Reduction::kSum;
    if (!expected["num_items"].is_null()) options.num_items = expected["num_items"];
    options.valid_vocab = values()["valid_vocab"];
    const std::span<const double> given = weights;
    const Distillation oracle(options, 4, labels, expected["weighted"] ? given : std::span<const double>{}, {});
    expect_case(evaluate(oracle, 4, student[0].size(),
                         [&](DistillationRow& row, std::size_t i) { row.compute(options, student[i], teacher[i], labels[i]); }),
                expected);
  }
}

TEST(DistillationValues, SparseTeachersAgreeWithAutograd) {
  const auto student = values()["student"].get<Rows>();
  const auto labels = values()["labels"].get<std::vector<std::int64_t>>();
  const auto ids = values()["ids"].get<std::vector<std::vector<std::int64_t>>>();
  ASSERT_EQ(values()["sparse"].size(), 30U);
  for (const nlohmann::json& expected : values()["sparse"]) {
    SCOPED_TRACE(expected.dump().substr(0, 200));
    const auto log_q = expected["log_q"].get<Rows>();
    const std::map<std::string, Tail> tails{
        {"ignore", Tail::kIgnore}, {"lump", Tail::kLump}, {"renormalise", Tail::kRenormalise}};
    const Tail tail = tails.at(expected["tail"].get<std::string>());
    DistillationOptions options;
    options.divergence = divergence_of(expected);
    options.beta = expected["beta"];
    options.student.temperature = 0.7;
    options.reduction = Reduction::kSum;
    options.valid_vocab = values()["valid_vocab"];
    const Distillation oracle(options, 4, labels, {}, {});
    expect_case(evaluate(oracle, 4, student[0].size(),
                         [&](DistillationRow& row, std::size_t i) {
                           row.compute_sparse(options, student[i], ids[i], log_q[i], tail, labels[i]);
                         }),
                expected);
  }
}

TEST(SoftLabels, ValuesAgreeWithAutograd) {
  const auto student = values()["student"].get<Rows>();
  const std::size_t valid = values()["valid_vocab"];
  ASSERT_EQ(values()["soft"].size(), 3U);
  for (const nlohmann::json& expected : values()["soft"]) {
    const auto q = expected["q"].get<Rows>(), dlogits = expected["dlogits"].get<Rows>();
    Transform transform;
    transform.temperature = 0.7;
    SoftLabelsRow row;
    double loss = 0.0;
    for (std::size_t i = 0; i < student.size(); ++i) {
      soft_labels_row(transform, std::span(student[i]).first(valid), q[i], expected["smoothing"], row);
      loss += row.loss;
      row.dlogits.resize(student[i].size());
      expect_near(row.dlogits, dlogits[i], 3e-15, "dlogits");
    }
    EXPECT_NEAR(loss, expected["loss"].get<double>(), 1e-14 * loss);
  }
}

TEST(SoftLabels, ColumnsWithoutPCountWhereQHasThem) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  SoftLabelsRow row;
  soft_labels_row({}, {{-kInfinity, 0.0, 0.0}}, {{0.0, 0.25, 0.75}}, 0.0, row);
  EXPECT_NEAR(row.loss, std::log(2.0), 1e-15);
  expect_near(row.dlogits, {0.0, 0.25, -0.25}, 1e-15, "dlogits");
  soft_labels_row({}, {{-kInfinity, 0.0, 0.0}}, {{0.0, 0.25, 0.75}}, 0.3, row);
  EXPECT_EQ(row.loss, kInfinity);
  expect_near(row.dlogits, {-0.1, 0.225, -0.125}, 1e-15, "dlogits");
  soft_labels_row({}, {{0.0, 0.0}}, {{kNan, 1.0}}, 0.0, row);
  EXPECT_TRUE(std::isnan(row.loss));
  for (const double value : row.dlogits) EXPECT_TRUE(std::isnan(value));
}

// p and q close together, where differences of logarithms have no digits left, and far apart, where probabilities underflow.
TEST(DistillationValues, CloseAndWideRowsKeepTheirDigits) {
  ASSERT_EQ(values()["exact"].size(), 60U);
  for (const nlohmann::json& expected : values()["exact"]) {
    SCOPED_TRACE(expected.dump().substr(0, 300));
    DistillationOptions options;
    options.divergence = divergence_of(expected);
    options.beta = expected["beta"];
    options.student = options.teacher = transform_of(expected["transform"]);
    options.reduction = Reduction::kSum;
    const auto student = expected["student"].get<std::vector<double>>(), teacher = expected["teacher"].get<std::vector<double>>();
    const Distillation oracle(options, 1, {}, {}, {});
    const Found found =
        evaluate(oracle, 1, student.size(), [&](DistillationRow& row, std::size_t) { row.compute(options, student, teacher); });
    const double loss = expected["loss"];
    EXPECT_NEAR(found.loss, loss, 1e-12 * loss + 1e-50);
    // The wide row's gradients are 0 but for what is lost to rounding of p and q, which are nearly 1 there.
    double largest = expected["row"] == "wide" ? 1e-4 : 0.0;
    const auto dlogits = expected["dlogits"].get<std::vector<double>>();
    for (const double value : dlogits) largest = std::max(largest, std::fabs(value));
    expect_near(found.dlogits[0], dlogits, 1e-12 * largest, "dlogits");
  }
}

}  // namespace
}  // namespace tileloss::oracle
