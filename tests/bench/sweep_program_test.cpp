// tileloss sweep from outside: the built program, killed, stopped, locked out, starved.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <random>

#include "support/timer.h"
#include "tests/bench/sweep_support.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::kCheapCases;
using test::kCheapSweep;
using test::kLongSweep;
using test::processes_with_argument;
using test::Program;
using test::ProgramResult;
using test::read_text;
using test::results_by_case;
using test::TemporaryFolder;

std::vector<std::string> sweep_arguments(const TemporaryFolder& folder, const std::string& config,
                                         const std::vector<std::string>& sets = {}) {
  std::vector<std::string> arguments = {"sweep", "--config", folder.write("c.yaml", config).string()};
  for (const std::string& set : sets) arguments.insert(arguments.end(), {"--set", set});
  return arguments;
}

ProgramResult sweep(const TemporaryFolder& folder, const std::string& config, const std::vector<std::string>& sets = {}) {
  return Program(sweep_arguments(folder, config, sets)).wait();
}

void expect_every_case_once(const std::filesystem::path& file) {
  const auto results = results_by_case(file);
  EXPECT_EQ(results.size(), kCheapCases);
  for (const auto& [sweep_case, count] : results) EXPECT_EQ(count, 1) << sweep_case;
}

// Stands in the arguments of a case's process: no other suite on the machine has it.
const std::string kSeed = std::to_string(770'000 + getpid());

// Waits until a case with this seed runs.
bool case_runs() {
  for (int i = 0; i < 30'000; ++i, usleep(10'000)) {
    if (processes_with_argument("\"seed\":" + kSeed + "}") == 1) return true;
  }
  return false;
}

bool case_is_gone() {
  for (int i = 0; i < 30'000; ++i, usleep(10'000)) {
    if (processes_with_argument("\"seed\":" + kSeed + "}") == 0) return true;
  }
  return false;
}

TEST(SweepProgram, MeasuresEveryCaseWithTheBenchsFigures) {
  const TemporaryFolder folder;
  const ProgramResult result = sweep(folder, kCheapSweep);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.last_line(), "ok: 24");
  expect_every_case_once(folder.path() / "r.jsonl");
  for (const Json& line : read_results(folder.path() / "r.jsonl").lines) {
    EXPECT_EQ(line["status"], "ok") << line;
    EXPECT_EQ(line["vocab_block"], line["case"]["vocab_block"]) << line;
    EXPECT_LE(line["threads"], line["case"]["threads"]) << line;
    for (const char* key : {"first_call_s", "median_ms", "min_ms", "mean_ms", "mem_after_alloc", "mem_peak", "gb_per_s"}) {
      EXPECT_GT(line.at(key).get<double>(), 0) << key << line;
    }
  }
  EXPECT_NE(result.out.find("logprobs [5, 512] bfloat16 backward\n"), std::string::npos) << result.out;
}

#ifdef __x86_64__
// On a libtileloss_cuda.so whose devices are the host.
TEST(SweepProgram, MeasuresTheKernelsOfADevice) {
  const TemporaryFolder folder;
  const std::string on_host = test::built("cuda_on_host");
  const std::vector<std::string> sets = {
      "device=cuda", "cuda_kernel=[two_reads, cluster]", "loss=cross_entropy", "shape=3x257", "threads=0", "vocab_block=0"};
  std::vector<std::string> arguments = sweep_arguments(folder, kCheapSweep, sets);
  arguments.insert(arguments.begin(), {"LD_LIBRARY_PATH=" + on_host, test::built("tileloss")});
  const ProgramResult result = Program(arguments, {}, "/usr/bin/env").wait();
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  for (const char* text : {"cross_entropy [3, 257] bfloat16 value_and_grad on cuda\n", "best: cuda_kernel="})
    EXPECT_NE(result.out.find(text), std::string::npos) << result.out;
  const std::vector<Json> lines = read_results(folder.path() / "r.jsonl").lines;
  ASSERT_EQ(lines.size(), 2U);
  for (const Json& line : lines) {
    EXPECT_EQ(line.at("cuda_kernel"), line["case"]["cuda_kernel"]) << line;
    // By the device's clock, which the host does not keep waiting: that is done when it synchronises.
    EXPECT_GE(line.at("calls"), 1) << line;
    EXPECT_GT(line.at("host_ns"), 0) << line;
    EXPECT_LT(line.at("host_ns").get<double>(), 1e6 * line.at("median_ms").get<double>()) << line;
  }
}
#endif

