// A run of the bench: the passes, between two measurements of the machine's roofs.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "roofs/bench_run.h"

namespace tileloss::tools {

struct BenchReport {
  Roofs roofs;
  std::optional<double> roofs_difference;  // between start and end; nothing if the end was not reached
  std::string roofs_description;
  std::vector<Timing> timings;
  std::function<void()> measured = [] {};  // called after each of them
};

// Fills `report` as it goes.
void time_passes(Bench& bench, const std::vector<tileloss_pass>& passes, bool kernel, bool reference, BenchReport& report);

// A pass as a line of `tileloss bench --json`.
Json to_json(const BenchSettings& settings, const Bench& bench, const BenchReport& report, const Timing& timing);

}  // namespace tileloss::tools
