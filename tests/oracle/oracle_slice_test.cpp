// The oracle against float64 values that another program computed for a trained model's logits (tests/data/README.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "oracle/number_formats.h"
#include "oracle/oracle.h"
#include "tests/shared/configs.h"

namespace tileloss::oracle {
namespace {

const std::filesystem::path kData = std::filesystem::path(TILELOSS_SOURCE_DIR) / "tests" / "data";

struct Logits {
  explicit Logits(const std::filesystem::path& path)
      : file(tools::read_tensors(path)), tensor(file.tensor("logits")), data(file.read(tensor)) {
    labels.resize(static_cast<std::size_t>(tensor.shape[0]));
    file.read(file.tensor("labels"), 0, std::ssize(labels) * 8, labels.data());
  }

  std::vector<double> row(std::size_t i) const {
    std::vector<double> values(static_cast<std::size_t>(tensor.shape[1]));
    decode_row(NumberFormat::kBfloat16, data.data() + i * values.size() * 2, values);
    return values;
  }

  tools::TensorFile file;
  const tools::StoredTensor& tensor;
  std::vector<char> data;
  std::vector<std::int64_t> labels;
};

nlohmann::json read_expected() {
  std::ifstream stream(kData / "qwen2-tiny-logits-slice.json");
  return nlohmann::json::parse(stream);
}

void expect_relative(double value, double expected, double relative) {
  EXPECT_LE(std::fabs(value - expected), relative * std::fabs(expected)) << value << " for " << expected;
}

TEST(OracleSlice, RowOutputsAndGradientsAreThoseOfAnotherProgram) {
  const nlohmann::json expected = read_expected();
  const Logits logits(kData / "qwen2-tiny-logits-slice.safetensors");
  ASSERT_EQ(logits.labels.size(), 16U);
  ASSERT_EQ(expected["rows"].size(), 16U);
  CrossEntropyOptions options;
  options.num_items = expected["whole_file"]["valid_rows"].get<double>();
  const CrossEntropy oracle(options, logits.labels, {}, {}, {});
  SoftmaxRow softmax;
  GradientRow gradient;
  int gradients = 0;
  for (std::size_t i = 0; i < logits.labels.size(); ++i) {
    const nlohmann::json& row = expected["rows"][i];
    SCOPED_TRACE("row " + std::to_string(row["source_row"].get<int>()));
    ASSERT_EQ(logits.labels[i], row["label"].get<std::int64_t>());
    softmax.compute({}, logits.row(i), logits.labels[i]);
    const RowOutputs outputs = softmax.outputs();
    expect_relative(outputs.lse, row["lse"].get<double>(), 1e-14);
    // The other program forms z - lse, which costs it digits where logp is small.
    EXPECT_NEAR(outputs.logp, row["logp"].get<double>(), 1e-14 * outputs.lse);
    expect_relative(outputs.entropy, row["entropy"].get<double>(), 1e-12);
    if (!row.contains("dlogit_at_label_mean_ce")) continue;
    oracle.row_gradient(static_cast<std::int64_t>(i), softmax, gradient);
    EXPECT_NEAR(gradient.gradient[static_cast<std::size_t>(logits.labels[i])], row["dlogit_at_label_mean_ce"].get<double>(),
                1e-14 / options.num_items);
    ++gradients;
  }
  EXPECT_EQ(gradients, 4);
}

TEST(OracleSlice, TheLargestGradientOfTheWholeFileIsInTheSlice) {
  const nlohmann::json expected = read_expected();
  const Logits logits(kData / "qwen2-tiny-logits-slice.safetensors");
  const nlohmann::json& whole = expected["whole_file"];
  CrossEntropyOptions options;
  options.num_items = whole["valid_rows"].get<double>();
  const CrossEntropy oracle(options, logits.labels, {}, {}, {});
  SoftmaxRow softmax;
  GradientRow gradient;
  const auto column = whole["dlogits"]["max_abs_index"][1].get<std::size_t>();
  bool found = false;
  for (std::size_t i = 0; i < logits.labels.size(); ++i) {
    if (expected["rows"][i]["source_row"] != whole["dlogits"]["max_abs_index"][0]) continue;
    softmax.compute({}, logits.row(i), logits.labels[i]);
    oracle.row_gradient(static_cast<std::int64_t>(i), softmax, gradient);
    expect_relative(std::fabs(gradient.gradient[column]), whole["dlogits"]["max_abs"].get<double>(), 1e-14);
    found = true;
  }
  EXPECT_TRUE(found);
}

// All 256 rows: mean loss, and the norms of its gradient.
void expect_whole_file(const std::filesystem::path& path, const nlohmann::json& whole) {
  const Logits logits(path);
  const CrossEntropy oracle({}, logits.labels, {}, {}, {});
  std::vector<RowLoss> losses;
  SoftmaxRow softmax;
  GradientRow gradient;
  long double squares = 0.0L;  // 7.8 million terms: in double their naive sum is off by 1e-11
  double largest = 0.0;
  for (std::size_t i = 0; i < logits.labels.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    if (oracle.is_ignored(row)) continue;
    softmax.compute({}, logits.row(i), logits.labels[i]);
    losses.push_back(oracle.row_loss(row, softmax));
    oracle.row_gradient(row, softmax, gradient);
    for (const double g : gradient.gradient) {
      squares += static_cast<long double>(g) * g;
      largest = std::max(largest, std::fabs(g));
    }
  }
  EXPECT_EQ(losses.size(), whole["valid_rows"].get<std::size_t>());
  expect_relative(oracle.reduce(losses), whole["loss"].get<double>(), 1e-13);
  // The value on file is itself off by 1.4e-12: exact summation gives 0.04137981418341097.
  expect_relative(static_cast<double>(sqrtl(squares)), whole["dlogits"]["l2"].get<double>(), 3e-12);
  expect_relative(static_cast<double>(sqrtl(squares)), 0.04137981418341097, 1e-14);
  expect_relative(largest, whole["dlogits"]["max_abs"].get<double>(), 1e-13);
}

TEST(OracleSlice, TheSliceIsPartOfTheWholeFileWhereThatIsAtHand) {
  // The slice's own sum of losses; the whole file's too if the environment names a folder that has it.
  const nlohmann::json expected = read_expected();
  const Logits logits(kData / "qwen2-tiny-logits-slice.safetensors");
  CrossEntropyOptions options;
  options.reduction = Reduction::kSum;
  const CrossEntropy oracle(options, logits.labels, {}, {}, {});
  std::vector<RowLoss> losses;
  SoftmaxRow softmax;
  double sum = 0.0;
  for (std::size_t i = 0; i < logits.labels.size(); ++i) {
    softmax.compute({}, logits.row(i), logits.labels[i]);
    losses.push_back(oracle.row_loss(static_cast<std::int64_t>(i), softmax));
    sum -= expected["rows"][i]["logp"].get<double>();
  }
  expect_relative(oracle.reduce(losses), sum, 1e-14);
  if (const char* folder = std::getenv("TILELOSS_DATA")) {
    expect_whole_file(std::filesystem::path(folder) / "qwen2-tiny-logits.safetensors", expected["whole_file"]);
  }
}

}  // namespace
}  // namespace tileloss::oracle
