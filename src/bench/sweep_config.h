// What a sweep config says. docs and examples: docs/users/sweep.md, configs/sweep_*.yaml
#ifndef TILELOSS_BENCH_SWEEP_CONFIG_H_
#define TILELOSS_BENCH_SWEEP_CONFIG_H_

#include <filesystem>
#include <string>
#include <vector>

#include "bench/sweep_child.h"
#include "support/result_writer.h"

namespace tileloss::tools {

struct SweepConfig {
  std::string file;
  std::filesystem::path output;
  ChildLimits limits;
  std::vector<Json> cases;  // to_json(SweepCase), each once; what compares with each other stands together
};

// Throws ToolError as config.h says, of the keys that are skipped too.
SweepConfig read_sweep_config(const std::filesystem::path& file, const std::vector<std::string>& overrides,
                              const std::vector<std::string>& skipped = {});

}  // namespace tileloss::tools

#endif  // TILELOSS_BENCH_SWEEP_CONFIG_H_
