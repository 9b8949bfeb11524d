// A call of the shipped kernels where every access outside a tensor faults. It is made once for each layout of guard-page
// buffers, in a child process, so that a fault ends only that; the results must have the bits of an ordinary call.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "support/abi.h"
#include "support/json.h"

namespace tileloss::tools {

// How calls are made: tools::call, or something that watches it.
using KernelCall =
    std::function<void(const Function&, tileloss_pass, const tileloss_args&, const tileloss_plan&, const tileloss_run*)>;

struct StrictReport {
  int64_t rows = 0;  // that were looked at, of all_rows
  int64_t all_rows = 0;
  int64_t columns = 0;  // likewise
  int64_t all_columns = 0;
  int calls = 0;
  int layouts = 0;
  std::vector<std::string> findings;

  std::string text() const;  // a line for each finding, or that there is none
  Json to_json() const;
};

// By `kernel` in every layout; what is found goes to the report. If nothing is, then as usual: an overrun would damage this
// process.
void call_strictly(const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
                   const KernelCall& kernel, StrictReport& report);

}  // namespace tileloss::tools
