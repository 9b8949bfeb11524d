// gradcheck's level linear, end to end: losses, storages, layouts, policies, real data, mutants, and what it refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <iterator>
#include <nlohmann/json.hpp>

#include "support/result_writer.h"
#include "support/safetensors.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;

const std::string kConfigs = TILELOSS_SOURCE_DIR "/configs/";

ProgramResult gradcheck(const std::string& config, const std::vector<std::string>& sets) {
  std::vector<std::string> arguments = {"gradcheck", "--config", kConfigs + config};
  for (const std::string& set : sets) arguments.insert(arguments.end(), {"--set", set});
  return run_program(arguments);
}

// The result line; null if the program did not exit with 0.
Json check(const std::string& config, std::vector<std::string> sets) {
  const TemporaryFolder folder;
  sets.push_back("output=" + (folder.path() / "r.jsonl").string());
  const ProgramResult result = gradcheck(config, sets);
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  return result.exit_code == 0 ? read_results(folder.path() / "r.jsonl").lines.at(0) : Json();
}

double gate(const Json& line, const std::string& name) {
  for (const Json& entry : line["gates"]) {
    if (entry["name"] == name) return entry["value"].get<double>();
  }
  ADD_FAILURE() << "no gate " << name;
  return NAN;
}

const std::vector<std::string> kSmall = {"vocab_size=500", "hidden_size=48", "gradients=[dhidden, dhead, dbias]", "mutants=true"};

std::vector<std::string> small_with(std::vector<std::string> more) {
  more.insert(more.end(), kSmall.begin(), kSmall.end());
  return more;
}

int caught(const Json& line) {
  int count = 0;
  for (const Json& mutant : line["mutants"]) {
    if (mutant["planted"].get<bool>() && !mutant["caught_by"].empty()) ++count;
  }
  return count;
}

TEST(GradcheckLinear, HiddenStatesWithoutOneFiniteRowAreMistrusted) {
  constexpr int64_t kRows = 2, kHidden = 32, kColumns = 64;
  const std::vector<float> head(kColumns * kHidden, 0.25F);
  const std::vector<int64_t> labels = {1, 2};
  for (const int finite_rows : {0, 1}) {
    const TemporaryFolder folder;
    std::vector<float> hidden(kRows * kHidden, NAN);
    for (int i = 0; i < finite_rows * kHidden; ++i) hidden[static_cast<size_t>(i)] = 0.01F * static_cast<float>(i);
    write_safetensors(folder.path() / "x.safetensors",
                      {{"hidden", "F32", {kRows, kHidden}, hidden.data(), std::ssize(hidden) * 4},
                       {"lm_head", "F32", {kColumns, kHidden}, head.data(), std::ssize(head) * 4},
                       {"labels", "I64", {kRows}, labels.data(), std::ssize(labels) * 8}});
    const std::string config = folder.write("c.yaml",
                                            "level: linear\nloss: logprobs\ngradients: [dhidden]\n"
                                            "source: {kind: safetensors, path: x.safetensors}\n");
    const ProgramResult result = run_program({"gradcheck", "--config", config});
    EXPECT_EQ(result.last_line(), finite_rows > 0 ? "PASS" : "FAIL: mistrusted/nonfinite_fraction") << result.out << result.err;
  }
}

// What the Python package hands over: a model's head with its bias, and what it knows of the case.
TEST(GradcheckLinear, ABiasComesFromTheFileAndFactsGoToTheReport) {
  constexpr int64_t kRows = 3, kHidden = 8, kColumns = 40;
  const TemporaryFolder folder;
  std::vector<float> hidden(kRows * kHidden), head(kColumns * kHidden), bias(kColumns);
  for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = 0.1F * static_cast<float>(i % 7);
  for (size_t i = 0; i < head.size(); ++i) head[i] = 0.1F * static_cast<float>(i % 11) - 0.5F;
  bias[5] = 30;  // the label of every row: without the bias the loss is 3.6, with it 0
  const std::vector<int64_t> labels(kRows, 5);
  const auto write = [&](int64_t size) {
    write_safetensors(folder.path() / "x.safetensors",
                      {{"hidden", "F32", {kRows, kHidden}, hidden.data(), std::ssize(hidden) * 4},
                       {"lm_head", "F32", {kColumns, kHidden}, head.data(), std::ssize(head) * 4},
                       {"bias", "F32", {size}, bias.data(), size * 4},
                       {"labels", "I64", {kRows}, labels.data(), std::ssize(labels) * 8}});
  };
  const std::string config = folder.write("c.yaml",
                                          "level: linear\nloss: cross_entropy\noutput: r.jsonl\nmodel_path: x\n"
                                          "source: {kind: safetensors, path: x.safetensors, bias: bias}\n");
  const std::vector<std::string> command = {"gradcheck", "--config", config, "--skip-key", "model_path"};
  std::vector<std::string> with_facts = command;
  with_facts.insert(with_facts.end(), {"--facts", R"({"model":"tiny","time/load_s":1.5})"});
  write(kColumns);
  const ProgramResult result = run_program(with_facts);
  EXPECT_EQ(result.last_line(), "PASS") << result.out << result.err;
  EXPECT_NE(result.out.find("; tiny; seed 0"), std::string::npos) << result.out;
  const Json line = read_results(folder.path() / "r.jsonl").lines.at(0);
  EXPECT_LT(line["loss_ref"].get<double>(), 1e-6);
  EXPECT_EQ(line["time/load_s"], 1.5);
  EXPECT_EQ(line["model"], "tiny");

  write(kColumns - 1);
  const ProgramResult wrong = run_program(command);
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_NE(wrong.err.find("bias: expected F32 with 40 elements, got F32 [39]"), std::string::npos) << wrong.err;
}

