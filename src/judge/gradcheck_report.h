// All that a check found, and how it is told: as figures, as what failed, as a line of a results file.
#pragma once

#include <string>
#include <vector>

#include "judge/gates/judge.h"
#include "judge/strict/strict.h"
#include "support/json.h"

namespace tileloss::tools {

struct GradcheckReport {
  Verdict verdict;
  std::vector<MutantVerdict> mutants;  // if the config asks for them, and all gates pass: one that fails already catches nothing
  StrictReport strict;                 // likewise
};

GradcheckReport judge_all(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results,
                          ThreadTeam& team);

// The gates that did not pass, the mutants that nothing caught, "strict"; empty: the check passed.
std::vector<std::string> failures(const GradcheckConfig& config, const GradcheckReport& report);

// The figures: of the losses, the outputs and the gradients, the times, the shape.
Json metrics_json(const CheckInputs& inputs, const Verdict& verdict);

// A line of the results file, but for what was found: the tool and the case.
Json case_json(const char* tool, const GradcheckConfig& config, const CheckInputs& inputs);
// What was found: `metrics`, gates, mutants, strict, pass.
void add_findings(const GradcheckConfig& config, const GradcheckReport& report, const Json& metrics, Json& line);

}  // namespace tileloss::tools
