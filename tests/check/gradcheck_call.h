// A gradcheck of one of the repository's configs, small, with changes to it and perhaps another kernel; and what is expected of
// it.
#ifndef TILELOSS_TESTS_CHECK_GRADCHECK_CALL_H_
#define TILELOSS_TESTS_CHECK_GRADCHECK_CALL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check/gradcheck_config.h"
#include "check/gradcheck_run.h"
#include "check/judge/judge.h"
#include "tests/shared/program.h"

namespace tileloss::tools {

using Sets = std::vector<std::string>;

inline Sets joined(Sets sets, const Sets& more) {
  sets.insert(sets.end(), more.begin(), more.end());
  return sets;
}

// A divergence; of those that have no beta without the config's.
inline Sets of_divergence(const std::string& name) {
  const bool has_beta = name == "jsd" || name.starts_with("skew");
  return has_beta ? Sets{"divergence=" + name} : Sets{"divergence=" + name, "beta=0.5"};
}

struct GradcheckCall {
  // `config_name`: in configs/.
  explicit GradcheckCall(const std::string& config_name, const Sets& sets = {}, const KernelCall& kernel = call)
      : config(read_gradcheck_config(TILELOSS_SOURCE_DIR "/configs/" + config_name, sets)),
        inputs(make_inputs(config, team)),
        results(run_kernels(config, inputs, kernel)),
        verdict(judge(config, inputs, results, team)) {}

  Sets failures() const {
    Sets names;
    for (const Gate& gate : verdict.gates) {
      if (!gate.pass) names.push_back(gate.name);
    }
    return names;
  }

  std::vector<MutantVerdict> mutants() const {
    ThreadTeam two(2);
    return judge_mutants(config, inputs, results, verdict, two);
  }

  ThreadTeam team{1};
  GradcheckConfig config;
  CheckInputs inputs;
  KernelResults results;
  Verdict verdict;
};

inline bool has_part(const Sets& gates, const std::string& part) {
  return std::any_of(gates.begin(), gates.end(), [&](const std::string& gate) { return gate.find(part) != std::string::npos; });
}

// Every mutant that is planted is caught; those `of_gradient`, which must be planted, by a gate of dlogits, those `of_values` by
// others alone.
inline void expect_mutants(const GradcheckCall& check, std::set<std::string> of_gradient, std::set<std::string> of_values) {
  ASSERT_EQ(check.failures(), Sets());
  for (const MutantVerdict& mutant : check.mutants()) {
    EXPECT_TRUE(!mutant.planted || !mutant.caught_by.empty()) << mutant.name;
    const bool is_of_gradient = has_part(mutant.caught_by, "/dlogits/");
    if (of_gradient.erase(mutant.name) > 0) {
      EXPECT_TRUE(mutant.planted && is_of_gradient) << mutant.name;
    }
    if (of_values.erase(mutant.name) > 0) {
      EXPECT_TRUE(mutant.planted && !is_of_gradient) << mutant.name;
    }
  }
  EXPECT_TRUE(of_gradient.empty() && of_values.empty())
      << testing::PrintToString(of_gradient) << testing::PrintToString(of_values);
}

// The shipped kernel, called with something else than the config says.
template <class Change>
KernelCall changed(const Change& change) {
  return [change](const Function& given, tileloss_pass pass, const tileloss_args& given_args, const tileloss_plan&,
                  const tileloss_run* run) {
    Function function = given;
    tileloss_args args = given_args;
    change(function, args);
    call(function, pass, args, make_plan(function, pass, args, {}), run);
  };
}

using Change = void (*)(Function& function, tileloss_args& args);

// Each change makes gates of all these parts fail; without one none does.
inline void expect_rejected(const std::string& config_name, const Sets& sets,
                            const std::vector<std::pair<const char*, Change>>& changes, const Sets& parts) {
  for (const auto& [name, change] : changes) {
    const Sets failed = GradcheckCall(config_name, sets, changed(change)).failures();
    EXPECT_GE(failed.size(), 4U) << name << testing::PrintToString(failed);
    for (const std::string& part : parts) EXPECT_TRUE(has_part(failed, part)) << name << " " << part;
  }
  EXPECT_EQ(GradcheckCall(config_name, sets).failures(), Sets());
}

// The program refuses each with a message that has this part.
inline void expect_config_errors(const std::string& config_name, const std::vector<std::pair<Sets, std::string>>& errors) {
  for (const auto& [sets, message] : errors) {
    Sets arguments = {"gradcheck", "--config", TILELOSS_SOURCE_DIR "/configs/" + config_name};
    for (const std::string& set : sets) arguments.insert(arguments.end(), {"--set", set});
    const test::ProgramResult result = test::run_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(sets) << result.out;
    EXPECT_NE(result.err.find(message), std::string::npos) << testing::PrintToString(sets) << ": " << result.err;
  }
}

inline const Sets kDivergences = {"forward_kl",      "reverse_kl",     "jsd", "jeffreys", "skew_forward_kl",
                                  "skew_reverse_kl", "total_variation"};

}  // namespace tileloss::tools

#endif  // TILELOSS_TESTS_CHECK_GRADCHECK_CALL_H_
