// The loop of `tileloss sweep`.
#ifndef TILELOSS_BENCH_SWEEP_H_
#define TILELOSS_BENCH_SWEEP_H_

#include <string>
#include <vector>

#include "bench/sweep_config.h"

namespace tileloss::tools {

// Runs every case that the results file lacks, each as `case_command` with the case's text as one more argument, and prints the
// report. Returns an exit code: a failed check if any case of the config is not ok.
int run_sweep(const SweepConfig& config, const std::vector<std::string>& case_command);

}  // namespace tileloss::tools

#endif  // TILELOSS_BENCH_SWEEP_H_
