// What the tests of the sweep share: a cheap config, and a look at the processes and results it leaves.
#ifndef TILELOSS_TESTS_BENCH_SWEEP_SUPPORT_H_
#define TILELOSS_TESTS_BENCH_SWEEP_SUPPORT_H_

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "support/result_writer.h"
#include "tests/shared/temporary_folder.h"

namespace tileloss::test {

// 24 cases of some milliseconds.
inline constexpr const char* kCheapSweep =
    "loss: [cross_entropy, logprobs]\n"
    "shape: [3x256, 5x512]\n"
    "dtype: bf16\n"
    "threads: [1, 2, 3]\n"
    "vocab_block: [64, 128]\n"
    "iters: 1\nwarmup: 0\ntime_limit_s: 60\noutput: r.jsonl\n";
inline constexpr size_t kCheapCases = 24;

// One case that a test does not see the end of: about a minute, so that a failed test leaves nothing behind for long.
inline constexpr const char* kLongSweep =
    "loss: cross_entropy\nshape: 256x32000\ndtype: bf16\niters: 50000\nwarmup: 0\ntime_limit_s: 3600\noutput: r.jsonl\n";

// How often each case has a result in the file, by the case's text.
inline std::map<std::string, int> results_by_case(const std::filesystem::path& file) {
  std::map<std::string, int> count;
  for (const auto& line : tools::read_results(file).lines) ++count[line.at("case").dump()];
  return count;
}

// Processes that run and have `text` in their arguments. Zombies have none.
inline int processes_with_argument(const std::string& text) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream in(entry.path() / "cmdline", std::ios::binary);
    const std::string arguments{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    count += arguments.find(text) != std::string::npos ? 1 : 0;
  }
  return count;
}

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_BENCH_SWEEP_SUPPORT_H_
