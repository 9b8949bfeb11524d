// The bench of losses with a teacher, and what it has no inputs for.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "support/exit_codes.h"
#include "support/result_writer.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;

constexpr double kRows = 40, kColumns = 500;

ProgramResult bench(const std::string& loss, const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"bench", "--loss", loss, "--tokens", "40", "--vocab", "500", "--iters", "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program(arguments);
}

std::vector<Json> lines_of(const ProgramResult& result) {
  EXPECT_EQ(result.exit_code, 0) << result.err;
  std::vector<Json> lines;
  std::istringstream in(result.out);
  for (std::string line; std::getline(in, line);) lines.push_back(Json::parse(line));
  return lines;
}

TEST(BenchDistillation, FromLogitsReadsBothSides) {
  for (const bool in_place : {false, true}) {
    std::vector<std::string> more = {"--dtype", "bf16", "--json", "--set", "divergence=jsd", "--entropy"};
    if (in_place) more.emplace_back("--in-place");
    const std::vector<Json> lines = lines_of(bench("distillation", more));
    ASSERT_EQ(lines.size(), 2U);
    for (const Json& line : lines) {
      const double matrices = line["pass"] == "forward" ? 2 : 3;
      EXPECT_NEAR(line["gb_per_s"].get<double>() * line["median_ms"].get<double>() * 1e6, matrices * kRows * kColumns * 2, 1);
      EXPECT_EQ(line["options"]["divergence"], "jsd");
      EXPECT_GE(line["roof_ms"], 2 * line["exp_ms"].get<double>());
    }
    EXPECT_EQ(lines[1]["pass"], "value_and_grad");
  }
}

TEST(BenchDistillation, OfTwoHeadsHasAProductOfEachSide) {
  for (const bool frozen : {false, true}) {
    std::vector<std::string> more = {"--hidden", "32", "--json"};
    if (frozen) more.emplace_back("--frozen-head");
    const std::vector<Json> lines = lines_of(bench("linear_distillation", more));
    ASSERT_EQ(lines.size(), 2U);
    const double product = 2 * kRows * kColumns * 32;
    for (size_t i = 0; i < 2; ++i) {
      const double products = i == 0 ? 2 : frozen ? 3 : 4;
      EXPECT_NEAR(lines[i]["tflops"].get<double>() * lines[i]["median_ms"].get<double>() * 1e9, products * product,
                  1e-6 * product);
    }
  }
}

TEST(BenchDistillation, ABackwardNeedsNoForward) {
  for (const auto& [loss, more] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {"distillation", {"--json", "--pass", "backward", "--in-place"}},
           {"linear_distillation", {"--json", "--pass", "backward", "--hidden", "32"}}}) {
    const std::vector<Json> lines = lines_of(bench(loss, more));
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_EQ(lines[0]["pass"], "backward");
    EXPECT_GT(lines[0]["median_ms"].get<double>(), 0);
  }
}

TEST(BenchDistillation, WhatItHasNoInputsForIsRefused) {
  for (const std::string loss :
       {"soft_cross_entropy", "linear_soft_cross_entropy", "sparse_distillation", "linear_sparse_distillation"}) {
    const ProgramResult result = bench(loss, {"--hidden", "32"});
    EXPECT_EQ(result.exit_code, kExitUsage) << result.out;
    EXPECT_NE(result.err.find("loss: expected one that is timed, logprobs, "), std::string::npos) << result.err;
    EXPECT_NE(result.err.find(", got " + loss), std::string::npos) << result.err;
    const TemporaryFolder folder;
    const ProgramResult sweep = run_program({"sweep", "--config", TILELOSS_SOURCE_DIR "/configs/sweep_small.yaml", "--set",
                                             "loss=" + loss, "--set", "output=" + (folder.path() / "r.jsonl").string()});
    EXPECT_EQ(sweep.exit_code, kExitUsage) << sweep.out;
    EXPECT_NE(sweep.err.find("loss: '" + loss + "' is none of logprobs, cross_entropy"), std::string::npos) << sweep.err;
  }
  const ProgramResult reference = bench("distillation", {"--impl", "both"});
  EXPECT_EQ(reference.exit_code, kExitUsage);
  EXPECT_NE(reference.err.find("there is no reference for distillation"), std::string::npos) << reference.err;
}

}  // namespace
}  // namespace tileloss::tools
