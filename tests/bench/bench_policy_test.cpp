// The bench on policy losses: presets and options by name, inputs of its own making.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "support/result_writer.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::ProgramResult;
using test::run_program;

ProgramResult bench(std::vector<std::string> more) {
  std::vector<std::string> arguments = {"bench", "--loss", "policy_loss", "--tokens", "300", "--vocab", "500", "--iters", "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program(arguments);
}

TEST(BenchPolicy, TimesForwardAndGradientOfAPreset) {
  for (const std::string preset : {"grpo", "gspo", "vespo"}) {
    const ProgramResult result =
        bench({"--preset", preset, "--json", "--in-place", "--set", "beta=0.1", "--set", "sampler_correction=truncate"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    std::istringstream lines(result.out);
    std::string line;
    for (const char* pass : {"forward", "value_and_grad"}) {
      ASSERT_TRUE(std::getline(lines, line)) << result.out;
      const Json json = Json::parse(line);
      EXPECT_EQ(json["preset"], preset);
      EXPECT_EQ(json["pass"], pass);
      EXPECT_EQ(json["options"]["beta"], 0.1);
      EXPECT_GT(json["median_ms"].get<double>(), 0.0);
    }
  }
}

// What dr_grpo divides by is the longest sequence that the bench draws, unless it is given.
TEST(BenchPolicy, SuppliesTheMaxLengthThatAPresetNeeds) {
  const auto max_length = [](const std::string& tokens, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"bench", "--loss",  "policy_loss", "--preset", "dr_grpo", "--tokens",
                                          tokens,  "--vocab", "64",          "--iters",  "1",       "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.exit_code == 0 ? Json::parse(result.last_line())["options"].value("max_length", 0) : -1;
  };
  EXPECT_EQ(max_length("300", {}), 256);
  EXPECT_EQ(max_length("17", {}), 17);
  EXPECT_EQ(max_length("17", {"--set", "max_length=1000"}), 1000);
}

TEST(BenchPolicy, TakesTokensOfEveryNumberAndLossesPerToken) {
  for (const char* tokens : {"1", "257"}) {
    const ProgramResult result = run_program({"bench", "--loss", "policy_loss", "--tokens", tokens, "--vocab", "64", "--iters",
                                              "1", "--set", "aggregation=none", "--set", "advantage_level=token"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
}

TEST(BenchPolicy, TheTableAndTheResultsFileAreOfOneRun) {
  const test::TemporaryFolder folder;
  const std::string output = (folder.path() / "r.jsonl").string();
  for (const int runs : {1, 2}) {
    const ProgramResult result = bench({"--preset", "grpo", "--output", output});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.out.find("value_and_grad"), std::string::npos) << result.out;
    const std::vector<Json> lines = read_results(output).lines;
    ASSERT_EQ(std::ssize(lines), 2 * runs);
    EXPECT_EQ(lines.back()["tool"], "bench");
    EXPECT_EQ(lines.back()["pass"], "value_and_grad");
  }
  EXPECT_EQ(bench({"--preset", "grpo", "--output", "/nonexistent/r.jsonl"}).exit_code, 3);
}

TEST(BenchPolicy, WrongRequestsAreRefusedByName) {
  const auto expect_refused = [](const ProgramResult& result, const std::string& message) {
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  };
  expect_refused(bench({"--preset", "cispo"}), "epsilon_high");
  expect_refused(bench({"--preset", "ppo"}),
                 "--preset: expected one of grpo, bnpo, dr_grpo, dapo, cispo, sapo, gspo, luspo, vespo, reinforce, got 'ppo'\n");
  expect_refused(bench({"--set", "preset=ppo"}), "--set preset=ppo: preset: 'ppo' is none of grpo, ");
  expect_refused(bench({"--preset", "grpo", "--set", "preset=gspo"}),
                 "expected one preset, got --preset grpo and --set preset=gspo\n");
  expect_refused(bench({"--preset", "grpo", "--impl", "both"}), "there is no reference for policy_loss");
  expect_refused(run_program({"bench", "--preset", "grpo", "--tokens", "4", "--vocab", "64"}),
                 "--preset: expected none, as cross_entropy has no presets, got 'grpo'\n");
}

}  // namespace
}  // namespace tileloss::tools
