// The program with a standard descriptor that is closed, or that takes no text.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/bench/sweep_support.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::kCheapSweep;
using test::kClosed;
using test::Program;
using test::ProgramResult;
using test::Streams;
using test::TemporaryFolder;

constexpr size_t kCases = 2;

ProgramResult sweep(const TemporaryFolder& folder, const Streams& streams) {
  const std::string config = folder.write("c.yaml", kCheapSweep).string();
  return Program({"sweep", "--config", config, "--set", "loss=cross_entropy", "--set", "shape=3x256", "--set", "threads=1"},
                 streams)
      .wait();
}

// The results file or its lock would have the descriptor's number, and take what is meant for the terminal.
TEST(StandardStreams, AClosedOneTakesNothingIntoTheResults) {
  for (const Streams& streams : {Streams{.err = kClosed}, {.closed_input = true}, {.err = kClosed, .closed_input = true}}) {
    const TemporaryFolder folder;
    const ProgramResult result = sweep(folder, streams);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.last_line(), "ok: 2");
    EXPECT_EQ(test::results_by_case(folder.path() / "r.jsonl").size(), kCases);
  }
}

// Nobody would read the report; that is said as of a full disk.
TEST(StandardStreams, AClosedStandardOutputExitsWithThree) {
  const TemporaryFolder folder;
  EXPECT_EQ(sweep(folder, {.out = kClosed, .err = kClosed, .closed_input = true}).exit_code, 3);
  for (const Json& line : read_results(folder.path() / "r.jsonl").lines) EXPECT_EQ(line["status"], "ok");
  const ProgramResult result = sweep(folder, {.out = kClosed});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("tileloss: cannot write to "), std::string::npos) << result.err;
}

TEST(StandardStreams, AFullStandardErrorLeavesTheExitCode) {
  const Streams full = {.err = "/dev/full"};
  const TemporaryFolder folder;
  const std::string config = folder.write("g.yaml", "loss: cross_entropy\n").string();
  EXPECT_EQ(Program({"gradcheck", "--config", "/nonexistent/c.yaml"}, full).wait().exit_code, 3);
  EXPECT_EQ(Program({"gradcheck", "--config", config, "--set", "seed=x"}, full).wait().exit_code, 2);
  EXPECT_EQ(Program({"bench", "--tokens", "x"}, full).wait().exit_code, 2);
  folder.write("r.jsonl", "{\"tool\":\"torn");  // there is a warning to be said, too
  const ProgramResult result = sweep(folder, full);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.last_line(), "ok: 2");
  EXPECT_EQ(test::results_by_case(folder.path() / "r.jsonl").size(), kCases);
}

}  // namespace
}  // namespace tileloss::tools
