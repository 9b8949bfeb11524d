// What a sweep says at its end.
#ifndef TILELOSS_BENCH_SWEEP_REPORT_H_
#define TILELOSS_BENCH_SWEEP_REPORT_H_

#include <string>
#include <vector>

#include "support/json.h"

namespace tileloss::tools {

// For each loss, shape, dtype and pass a table with a bar chart of the medians, and the best case by name; then, for each
// parameter that was varied, how much it matters. `lines`: a result of each case.
std::string sweep_report(const std::vector<Json>& lines);

// "12.34 ms", or the status and what is known of it.
std::string describe_result(const Json& result);

}  // namespace tileloss::tools

#endif  // TILELOSS_BENCH_SWEEP_REPORT_H_
