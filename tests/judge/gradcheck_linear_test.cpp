// gradcheck's level linear: losses, storages, layouts, policies, real data, mutants, and what it refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

const Sets kSmall = {"vocab_size=500", "hidden_size=48", "gradients=[dhidden, dhead, dbias]"};

constexpr const char* kOfAFile = "level=linear source.kind=safetensors source.path=/x.safetensors";

TEST(GradcheckLinear, HiddenStatesWithoutOneFiniteRowAreMistrusted) {
  constexpr int64_t kRows = 2, kHidden = 32, kColumns = 64;
  const std::vector<float> head(kColumns * kHidden, 0.25F);
  const std::vector<int64_t> labels = {1, 2};
  for (const int finite_rows : {0, 1}) {
    std::vector<float> hidden(kRows * kHidden, NAN);
    for (int i = 0; i < finite_rows * kHidden; ++i) hidden[static_cast<size_t>(i)] = 0.01F * static_cast<float>(i);
    const TensorFile file("/x.safetensors",
                          {stored("hidden", "F32", {kRows, kHidden}, hidden), stored("lm_head", "F32", {kColumns, kHidden}, head),
                           stored("labels", "I64", {kRows}, labels)});
    const GradcheckCall check(config_of(kOfAFile, {"loss=logprobs", "gradients=[dhidden]"}, {file}));
    EXPECT_EQ(check.failures(), finite_rows > 0 ? Sets() : Sets{"inputs/nonfinite_fraction"});
  }
}

// What the command hands over of a model: its head with its bias.
TEST(GradcheckLinear, ABiasComesFromTheFile) {
  constexpr int64_t kRows = 3, kHidden = 8, kColumns = 40;
  std::vector<float> hidden(kRows * kHidden), head(kColumns * kHidden), bias(kColumns);
  for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = 0.1F * static_cast<float>(i % 7);
  for (size_t i = 0; i < head.size(); ++i) head[i] = 0.1F * static_cast<float>(i % 11) - 0.5F;
  bias[5] = 30;  // the label of every row: without the bias the loss is 3.6, with it 0
  const std::vector<int64_t> labels(kRows, 5);
  const auto file = [&](int64_t size) {
    StoredTensor of_file = stored("bias", "F32", {size}, bias);
    of_file.bytes = size * 4;
    return TensorFile("/x.safetensors",
                      {stored("hidden", "F32", {kRows, kHidden}, hidden), stored("lm_head", "F32", {kColumns, kHidden}, head),
                       of_file, stored("labels", "I64", {kRows}, labels)});
  };
  const Sets sets = {"loss=cross_entropy", "source.bias=bias"};
  const GradcheckCall check(config_of(kOfAFile, sets, {file(kColumns)}));
  EXPECT_EQ(check.failures(), Sets());
  EXPECT_LT(check.verdict.loss_ref, 1e-6);
  EXPECT_TRUE(is_refused(refusal(kOfAFile, sets, {file(kColumns - 1)}), "bias: expected F32 with 40 elements, got F32 [39]"));
}

TEST(GradcheckLinear, AgreesInEveryStorageLayoutAndComputeTypeWithEveryMutantCaught) {
  int layout = 0;
  for (const std::string dtype : {"bf16", "fp16", "fp32"}) {
    for (const std::string compute : {"auto", "float32", "bfloat16"}) {
      ++layout;
      const Sets sets = {
          "seq_len=100",
          "dtype=" + dtype,
          "compute_dtype=" + compute,
          std::string("head_layout=") + (layout % 2 == 0 ? "vh" : "hv"),
          std::string("bias=") + (layout % 3 == 0 ? "none" : "random"),
          std::string("dhead_dtype=") + (layout % 2 == 0 ? "float32" : "head"),
          std::string("accumulate=") + (layout % 3 == 1 ? "true" : "false"),
      };
      const GradcheckCall check("gradcheck_linear_ce_qwen2.5_1.5b.yaml", joined(kSmall, sets));
      EXPECT_EQ(check.metrics()["shape/hidden_size"], 48);
      EXPECT_GT(check.mutants().size(), 9U) << dtype << " " << compute;
      for (const std::string gradient : {"dhidden", "dhead", "dbias"}) {
        EXPECT_GT(check.gate("value_and_grad/" + gradient + "/frobenius").value, 0.0);
        EXPECT_GT(check.gate("backward_from_row_state/" + gradient + "/cap").value, 0.0);
      }
    }
  }
}

TEST(GradcheckLinear, PoliciesAgreeAtBothLevels) {
  for (const std::string preset : {"grpo", "gspo", "dapo"}) {
    const GradcheckCall check("gradcheck_linear_grpo_qwen2.5_1.5b.yaml",
                              joined(kSmall, {"seq_len=12", "preset=" + preset, "source.std=1.5"}));
    EXPECT_FALSE(check.mutants().empty()) << preset;
    EXPECT_EQ(check.config.function.preset(), preset);
    EXPECT_TRUE(check.metrics()["metric/ratio_mean"].is_number());
    EXPECT_GT(check.gate("value_and_grad/dhead/frobenius").value, 0.0);
  }
}

TEST(GradcheckLinear, LogprobsAgreeForEveryUpstream) {
  const GradcheckCall check(
      "level=linear loss=logprobs batch_size=1 seq_len=33 hidden_size=40 vocab_size=300 dtype=bf16 source.std=2 upstream=per_row "
      "outputs=[logp, lse, entropy]");
  EXPECT_FALSE(check.mutants().empty());
}

TEST(GradcheckLinear, RealHiddenStatesAgree) {
  const std::string config = "gradcheck_linear_safetensors.yaml";
  const GradcheckCall check(config);
  const Json metrics = check.metrics();
  EXPECT_EQ(metrics["shape/hidden_size"], 256);
  EXPECT_EQ(metrics["shape/rows_used"], 11);
  EXPECT_GT(check.mutants().size(), 9U);
  const char* folder = std::getenv("TILELOSS_DATA");
  if (folder == nullptr) return;
  const GradcheckCall whole(config, {std::string("source.path=") + folder + "/qwen2-tiny-hidden.safetensors"});
  EXPECT_FALSE(whole.mutants().empty());
  EXPECT_NEAR(whole.verdict.loss_ref, 1.9481279016343136, 1e-12);
}

TEST(GradcheckLinear, WhatDoesNotGoTogetherIsRefusedByName) {
  expect_config_errors("gradcheck_linear_ce_qwen2.5_1.5b.yaml",
                       {{{"seq_len=2", "level=logits"}, "hidden_size"},
                        {{"seq_len=2", "kernel.in_place=true"}, "in_place"},
                        {{"seq_len=2", "gradients=[dlogits]"}, "gradients"},
                        {{"seq_len=2", "gradients=[]"}, "gradients"},
                        {{"seq_len=2", "source.distribution=confident"}, "distribution"},
                        {{"seq_len=2", "hidden_size=0"}, "hidden_size"},
                        {{"seq_len=2", "kernel.workspace_bytes=64"}, "workspace_bytes"}});
  expect_config_errors("gradcheck_linear_safetensors.yaml", {{{"hidden_size=255"}, "rows of 256"}});
}

}  // namespace
}  // namespace tileloss::tools
