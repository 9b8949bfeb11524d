// Files that are pipes, names that are no names, disks that are full: what the program says and does from outside.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>

#include "support/descriptor.h"
#include "support/safetensors.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::Program;
using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;

constexpr const char* kSmall = "loss: cross_entropy\nbatch_size: 1\nseq_len: 4\nvocab_size: 64\ndtype: fp32\n";

std::string make_pipe(const TemporaryFolder& folder) {
  const std::string path = (folder.path() / "pipe").string();
  if (mkfifo(path.c_str(), 0600) != 0) throw std::runtime_error("no pipe");
  return path;
}

std::vector<std::string> gradcheck(const std::string& config, const std::vector<std::string>& sets = {}) {
  std::vector<std::string> arguments = {"gradcheck", "--config", config};
  for (const std::string& set : sets) arguments.insert(arguments.end(), {"--set", set});
  return arguments;
}

void expect_error(const ProgramResult& result, int code, const std::string& text) {
  EXPECT_EQ(result.exit_code, code) << result.out << result.err;
  EXPECT_NE(result.err.find(text), std::string::npos) << text << "\n" << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_LT(result.err.size(), 2000U);
  for (const char c : result.err) EXPECT_TRUE(c == '\n' || static_cast<unsigned char>(c) >= 0x20) << static_cast<int>(c);
}

