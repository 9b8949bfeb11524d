// Calls that are large enough to be split among threads, for the suites of the pool and of executors.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "tests/api/calls.h"

namespace tileloss::test {

inline LogitsCaseSpec large_spec(std::uint64_t seed = 1) {
  return {.rows = 64,
          .vocab = 3000,
          .format = oracle::NumberFormat::kBfloat16,
          .seed = seed,
          .ignore_prob = 0.1,
          .extra_outputs = true};
}

inline tileloss_plan_options with_threads(int threads) {
  tileloss_plan_options hints = plan_options();
  hints.cpu.threads = threads;
  hints.cpu.row_block = 2;
  return hints;
}

inline std::vector<unsigned char> single_threaded_outputs(const LogitsCaseSpec& spec) {
  LogitsCase c(spec);
  EXPECT_TRUE(runs_value_and_grad(c, cross_entropy_options(), with_threads(1)));
  return outputs_of(c.args());
}

}  // namespace tileloss::test
