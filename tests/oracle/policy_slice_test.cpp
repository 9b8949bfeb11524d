// The policy losses against float64 values that another program computed for a trained model's logits (tests/data/README.md).
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "oracle/number_formats.h"
#include "oracle/oracle.h"
#include "oracle/policy.h"
#include "tests/shared/configs.h"

namespace tileloss::oracle {
namespace {

const std::filesystem::path kData = std::filesystem::path(TILELOSS_SOURCE_DIR) / "tests" / "data";

std::vector<double> floats(const tools::TensorFile& file, const char* name) {
  const tools::StoredTensor& tensor = file.tensor(name);
  std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
  file.read(tensor, 0, tensor.bytes, values.data());
  return {values.begin(), values.end()};
}

class PolicySlice : public testing::Test {
 protected:
  void SetUp() override {
    const tools::StoredTensor& logits = file_.tensor("logits");
    const std::vector<char> data = file_.read(logits);
    const auto rows = static_cast<std::size_t>(logits.shape[0]), columns = static_cast<std::size_t>(logits.shape[1]);
    std::vector<std::int64_t> labels(rows);
    file_.read(file_.tensor("labels"), 0, std::ssize(labels) * 8, labels.data());
    std::vector<double> row(columns);
    SoftmaxRow softmax;
    for (std::size_t i = 0; i < rows; ++i) {
      decode_row(NumberFormat::kBfloat16, data.data() + i * columns * 2, row);
      softmax.compute({}, row, labels[i]);
      logp_.push_back(softmax.logp());
      entropy_.push_back(softmax.entropy());
    }
    mask_.resize(rows);
    file_.read(file_.tensor("mask"), 0, std::ssize(mask_), mask_.data());
  }

  void expect_values(const PolicyOptions& options, const nlohmann::json& expected) const {
    PolicyInputs inputs;
    const std::vector<double> advantages = floats(file_, "advantages"), old_logp = floats(file_, "old_logp"),
                              ref_logp = floats(file_, "ref_logp");
    const std::vector<std::int64_t> offsets{0, static_cast<std::int64_t>(logp_.size())};
    inputs.used = mask_;
    inputs.offsets = offsets;
    inputs.advantages = advantages;
    inputs.old_logp = old_logp;
    inputs.ref_logp = ref_logp;
    const PolicyResult result = policy_loss(options, inputs, logp_, entropy_);
    ASSERT_EQ(expected["per_token_loss"].size(), 8U);
    for (std::size_t i = 0; i < 8; ++i) {
      // The other program forms z - lse, which costs logp 1e-15.
      EXPECT_NEAR(result.token_loss[i], expected["per_token_loss"][i].get<double>(), 1e-14);
      EXPECT_NEAR(result.dlogp[i], expected["per_token_dlogp"][i].get<double>(), 1e-14);
    }
  }

  const tools::TensorFile file_ = tools::read_tensors(kData / "qwen2-tiny-logits-slice.safetensors");
  std::vector<double> logp_, entropy_;
  std::vector<std::uint8_t> mask_;
};

TEST_F(PolicySlice, LossesAndDerivativesAreThoseOfAnotherProgram) {
  std::ifstream stream(kData / "qwen2-tiny-logits-slice.json");
  const nlohmann::json expected = nlohmann::json::parse(stream);
  PolicyOptions options;
  options.aggregation = Aggregation::kNone;
  options.advantage_level = Level::kToken;
  expect_values(options, expected["grpo_clip"]);
  options.beta = expected["grpo_clip_kl_k3"]["beta"].get<double>();
  expect_values(options, expected["grpo_clip_kl_k3"]);
}

}  // namespace
}  // namespace tileloss::oracle