TEST(OddFiles, TheFirstSignalEndsTheWaitForAConfigThatNobodyWrites) {
  for (const int signal : {SIGINT, SIGTERM}) {
    for (const bool has_writer : {false, true}) {
      const TemporaryFolder folder;
      const std::string path = make_pipe(folder);
      const Descriptor writer(has_writer ? open(path.c_str(), O_RDWR | O_CLOEXEC) : -1);
      Program program(gradcheck(path));
      usleep(300'000);
      ASSERT_EQ(kill(program.child(), signal), 0);
      EXPECT_EQ(program.wait().exit_code, 128 + signal) << has_writer;
    }
  }
}

TEST(OddFiles, AConfigThatIsWrittenLateAndInPiecesIsRead) {
  const TemporaryFolder folder;
  const std::string path = make_pipe(folder);
  Program program(gradcheck(path));
  usleep(100'000);
  Descriptor writer(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  const std::string text = kSmall;
  for (const std::string& piece : {text.substr(0, 20), text.substr(20)}) {
    usleep(50'000);
    ASSERT_EQ(write(writer.get(), piece.data(), piece.size()), std::ssize(piece));
  }
  writer.reset();
  const ProgramResult result = program.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST(OddFiles, APipeIsNoSafetensorsFile) {
  const TemporaryFolder folder;
  const std::string path = make_pipe(folder);
  const auto config = folder.write("c.yaml", "loss: cross_entropy\nsource: {kind: safetensors, path: pipe}\n").string();
  expect_error(run_program(gradcheck(config)), 3, path + ": expected a regular file, got a pipe");
}

TEST(OddFiles, AnOutputThatNobodyReadsIsRefused) {
  const TemporaryFolder folder;
  const std::string path = make_pipe(folder);
  const auto config = folder.write("c.yaml", kSmall).string();
  expect_error(run_program(gradcheck(config, {"output=" + path})), 3, path + ": a pipe that no process reads");
  // With a reader it takes the line.
  const Descriptor reader(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  EXPECT_EQ(run_program(gradcheck(config, {"output=" + path})).exit_code, 0);
  char start[9] = {};
  EXPECT_EQ(read(reader.get(), start, 8), 8);
  EXPECT_STREQ(start, "{\"tool\":");
}

TEST(OddFiles, TheFirstSignalEndsTheWaitForRoomInAPipe) {
  const TemporaryFolder folder;
  const std::string path = make_pipe(folder);
  const Descriptor reader(open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  const std::string bytes(4096, 'x');
  while (write(reader.get(), bytes.data(), bytes.size()) > 0) {
  }
  Program program(gradcheck(folder.write("c.yaml", kSmall).string(), {"output=" + path}));
  usleep(1'000'000);
  EXPECT_EQ(kill(program.child(), SIGTERM), 0);
  EXPECT_EQ(program.wait().exit_code, 143);
}

// The limit counts 512 bytes; the signal that comes with it would end the process.
TEST(OddFiles, AFileSizeLimitIsReportedAndLeavesEarlierResultsIntact) {
  const TemporaryFolder folder;
  const std::string earlier = "{\"earlier\":1}\n";
  const auto output = folder.write("r.jsonl", earlier);
  const auto config = folder.write("c.yaml", std::string(kSmall) + "output: r.jsonl\n").string();
  std::vector<std::string> arguments = {"-c", "ulimit -f 1; exec \"$0\" \"$@\"", test::built("tileloss")};
  for (const std::string& argument : gradcheck(config)) arguments.push_back(argument);
  const ProgramResult result = Program(arguments, {.out = "/dev/null"}, "/bin/sh").wait();
  expect_error(result, 3, "r.jsonl: cannot write: File too large");
  EXPECT_EQ(test::read_text(output), earlier);
}

TEST(OddFiles, NamesAndPathsReachTheTerminalEscapedAndShort) {
  const TemporaryFolder folder;
  const std::string odd = "a\x1b[31m\nb";
  const std::string long_name(1 << 20, 'k');
  const float x[4] = {};
  write_safetensors(folder.path() / odd, {{odd, "F32", {2, 2}, x, sizeof x}, {long_name, "F32", {4}, x, sizeof x}});
  const std::string source =
      "loss: cross_entropy\nsource: {kind: safetensors, path: \"" + (folder.path() / "a\\x1b[31m\\nb").string() + "\", logits: ";
  const auto with = [&](const std::string& logits) {
    return run_program(gradcheck(folder.write("c.yaml", source + logits + "}\n").string()));
  };
  expect_error(with("none"), 2, "a\\x1b[31m\\nb: no tensor 'none'; there are: a\\x1b[31m\\nb, kkk");
  expect_error(with("\"a\\x1b[31m\\nb\""), 2, "no tensor 'labels'");
  expect_error(with("\"" + long_name + "\""), 2, "larger than 1 MB");
  expect_error(with("\"" + std::string(1000, 'k') + "\""), 2, "no tensor 'kkk");
  const auto config = folder.write("c.yaml", kSmall).string();
  expect_error(run_program(gradcheck(config, {"\"\x1b\"=1"})), 2, "\\x1b");
  expect_error(run_program(gradcheck(config, {"seed=" + std::string(100'000, 'x')})), 2, "seed: expected an integer");
  expect_error(run_program(gradcheck(config, {std::string(100'000, 'x') + "=1"})), 2, "unknown key");
  expect_error(run_program(gradcheck("/nonexistent/\x1b" + std::string(3000, 'x'))), 3, "/nonexistent/\\x1bxxx");
  expect_error(run_program({"bench", "--tokens", "\x1b" + std::string(100'000, 'x')}), 2, "--tokens: expected an integer");
  expect_error(run_program({"bench", "\x1b" + std::string(100'000, 'x')}), 2, "\\x1bxxx");
  // The header of a check names its config.
  const auto odd_config = folder.write("c\x1b.yaml", kSmall).string();
  const ProgramResult passed = run_program(gradcheck(odd_config));
  EXPECT_EQ(passed.exit_code, 0) << passed.err;
  EXPECT_EQ(passed.out.find('\x1b'), std::string::npos);
  EXPECT_NE(passed.out.find("c\\x1b.yaml: cross_entropy"), std::string::npos) << passed.out;
}

TEST(OddFiles, ALabelThatIsNoClassIsNamedWithItsFileAndRow) {
  const std::vector<float> logits(3 * 8, 0.5F);
  for (const auto& [label, is_fine] : {std::pair<int64_t, bool>{8, false}, {-1, false}, {7, true}, {-100, true}}) {
    const TemporaryFolder folder;
    const std::vector<int64_t> labels = {1, 2, label};
    write_safetensors(folder.path() / "x.safetensors",
                      {{"logits", "F32", {3, 8}, logits.data(), std::ssize(logits) * 4}, {"y", "I64", {3}, labels.data(), 24}});
    const auto config =
        folder.write("c.yaml", "loss: cross_entropy\nsource: {kind: safetensors, path: x.safetensors, labels: y}\n").string();
    const ProgramResult result = run_program(gradcheck(config));
    if (is_fine) {
      EXPECT_EQ(result.exit_code, 0) << result.err;
    } else {
      expect_error(result, 2, "x.safetensors: y: row 2: expected a label from 0 to 7, or -100 (ignore_index), got ");
    }
  }
}

TEST(OddFiles, WhatThePlannerRefusesIsNamedWithTheConfigsLine) {
  const TemporaryFolder folder;
  const auto config = folder.write("c.yaml", std::string(kSmall) + "kernel:\n  threads: 1\n  vocab_block: 63\n").string();
  const std::string problem = "kernel.vocab_block: expected a multiple of 64 up to ";
  expect_error(run_program(gradcheck(config)), 2, "c.yaml:8: " + problem);
  expect_error(run_program(gradcheck(config, {"kernel.vocab_block=65"})), 2, "--set kernel.vocab_block=65: " + problem);
  expect_error(run_program(gradcheck(config, {"kernel.vocab_block=64", "valid_vocab=65"})), 2,
               "--set valid_vocab=65: valid_vocab: expected <= the logits' columns = 64, got 65");
}

}  // namespace
}  // namespace tileloss::tools
