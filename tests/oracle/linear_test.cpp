// The oracle of losses fused with the LM head: products against plain loops, gradients against central differences, both against
// float64 values that other programs computed for a trained model (tests/data/README.md).
#include "oracle/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "oracle/oracle.h"
#include "support/synthetic.h"
#include "tests/shared/configs.h"

namespace tileloss::oracle {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

std::vector<float> random_floats(std::int64_t count, std::int64_t stream) {
  tools::Random random(7, tools::Stream::kLogits, stream);
  std::vector<float> values(index(count));
  for (float& value : values) value = static_cast<float>(random.next_normal());
  return values;
}

std::vector<double> random_doubles(std::int64_t count, std::int64_t stream) {
  tools::Random random(8, tools::Stream::kLogits, stream);
  std::vector<double> values(index(count));
  for (double& value : values) value = random.next_normal();
  return values;
}

std::vector<std::int64_t> all_rows(std::int64_t rows) {
  std::vector<std::int64_t> all(index(rows));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

StoredMatrix stored(const std::vector<float>& values, std::int64_t rows, std::int64_t cols) {
  return {values.data(), NumberFormat::kFloat32, rows, cols, cols, 1};
}

TEST(Linear, LogitsComeFromTheStoredValuesAsTheProductsSeeThem) {
  constexpr std::int64_t kRows = 5, kVocab = 9, kHidden = 7;
  for (const NumberFormat format : {NumberFormat::kFloat32, NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
    for (const NumberFormat compute : {NumberFormat::kFloat32, NumberFormat::kBfloat16}) {
      // hidden with gaps between rows and between elements; head as [H,V].
      std::vector<unsigned char> hidden(kRows * (2 * kHidden + 3) * 4), head(kHidden * (kVocab + 1) * 4);
      const StoredMatrix x{hidden.data(), format, kRows, kHidden, 2 * kHidden + 3, 2};
      const StoredMatrix w{head.data(), format, kVocab, kHidden, 1, kVocab + 1};
      tools::Random random(3, tools::Stream::kLogits, 0);
      const auto fill = [&](const StoredMatrix& m, std::vector<unsigned char>& bytes) {
        for (std::int64_t i = 0; i < m.rows; ++i) {
          for (std::int64_t j = 0; j < m.cols; ++j) {
            encode_at(m.format, bytes.data(), i * m.row_stride + j * m.col_stride, random.next_normal());
          }
        }
      };
      fill(x, hidden);
      fill(w, head);
      const std::vector<float> bias = random_floats(kVocab, 4);
      const LinearOperands operands = make_operands(x, w, kVocab - 1, bias, compute, {}, 2);
      std::vector<double> logits(kRows * (kVocab - 1));
      linear_logits(operands, all_rows(kRows), logits);
      std::vector<double> spread(logits.size());
      linear_spread(operands, all_rows(kRows), spread);
      const auto seen = [&](double value) { return decode(compute, encode(compute, value)); };
      for (std::int64_t i = 0; i < kRows; ++i) {
        for (std::int64_t v = 0; v < kVocab - 1; ++v) {
          double expected = bias[index(v)], terms = 0;
          for (std::int64_t h = 0; h < kHidden; ++h) {
            const double term = seen(x.at(i, h)) * seen(w.at(v, h));
            expected += term;
            terms += term * term;
          }
          ASSERT_NEAR(logits[index(i * (kVocab - 1) + v)], expected, 1e-14);
          ASSERT_NEAR(spread[index(i * (kVocab - 1) + v)], std::sqrt(terms), 1e-6);
        }
      }
    }
  }
}

TEST(Linear, UnusedRowsOfHiddenAreNotRead) {
  std::vector<float> hidden = random_floats(3 * 4, 1);
  const std::vector<float> head = random_floats(5 * 4, 2);
  hidden[4] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::uint8_t> used{1, 0, 1};
  const LinearOperands operands = make_operands(stored(hidden, 3, 4), stored(head, 5, 4), 5, {}, NumberFormat::kFloat32, used, 1);
  for (const float value : operands.hidden_values) EXPECT_FALSE(std::isnan(value));
  EXPECT_EQ(operands.hidden_values[0], hidden[0]);
  EXPECT_EQ(operands.hidden_values[5], 0.0F);
}

TEST(Linear, WhatDoesNotFitIsRefused) {
  const std::vector<float> values = random_floats(40, 1);
  const StoredMatrix hidden = stored(values, 3, 4), head = stored(values, 5, 4);
  const auto make = [&](const StoredMatrix& x, std::int64_t vocab, std::size_t bias, NumberFormat compute, std::size_t used) {
    make_operands(x, head, vocab, std::vector<float>(bias), compute, std::vector<std::uint8_t>(used), 1);
  };
  EXPECT_NO_THROW(make(hidden, 5, 5, NumberFormat::kFloat32, 3));
  EXPECT_THROW(make(stored(values, 4, 3), 5, 5, NumberFormat::kFloat32, 3), std::invalid_argument);
  EXPECT_THROW(make(hidden, 6, 5, NumberFormat::kFloat32, 3), std::invalid_argument);
  EXPECT_THROW(make(hidden, 0, 5, NumberFormat::kFloat32, 3), std::invalid_argument);
  EXPECT_THROW(make(hidden, 5, 4, NumberFormat::kFloat32, 3), std::invalid_argument);
  EXPECT_THROW(make(hidden, 5, 5, NumberFormat::kFloat16, 3), std::invalid_argument);
  EXPECT_THROW(make(hidden, 5, 5, NumberFormat::kFloat32, 2), std::invalid_argument);
}

// The whole chain, hidden to loss, as a function to take differences of.
struct Chain {
  static constexpr std::int64_t kRows = 4, kVocab = 6, kHidden = 5;

  Chain() : labels{0, 5, -100, 3}, token_weights{0.5, 2.0, 1.0, 1.25} {
    operands.rows = kRows;
    operands.vocab = kVocab;
    operands.hidden = kHidden;
    operands.hidden_values = random_floats(kRows * kHidden, 1);
    operands.head_values = random_floats(kVocab * kHidden, 2);
    operands.bias = random_doubles(kVocab, 3);
    options.label_smoothing = 0.1;
    options.z_loss = 0.01;
    options.transform = {0.8, 4.0, 1.3, TemperatureOn::kLogits};
  }

  double loss() const {
    std::vector<double> logits(kRows * kVocab);
    linear_logits(operands, all_rows(kRows), logits);
    const CrossEntropy oracle(options, labels, token_weights, {}, {});
    std::vector<RowLoss> losses;
    for (std::int64_t i = 0; i < kRows; ++i) {
      SoftmaxRow softmax;
      if (!oracle.is_ignored(i)) softmax.compute(options.transform, {logits.data() + i * kVocab, kVocab}, labels[index(i)]);
      losses.push_back(oracle.row_loss(i, softmax));
    }
    return oracle.reduce(losses);
  }

  void add_gradients(LinearGradients& gradients) const {
    std::vector<double> logits(kRows * kVocab);
    linear_logits(operands, all_rows(kRows), logits);
    const CrossEntropy oracle(options, labels, token_weights, {}, {});
    for (std::int64_t i = 0; i < kRows; ++i) {
      if (oracle.is_ignored(i)) continue;
      SoftmaxRow softmax;
      GradientRow gradient;
      softmax.compute(options.transform, {logits.data() + i * kVocab, kVocab}, labels[index(i)]);
      oracle.row_gradient(i, softmax, gradient);
      gradients.add(std::vector<std::int64_t>{i}, gradient.gradient);
    }
  }

  LinearOperands operands;
  CrossEntropyOptions options;
  std::vector<std::int64_t> labels;
  std::vector<double> token_weights;
};

// Five points. Operands are floats: steps of 2^-8 are exact where the values have 15 bits to spare, so these are rounded first.
template <typename T>
double derivative(Chain& chain, T& variable) {
  constexpr double kStep = 0x1p-8;
  const T at = variable;
  const auto value = [&](double offset) {
    variable = static_cast<T>(at + offset * kStep);
    return chain.loss();
  };
  const double far = value(3.0) - value(-3.0), middle = value(2.0) - value(-2.0), near = value(1.0) - value(-1.0);
  variable = at;
  return (far - 9 * middle + 45 * near) / (60 * kStep);
}

TEST(Linear, GradientsAreTheCentralDifferencesOfTheLoss) {
  Chain chain;
  for (auto* values : {&chain.operands.hidden_values, &chain.operands.head_values}) {
    for (float& value : *values) value = std::round(value * 1024) / 1024;
  }
  LinearGradients gradients(chain.operands, {true, true, true});
  chain.add_gradients(gradients);
  const auto expect = [&](auto& variables, std::span<const double> gradient) {
    ASSERT_EQ(variables.size(), gradient.size());
    for (std::size_t i = 0; i < variables.size(); ++i) ASSERT_NEAR(gradient[i], derivative(chain, variables[i]), 2e-11) << i;
  };
  const std::span<const double> dhidden = gradients.gradient(LinearOutput::kDhidden);
  expect(chain.operands.hidden_values, dhidden);
  expect(chain.operands.head_values, gradients.gradient(LinearOutput::kDhead));
  expect(chain.operands.bias, gradients.gradient(LinearOutput::kDbias));
  for (std::int64_t h = 0; h < Chain::kHidden; ++h) EXPECT_EQ(dhidden[index(2 * Chain::kHidden + h)], 0.0);
}

TEST(Linear, TheIdealsErrorIsThatOfRoundedDlogits) {
  for (const NumberFormat compute : {NumberFormat::kFloat32, NumberFormat::kBfloat16}) {
    LinearOperands operands;
    operands.rows = 3;
    operands.vocab = 4;
    operands.hidden = 5;
    operands.compute = compute;
    operands.hidden_values = random_floats(15, 1);
    operands.head_values = random_floats(20, 2);
    const std::vector<double> dlogits = random_doubles(12, 3);
    std::vector<double> rounded;
    for (const double value : dlogits) rounded.push_back(decode(compute, encode(compute, value)));
    LinearGradients exact(operands, {true, true, true}), ideal(operands, {true, true, true});
    exact.add(all_rows(3), dlogits);
    ideal.add(all_rows(3), rounded);
    const double ulp = compute == NumberFormat::kFloat32 ? 0x1p-24 : 0x1p-9;
    for (const LinearOutput which : {LinearOutput::kDhidden, LinearOutput::kDhead, LinearOutput::kDbias}) {
      const std::span<const double> g = exact.gradient(which), g_ideal = ideal.gradient(which);
      const std::span<const float> error = exact.ideal_error(which);
      double largest = 0;
      for (std::size_t i = 0; i < g.size(); ++i) {
        ASSERT_NEAR(error[i], g_ideal[i] - g[i], 1e-5 * ulp) << i;
        largest = std::max(largest, std::fabs(static_cast<double>(error[i])));
      }
      EXPECT_GT(largest, 0.1 * ulp);
    }
  }
}

// ---------------------------------------------------------------------------------------- values of other programs

const std::filesystem::path kData = std::filesystem::path(TILELOSS_SOURCE_DIR) / "tests" / "data";

struct Trained {
  explicit Trained(const std::filesystem::path& path) {
    const tools::TensorFile file = tools::read_tensors(path);
    const tools::StoredTensor& x = file.tensor("hidden");
    const tools::StoredTensor& w = file.tensor("lm_head");
    const std::vector<char> hidden = file.read(x), head = file.read(w);
    labels.resize(index(x.shape[0]));
    file.read(file.tensor("labels"), 0, std::ssize(labels) * 8, labels.data());
    for (const std::int64_t label : labels) used.push_back(label == -100 ? 0 : 1);
    operands = make_operands({hidden.data(), NumberFormat::kBfloat16, x.shape[0], x.shape[1], x.shape[1], 1},
                             {head.data(), NumberFormat::kBfloat16, w.shape[0], w.shape[1], w.shape[1], 1}, w.shape[0], {},
                             NumberFormat::kBfloat16, used, 2);
  }

  void run() {
    const CrossEntropy oracle({}, labels, {}, {}, {});
    gradients.emplace(operands, LinearGradients::NeedsGrad{true, true, true});
    outputs.resize(labels.size());
    std::vector<RowLoss> losses(labels.size());
    std::vector<std::int64_t> rows;
    for (std::int64_t i = 0; i < operands.rows; ++i) {
      if (used[index(i)] != 0) rows.push_back(i);
    }
    std::vector<double> logits(rows.size() * index(operands.vocab)), dlogits;
    linear_logits(operands, rows, logits);
    SoftmaxRow softmax;
    GradientRow gradient;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const std::size_t i = index(rows[r]);
      softmax.compute({}, {logits.data() + r * index(operands.vocab), index(operands.vocab)}, labels[i]);
      outputs[i] = softmax.outputs();
      losses[i] = oracle.row_loss(rows[r], softmax);
      oracle.row_gradient(rows[r], softmax, gradient);
      dlogits.insert(dlogits.end(), gradient.gradient.begin(), gradient.gradient.end());
    }
    loss = oracle.reduce(losses);
    gradients->add(rows, dlogits);
  }

  std::vector<std::int64_t> labels;
  std::vector<std::uint8_t> used;
  LinearOperands operands;
  std::optional<LinearGradients> gradients;
  std::vector<RowOutputs> outputs;
  double loss = 0;
};

void expect_relative(double value, double expected, double relative) {
  EXPECT_LE(std::fabs(value - expected), relative * std::fabs(expected)) << value << " for " << expected;
}

double norm(std::span<const double> values) {
  long double sum = 0.0L;
  for (const double value : values) sum += static_cast<long double>(value) * value;
  return static_cast<double>(sqrtl(sum));
}

int expect_entries(std::span<const double> gradient, std::int64_t width, const nlohmann::json& entries, double tolerance) {
  int seen = 0;
  for (const nlohmann::json& entry : entries) {
    for (std::size_t k = 0; k < entry["cols"].size(); ++k, ++seen) {
      const std::size_t at = index(entry["row"].get<std::int64_t>() * width + entry["cols"][k].get<std::int64_t>());
      EXPECT_NEAR(gradient[at], entry["values"][k].get<double>(), tolerance) << "row " << entry["row"];
    }
  }
  return seen;
}

nlohmann::json read_expected() {
  std::ifstream stream(kData / "qwen2-tiny-hidden-slice.json");
  return nlohmann::json::parse(stream);
}

void expect_outputs(const RowOutputs& outputs, const nlohmann::json& row) {
  SCOPED_TRACE(row.dump());
  expect_relative(outputs.lse, row["lse"].get<double>(), 1e-14);
  EXPECT_NEAR(outputs.logp, row["logp"].get<double>(), 1e-14 * outputs.lse);
  // So it does with the entropy of a row that is sure of its label.
  EXPECT_NEAR(outputs.entropy, row["entropy"].get<double>(), 1e-13 + 1e-12 * outputs.entropy);
}

TEST(LinearSlice, OutputsAndGradientsAreThoseOfAnotherProgram) {
  const nlohmann::json expected = read_expected();
  Trained trained(kData / "qwen2-tiny-hidden-slice.safetensors");
  trained.run();
  ASSERT_EQ(expected["rows"].size(), trained.labels.size());
  int rows = 0;
  for (std::size_t i = 0; i < trained.labels.size(); ++i) {
    ASSERT_EQ(trained.labels[i], expected["rows"][i]["label"].get<std::int64_t>());
    if (!expected["rows"][i].contains("logp")) continue;
    expect_outputs(trained.outputs[i], expected["rows"][i]);
    ++rows;
  }
  EXPECT_EQ(rows, 11);
  expect_relative(trained.loss, expected["loss"].get<double>(), 1e-14);
  const LinearGradients& g = *trained.gradients;
  expect_relative(norm(g.gradient(LinearOutput::kDhidden)), expected["dhidden"]["l2"].get<double>(), 1e-14);
  expect_relative(norm(g.gradient(LinearOutput::kDhead)), expected["dhead"]["l2"].get<double>(), 1e-14);
  expect_relative(norm(g.gradient(LinearOutput::kDbias)), expected["dbias"]["l2"].get<double>(), 1e-14);
  EXPECT_EQ(expect_entries(g.gradient(LinearOutput::kDhidden), 256, expected["dhidden"]["rows"], 1e-16), 12 * 4);
  EXPECT_EQ(expect_entries(g.gradient(LinearOutput::kDhead), 256, expected["dhead"]["rows"], 1e-15), 9 * 4);
  for (std::size_t v = 0; v < 8; ++v)
    EXPECT_NEAR(g.gradient(LinearOutput::kDbias)[v], expected["dbias"]["values"][v].get<double>(), 1e-16);
}

// All of it, if the environment names a folder that has it; the slice's labels are the file's in any case.
TEST(LinearSlice, TheSliceIsPartOfTheWholeFileWhereThatIsAtHand) {
  const nlohmann::json expected = read_expected();
  const nlohmann::json& whole = expected["whole_file"];
  for (int i = 0; i < 5; ++i) {
    const std::size_t label = expected["rows"][i]["label"].get<std::size_t>();
    EXPECT_EQ(expected["head_source_rows"][label], whole["first_rows"][i]["label"]);
  }
  const char* folder = std::getenv("TILELOSS_DATA");
  if (folder == nullptr) return;
  Trained trained(std::filesystem::path(folder) / "qwen2-tiny-hidden.safetensors");
  trained.run();
  expect_relative(trained.loss, whole["loss"].get<double>(), 1e-13);
  for (const nlohmann::json& row : whole["first_rows"]) expect_outputs(trained.outputs[row["row"].get<std::size_t>()], row);
  const LinearGradients& g = *trained.gradients;
  expect_relative(norm(g.gradient(LinearOutput::kDhidden)), whole["dhidden"]["l2"].get<double>(), 1e-11);
  expect_relative(norm(g.gradient(LinearOutput::kDhead)), whole["dhead"]["l2"].get<double>(), 1e-11);
  EXPECT_EQ(expect_entries(g.gradient(LinearOutput::kDhidden), 256, whole["dhidden_entries"], 1e-16), 28);
  EXPECT_EQ(expect_entries(g.gradient(LinearOutput::kDhead), 256, whole["dhead_entries"], 1e-15), 24);
}

}  // namespace
}  // namespace tileloss::oracle
