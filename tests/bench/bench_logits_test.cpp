// The bench from logits: figures and roofs of each pass, policy losses' own inputs, losses with a teacher, and what is refused.
#include <algorithm>

#include "support/memory.h"
#include "tests/bench/bench_call.h"
#include "tests/shared/resource_limit.h"

namespace tileloss::tools {
namespace {

const char* memory_roof(const std::string& pass, bool in_place) {
  return pass == "forward" ? "read_ms" : in_place ? "in_place_ms" : "copy_ms";
}

void expect_roof(const Json& line, bool in_place) {
  expect_figures(line);
  const double memory = number(line, memory_roof(line.at("pass"), in_place));
  EXPECT_EQ(number(line, "roof_ms"), std::max(memory, number(line, "exp_ms")));
}

TEST(Bench, HasEveryFigureAndTheGradientComesLast) {
  for (const bool in_place : {false, true}) {
    const std::vector<Json> lines = bench_lines(
        "loss=cross_entropy tokens=70 vocab=5003 dtype=bf16 impl=both iters=3 warmup=1 entropy=true seed=9 "
        "options.label_smoothing=0.1",
        {in_place ? "in_place=true" : "in_place=false"});
    ASSERT_EQ(lines.size(), 4U);
    for (const Json& line : lines) {
      expect_roof(line, in_place);
      EXPECT_EQ(line["tokens"], 70);
      EXPECT_EQ(line["seed"], 9);
      EXPECT_EQ(line["in_place"], in_place);
      EXPECT_EQ(line["options"]["label_smoothing"], 0.1);
    }
    EXPECT_EQ(lines.back()["pass"], "value_and_grad");
    EXPECT_EQ(lines.back()["impl"], "kernel");
    EXPECT_GT(lines.back()["speedup_over_reference"], 0.0);
  }
  EXPECT_EQ(bench_lines("loss=logprobs tokens=16 vocab=1000 dtype=fp32 iters=2").back()["pass"], "backward");
}

TEST(Bench, OnePassAloneIsTimedAgainstItsRoof) {
  for (const std::string pass : {"forward", "backward", "value_and_grad"}) {
    for (const bool in_place : {false, true}) {
      for (const char* loss :
           {"loss=cross_entropy options.label_smoothing=0.1", "loss=policy_loss preset=gspo options.entropy_coef=0.01"}) {
        const std::vector<Json> lines = bench_lines(loss, {"pass=" + pass, "tokens=70", "vocab=5003", "iters=2", "warmup=0",
                                                           in_place ? "in_place=true" : "in_place=false"});
        ASSERT_EQ(lines.size(), 1U);
        EXPECT_EQ(lines[0]["pass"], pass);
        expect_roof(lines[0], in_place);
      }
    }
  }
}

TEST(Bench, WhatItCannotTimeIsRefused) {
  const std::string small = "tokens=4 vocab=64 iters=1";
  for (const auto& [sets, message] : std::vector<std::pair<Sets, std::string>>{
           {{"pass=sideways"}, "pass: 'sideways' is none of forward, backward, value_and_grad"},
           {{"pass=backward", "impl=both"}, "the reference has no backward from a row state"},
           {{"loss=policy_loss", "preset=grpo", "impl=both"}, "there is no reference for policy_loss"},
           {{"loss=distillation", "impl=both"}, "there is no reference for distillation"},
           {{"device=cuda:x"}, "device: expected cpu, cuda or cuda:N, got cuda:x"},
           {{"device=cuda", "impl=both"}, "the reference runs on the cpu alone"},
           {{"cuda_kernel=cluster"}, "cuda_kernel: expected auto on cpu from logits, got cluster"},
           {{"vocab_block=100"}, "vocab_block: expected a multiple of 64"},
           {{"options.label_smoothing=2"}, "label_smoothing"},
           {{"preset=grpo"}, "expected none, as cross_entropy has no presets, got 'grpo'"},
           {{"loss=policy_loss", "preset=ppo"}, "preset: expected one of grpo, bnpo, "},
           {{"loss=policy_loss", "preset=cispo"}, "epsilon_high"},
           {{"loss=policy_loss", "preset=grpo", "options.preset=gspo"}, "expected one preset"},
           {{"loss=soft_cross_entropy"}, "loss: 'soft_cross_entropy' is none of logprobs, "},
           {{"loss=sparse_distillation"}, "loss: 'sparse_distillation' is none of logprobs, "},
           {{"iters=0"}, "iters: 0 is out of range"},
           {{"threads=1025"}, "threads: 1025 is out of range"}}) {
    EXPECT_TRUE(is_refused(bench_refusal(small, sets), message));
  }
}

TEST(Bench, TooLittleMemoryIsAnEnvironmentErrorNamingTheBytes) {
  // 2^63 bytes, and 2^64: more than an int64_t counts.
  for (const auto& [text, megabytes] : {std::pair("tokens=100000000 vocab=151936", "30387200.0"),
                                        {"tokens=2147483648 vocab=2147483648 dtype=bf16", "9223372036854.8"},
                                        {"tokens=2147483648 vocab=2147483648 dtype=fp32", "18446744073709.6"}}) {
    const std::string refused = bench_refusal(text);
    EXPECT_TRUE(refused.starts_with(std::string("3: logits: needs ") + megabytes + " MB")) << refused;
  }
}

// 36 bytes a row, of which the logits are 2. The limit stops a bench that allocates first.
TEST(Bench, RowsThatDoNotFitAreRefusedBeforeAnythingIsAllocated) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitized program takes terabytes of address space";
#endif
  constexpr int64_t kRows = int64_t{1} << 31;
  if (available_bytes() > 32 * kRows) GTEST_SKIP() << "they fit";
  if (available_bytes() < 6 * kRows) GTEST_SKIP() << "not even the logits fit";
  const test::AddressSpaceLimit limit(1 << 30);
  const std::string refused = bench_refusal("tokens=2147483648 vocab=1 threads=1");
  EXPECT_TRUE(refused.starts_with("3: ")) << refused;
  EXPECT_NE(refused.find("of memory are available beside"), std::string::npos) << refused;
}

// ---------------------------------------------------------------------------------------------------------- policy losses

TEST(BenchPolicy, TimesForwardAndGradientOfAPreset) {
  for (const std::string preset : {"grpo", "gspo", "vespo"}) {
    const std::vector<Json> lines = bench_lines(
        "loss=policy_loss tokens=300 vocab=500 iters=1 in_place=true options.beta=0.1 "
        "options.sampler_correction=truncate",
        {"preset=" + preset});
    ASSERT_EQ(lines.size(), 2U);
    EXPECT_EQ(lines[0]["pass"], "forward");
    EXPECT_EQ(lines[1]["pass"], "value_and_grad");
    for (const Json& line : lines) {
      EXPECT_EQ(line["preset"], preset);
      EXPECT_EQ(line["options"]["beta"], 0.1);
      expect_figures(line);
    }
  }
}

// What dr_grpo divides by is the longest sequence that the bench draws, unless it is given.
TEST(BenchPolicy, SuppliesTheMaxLengthThatAPresetNeeds) {
  for (const auto& [sets, expected] :
       {std::pair(Sets{"tokens=300"}, 256), {{"tokens=17"}, 17}, {{"tokens=17", "options.max_length=1000"}, 1000}}) {
    const std::vector<Json> lines = bench_lines("loss=policy_loss preset=dr_grpo vocab=64 iters=1", sets);
    EXPECT_EQ(lines.back()["options"].value("max_length", 0), expected);
  }
}

TEST(BenchPolicy, TakesTokensOfEveryNumberAndLossesPerToken) {
  for (const char* tokens : {"tokens=1", "tokens=257"}) {
    const Sets sets = {tokens, "options.aggregation=none", "options.advantage_level=token"};
    EXPECT_EQ(bench_lines("loss=policy_loss vocab=64 iters=1", sets).size(), 2U);
  }
}

// ----------------------------------------------------------------------------------------------------------- with a teacher

TEST(BenchDistillation, FromLogitsReadsBothSides) {
  for (const char* in_place : {"in_place=false", "in_place=true"}) {
    const std::vector<Json> lines =
        bench_lines("loss=distillation tokens=40 vocab=500 iters=1 dtype=bf16 options.divergence=jsd entropy=true", {in_place});
    ASSERT_EQ(lines.size(), 2U);
    for (const Json& line : lines) {
      const double matrices = line["pass"] == "forward" ? 2 : 3;
      EXPECT_NEAR(number(line, "gb_per_s") * number(line, "median_ms") * 1e6, matrices * 40 * 500 * 2, 1);
      EXPECT_EQ(line["options"]["divergence"], "jsd");
      EXPECT_GE(number(line, "roof_ms"), 2 * number(line, "exp_ms"));
    }
    EXPECT_EQ(lines[1]["pass"], "value_and_grad");
  }
}

TEST(BenchDistillation, ABackwardNeedsNoForward) {
  for (const char* loss : {"loss=distillation in_place=true", "loss=linear_distillation hidden=32"}) {
    const std::vector<Json> lines = bench_lines(loss, {"tokens=40", "vocab=500", "iters=1", "pass=backward"});
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_EQ(lines[0]["pass"], "backward");
    expect_figures(lines[0]);
  }
}

}  // namespace
}  // namespace tileloss::tools
