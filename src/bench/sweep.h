// The loop of `tileloss sweep`.
#ifndef TILELOSS_BENCH_SWEEP_H_
#define TILELOSS_BENCH_SWEEP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "bench/sweep_config.h"

namespace tileloss::tools {

// A case that cannot even start would be recorded as a crash: the loader's, not the case's. It starts as this process did, and
// has room for that where there is room for this process, which has `own_bytes` of address space. Throws ToolError (usage).
void check_memory_limit(const ChildLimits& limits, int64_t own_bytes);

// Runs every case that the results file lacks, each as `case_command` with the case's text as one more argument, and prints the
// report. Returns an exit code: a failed check if any case of the config is not ok.
int run_sweep(const SweepConfig& config, const std::vector<std::string>& case_command);

}  // namespace tileloss::tools

#endif  // TILELOSS_BENCH_SWEEP_H_