TEST(SweepProgram, WhatADeviceHasNoUseForIsRefused) {
  const struct {
    std::vector<std::string> sets;
    const char* message;
  } cases[] = {{{"cuda_kernel=cluster"}, "device: cuda_kernel: expected auto on cpu from logits, got cluster"},
               {{"device=cuda"}, "device: threads: expected 0 on cuda from logits, got 1"},
               {{"device=cuda", "threads=0"}, "device: vocab_block: expected 0 on cuda from logits, got 64"},
               {{"device=cuda", "threads=0", "isa=avx2"}, "device: isa: expected auto on cuda from logits, got avx2"},
               {{"device=cuda", "memory_limit_mb=100"}, "memory_limit_mb: expected none on a GPU"},
               {{"device=tpu"}, "device: expected cpu, cuda or cuda:N, got tpu"}};
  for (const auto& [sets, message] : cases) {
    const TemporaryFolder folder;
    const ProgramResult result = sweep(folder, kCheapSweep, sets);
    EXPECT_EQ(result.exit_code, 2) << message;
    EXPECT_NE(result.err.find(message), std::string::npos) << message << "\n" << result.err;
  }
}

TEST(SweepProgram, PresetsOfAPolicyLossAreMeasured) {
  const TemporaryFolder folder;
  const ProgramResult result = sweep(folder, kCheapSweep,
                                     {"loss=[{name: policy_loss, preset: dr_grpo}, {name: policy_loss, preset: gspo, delta: 3}]",
                                      "shape=8x256", "threads=1", "vocab_block=64"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(result.last_line(), "ok: 2");
  EXPECT_NE(result.out.find("policy_loss preset=gspo"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("delta=3"), std::string::npos) << result.out;
}

// Not everything at once, so that most kills come in the middle of the work.
TEST(SweepProgram, KilledAtRandomPointsLosesRepeatsAndDoublesNothing) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "r.jsonl";
  const Timer timer;
  ASSERT_EQ(sweep(folder, kCheapSweep).exit_code, 0);
  const double whole_us = timer.seconds() * 1e6;
  std::filesystem::remove(file);

  std::mt19937 random(1);
  std::uniform_real_distribution<double> delay_us(0, whole_us / 4);
  int left_in_the_middle = 0;
  std::string before;
  for (int kills = 0; kills < 30;) {
    Program program(sweep_arguments(folder, kCheapSweep));
    usleep(static_cast<useconds_t>(delay_us(random)));
    kill(program.child(), SIGKILL);
    const bool killed = program.wait().exit_code == 128 + SIGKILL;
    const std::string after = std::filesystem::exists(file) ? read_text(file) : "";
    EXPECT_EQ(after.substr(0, before.size()), before);  // no kill within a write has been seen; a cut file has a test of its own
    before = after;
    if (killed) {
      ++kills;
      const size_t done = after.empty() ? 0 : results_by_case(file).size();
      left_in_the_middle += done > 0 && done < kCheapCases ? 1 : 0;
    } else {
      expect_every_case_once(file);
      std::filesystem::remove(file);
      before.clear();
    }
  }
  EXPECT_GT(left_in_the_middle, 5);
  EXPECT_EQ(sweep(folder, kCheapSweep).exit_code, 0);
  expect_every_case_once(file);
}

TEST(SweepProgram, KilledItTakesItsCaseAndItsLockWithIt) {
  const TemporaryFolder folder;
  Program program(sweep_arguments(folder, kLongSweep, {"seed=" + kSeed}));
  ASSERT_TRUE(case_runs());
  kill(program.child(), SIGKILL);
  program.wait();
  EXPECT_TRUE(case_is_gone());
  EXPECT_EQ(sweep(folder, kLongSweep, {"iters=1"}).exit_code, 0);
}

TEST(SweepProgram, TwoOnOneFileAreRefused) {
  const TemporaryFolder folder;
  Program first(sweep_arguments(folder, kLongSweep, {"seed=" + kSeed}));
  ASSERT_TRUE(case_runs());
  const ProgramResult second = sweep(folder, kLongSweep, {"iters=1"});
  EXPECT_EQ(second.exit_code, 3);
  EXPECT_NE(second.err.find("r.jsonl: another process writes to it"), std::string::npos) << second.err;
  EXPECT_EQ(read_text(folder.path() / "r.jsonl"), "");
  kill(first.child(), SIGTERM);
  EXPECT_EQ(first.wait().exit_code, 128 + SIGTERM);
}

TEST(SweepProgram, ASignalStopsItWithItsCaseAndItGoesOnLater) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const TemporaryFolder folder;
    // An earlier result, which must survive.
    ASSERT_EQ(sweep(folder, kLongSweep, {"iters=1", "seed=" + kSeed}).exit_code, 0);
    const std::string before = read_text(folder.path() / "r.jsonl");
    Program program(sweep_arguments(folder, kLongSweep, {"seed=" + kSeed}));
    ASSERT_TRUE(case_runs());
    kill(program.child(), signal);
    const ProgramResult result = program.wait();
    EXPECT_EQ(result.exit_code, 128 + signal) << result.err;
    EXPECT_NE(result.err.find("stopped by"), std::string::npos) << result.err;
    EXPECT_NE(result.out.find("stopped with 0 of 1 cases done"), std::string::npos) << result.out;
    EXPECT_TRUE(case_is_gone());
    EXPECT_EQ(read_text(folder.path() / "r.jsonl"), before);
  }
}

