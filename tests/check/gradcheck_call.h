// A gradcheck of one of the repository's configs, small, with changes to it and perhaps another kernel.
#ifndef TILELOSS_TESTS_CHECK_GRADCHECK_CALL_H_
#define TILELOSS_TESTS_CHECK_GRADCHECK_CALL_H_

#include <string>
#include <utility>
#include <vector>

#include "check/gradcheck_judge.h"

namespace tileloss::tools {

struct GradcheckCall {
  GradcheckCall(const std::string& config_path, std::vector<std::string> sets, const KernelCall& kernel = call)
      : config(with_sets(config_path, std::move(sets))),
        inputs(make_inputs(config, team)),
        results(run_kernels(config, inputs, kernel)),
        verdict(judge(config, inputs, results, team)) {}

  std::vector<std::string> failures() const {
    std::vector<std::string> names;
    for (const Gate& gate : verdict.gates) {
      if (!gate.pass) names.push_back(gate.name);
    }
    return names;
  }

  static GradcheckConfig with_sets(const std::string& config_path, std::vector<std::string> sets) {
    sets.insert(sets.begin(), {"vocab_size=255", "seq_len=21"});
    return read_gradcheck_config(config_path, sets);
  }

  ThreadTeam team{1};
  GradcheckConfig config;
  CheckInputs inputs;
  KernelResults results;
  Verdict verdict;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_TESTS_CHECK_GRADCHECK_CALL_H_
