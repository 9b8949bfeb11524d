// A bench in this process: what it says of each pass, or why it refuses.
#ifndef TILELOSS_TESTS_BENCH_BENCH_CALL_H_
#define TILELOSS_TESTS_BENCH_BENCH_CALL_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/bench_report.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {

// `text` and `sets`: as config_tree() takes them. One line a pass.
inline std::vector<Json> bench_lines(const std::string& text, const Sets& sets = {}) {
  const BenchRequest asked = read_bench_request(config_tree(text, sets));
  Bench bench(asked.settings);
  for (const tileloss_pass pass : asked.passes) bench.check_pass(pass, asked.reference);
  BenchReport report;
  time_passes(bench, asked.passes, asked.kernel, asked.reference, report);
  std::vector<Json> lines;
  for (const Timing& timing : report.timings) lines.push_back(to_json(asked.settings, bench, report, timing));
  return lines;
}

inline std::string bench_refusal(const std::string& text, const Sets& sets = {}) {
  return refusal_of({}, [&] { bench_lines(text, sets); });
}

inline double number(const Json& line, const char* key) { return line.at(key).get<double>(); }

// Figures that every pass has.
inline void expect_figures(const Json& line) {
  for (const char* key : {"loss", "pass", "dtype", "isa", "impl", "schedule"}) EXPECT_TRUE(line.at(key).is_string()) << key;
  EXPECT_TRUE(line.contains("hidden"));
  for (const char* key : {"tokens", "vocab", "threads", "first_call_s", "median_ms", "min_ms", "mean_ms", "mem_after_alloc",
                          "mem_peak", "gb_per_s", "in_place_ms", "copy_ms", "read_ms", "exp_ms", "roof_ms", "ratio_to_roof"}) {
    ASSERT_TRUE(line.contains(key) && line[key].is_number()) << key;
    EXPECT_GT(number(line, key), 0) << key;
  }
  EXPECT_LE(number(line, "min_ms"), number(line, "median_ms"));
  EXPECT_GE(number(line, "mem_peak"), number(line, "mem_after_alloc"));
  EXPECT_NEAR(number(line, "ratio_to_roof"), number(line, "median_ms") / number(line, "roof_ms"), 1e-9);
}

}  // namespace tileloss::tools

#endif  // TILELOSS_TESTS_BENCH_BENCH_CALL_H_
