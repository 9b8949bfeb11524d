// What gradcheck and judge print alike.
#ifndef TILELOSS_CLI_CHECK_TABLES_H_
#define TILELOSS_CLI_CHECK_TABLES_H_

#include <string>
#include <vector>

#include "check/gradcheck_config.h"
#include "check/gradcheck_report.h"
#include "check/gradcheck_run.h"
#include "check/judge/error_metric.h"
#include "support/json.h"

namespace tileloss::tools {

// The config, the function, the shape, where the inputs come from, the options.
void print_case(const char* tool, const GradcheckConfig& config, const CheckInputs& inputs);
void print_metrics(const Json& metrics);
void print_gates(const std::vector<Gate>& gates);
void print_mutants(const GradcheckReport& report, bool is_linear);
// The last line: PASS, or FAIL and what failed. Returns the exit code.
int print_verdict(const std::vector<std::string>& failed);

}  // namespace tileloss::tools

#endif  // TILELOSS_CLI_CHECK_TABLES_H_