TEST(GradcheckLinear, AgreesInEveryStorageLayoutAndComputeTypeWithEveryMutantCaught) {
  int layout = 0;
  for (const std::string dtype : {"bf16", "fp16", "fp32"}) {
    for (const std::string compute : {"auto", "float32", "bfloat16"}) {
      ++layout;
      const std::vector<std::string> sets = {
          "seq_len=100",
          "dtype=" + dtype,
          "compute_dtype=" + compute,
          std::string("head_layout=") + (layout % 2 == 0 ? "vh" : "hv"),
          std::string("bias=") + (layout % 3 == 0 ? "none" : "random"),
          std::string("dhead_dtype=") + (layout % 2 == 0 ? "float32" : "head"),
          std::string("accumulate=") + (layout % 3 == 1 ? "true" : "false"),
      };
      const Json line = check("gradcheck_linear_ce_qwen2.5_1.5b.yaml", small_with(sets));
      ASSERT_TRUE(line.is_object()) << dtype << " " << compute;
      EXPECT_EQ(line["shape/hidden_size"], 48);
      EXPECT_GT(caught(line), 9) << line["mutants"].dump(1);
      for (const char* gradient : {"dhidden", "dhead", "dbias"}) {
        EXPECT_GT(gate(line, std::string("value_and_grad/") + gradient + "/frobenius"), 0.0);
        EXPECT_GT(gate(line, std::string("backward_from_row_state/") + gradient + "/cap"), 0.0);
      }
    }
  }
}

TEST(GradcheckLinear, PoliciesAgreeAtBothLevels) {
  for (const std::string preset : {"grpo", "gspo", "dapo"}) {
    const Json line =
        check("gradcheck_linear_grpo_qwen2.5_1.5b.yaml", small_with({"seq_len=12", "preset=" + preset, "source.std=1.5"}));
    ASSERT_TRUE(line.is_object()) << preset;
    EXPECT_EQ(line["preset"], preset);
    EXPECT_TRUE(line["metric/ratio_mean"].is_number());
    EXPECT_GT(gate(line, "value_and_grad/dhead/frobenius"), 0.0);
  }
}

TEST(GradcheckLinear, LogprobsAgreeForEveryUpstream) {
  const TemporaryFolder folder;
  const std::filesystem::path config =
      folder.write("c.yaml",
                   "level: linear\nloss: logprobs\nbatch_size: 1\nseq_len: 33\nhidden_size: 40\nvocab_size: 300\ndtype: bf16\n"
                   "source: {std: 2}\nupstream: per_row\noutputs: [logp, lse, entropy]\n");
  const ProgramResult result = run_program({"gradcheck", "--config", config.string(), "--mutants"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
}

TEST(GradcheckLinear, RealHiddenStatesAgree) {
  const std::string config = "gradcheck_linear_safetensors.yaml";
  const Json line = check(config, {});
  ASSERT_TRUE(line.is_object());
  EXPECT_EQ(line["shape/hidden_size"], 256);
  EXPECT_EQ(line["shape/rows_used"], 11);
  EXPECT_GT(caught(line), 9);
  const char* folder = std::getenv("TILELOSS_DATA");
  if (folder == nullptr) return;
  const Json whole = check(config, {std::string("source.path=") + folder + "/qwen2-tiny-hidden.safetensors"});
  ASSERT_TRUE(whole.is_object());
  EXPECT_NEAR(whole["loss_ref"].get<double>(), 1.9481279016343136, 1e-12);
}

TEST(GradcheckLinear, WhatDoesNotGoTogetherIsRefusedByName) {
  const std::string config = "gradcheck_linear_ce_qwen2.5_1.5b.yaml";
  const auto refused = [&](const std::string& set, const std::string& name) {
    const ProgramResult result = gradcheck(config, {set, "seq_len=2"});
    EXPECT_EQ(result.exit_code, 2) << set;
    EXPECT_NE(result.err.find(name), std::string::npos) << result.err;
  };
  refused("level=logits", "hidden_size");
  refused("kernel.in_place=true", "in_place");
  refused("gradients=[dlogits]", "gradients");
  refused("gradients=[]", "gradients");
  refused("source.distribution=confident", "distribution");
  refused("hidden_size=0", "hidden_size");
  refused("kernel.workspace_bytes=64", "workspace_bytes");
  const ProgramResult result = gradcheck("gradcheck_linear_safetensors.yaml", {"hidden_size=255"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("rows of 256"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace tileloss::tools