TEST(SweepProgram, ATinyTimeLimitIsRecordedAndTheNextCaseRuns) {
  const TemporaryFolder folder;
  const ProgramResult result = sweep(folder, kLongSweep, {"time_limit_s=0.2", "threads=[1,2]"});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_EQ(result.last_line(), "timeout: 2");
  EXPECT_NE(result.err.find("timeout: killed after 0.2 s"), std::string::npos) << result.err;
}

TEST(SweepProgram, AMatrixBeyondTheMachineIsOutOfMemory) {
  const TemporaryFolder folder;
  const ProgramResult result = sweep(folder, kCheapSweep, {"shape=[100000000x151936]", "loss=cross_entropy", "threads=1"});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_EQ(result.last_line(), "out_of_memory: 2");
  EXPECT_NE(result.err.find("logits: needs 30387200.0 MB"), std::string::npos) << result.err;
}

TEST(SweepProgram, AMemoryLimitMakesACaseOutOfMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitized program takes terabytes of address space";
#endif
  const TemporaryFolder folder;
  const ProgramResult result =
      sweep(folder, kCheapSweep, {"shape=[5000x50000, 3x256]", "loss=cross_entropy", "threads=1", "memory_limit_mb=400"});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_NE(result.out.find("ok: 2\nout_of_memory: 2\n"), std::string::npos) << result.out << result.err;
  EXPECT_NE(result.err.find("logits: cannot allocate 500.0 MB"), std::string::npos) << result.err;
}

// Too little for the program to start would be recorded as a crash of the case.
TEST(SweepProgram, AMemoryLimitBelowTheProgramItselfIsRefusedWithTheLeastThatWorks) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitized program takes terabytes of address space";
#endif
  const TemporaryFolder folder;
  const std::vector<std::string> small = {"shape=3x256", "loss=cross_entropy", "threads=4", "vocab_block=64"};
  const auto with_limit = [&](const std::string& megabytes) {
    std::vector<std::string> sets = small;
    sets.push_back("memory_limit_mb=" + megabytes);
    return sweep(folder, kCheapSweep, sets);
  };
  const ProgramResult refused = with_limit("1");
  EXPECT_EQ(refused.exit_code, 2) << refused.err;
  const std::string expected = "memory_limit_mb: expected 0 (no limit) or at least ";
  const size_t at = refused.err.find(expected);
  ASSERT_NE(at, std::string::npos) << refused.err;
  EXPECT_EQ(refused.err.find(", got 1\n"), refused.err.size() - 8) << refused.err;
  // It starts with that, and lacks the memory for its threads.
  const ProgramResult least = with_limit(std::to_string(std::stoi(refused.err.substr(at + expected.size()))));
  EXPECT_EQ(least.exit_code, 1) << least.err;
  EXPECT_EQ(least.last_line(), "out_of_memory: 1") << least.err;
}

TEST(SweepProgram, WhatTheLibraryRefusesIsAnErrorWithItsMessage) {
  const TemporaryFolder folder;
  const ProgramResult result = sweep(folder, kCheapSweep, {"vocab_block=100", "loss=cross_entropy", "threads=1"});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_EQ(result.last_line(), "error: 2");
  EXPECT_NE(result.err.find("vocab_block"), std::string::npos) << result.err;
}

TEST(SweepProgram, AFullDeviceExitsWithThree) {
  const TemporaryFolder folder;
  const ProgramResult result = sweep(folder, kCheapSweep, {"output=/dev/full"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("No space left"), std::string::npos) << result.err;
}

TEST(SweepProgram, AConfigThatIsWrongOrMissingIsRefused) {
  const TemporaryFolder folder;
  EXPECT_EQ(sweep(folder, "loss: cross_entropy\n").exit_code, 2);
  EXPECT_EQ(Program({"sweep", "--config", (folder.path() / "none.yaml").string()}).wait().exit_code, 3);
  EXPECT_EQ(Program({"sweep"}).wait().exit_code, 2);
}

}  // namespace
}  // namespace tileloss::tools
