// A gradcheck in this process, perhaps of another kernel; and what is expected of it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "judge/gates/judge.h"
#include "judge/gradcheck_report.h"
#include "judge/gradcheck_run.h"
#include "judge/inputs/case_files.h"
#include "support/exit_codes.h"
#include "tests/shared/configs.h"

namespace tileloss::tools {

// A divergence; of those that have no beta without the config's.
inline Sets of_divergence(const std::string& name) {
  const bool has_beta = name == "jsd" || name.starts_with("skew");
  return has_beta ? Sets{"divergence=" + name} : Sets{"divergence=" + name, "beta=0.5"};
}

struct GradcheckCall {
  // As config_of() takes it.
  explicit GradcheckCall(const std::string& text, const Sets& sets = {}, const KernelCall& kernel = call)
      : GradcheckCall(config_of(text, sets), kernel) {}
  explicit GradcheckCall(GradcheckConfig given, const KernelCall& kernel = call)
      : config((given.device.use(), std::move(given))),
        inputs(make_inputs(config, team)),
        results(run_kernels(config, inputs, kernel)),
        verdict(judge(config, inputs, results, team)) {}

  // The gates that do not pass.
  Sets failures() const {
    Sets names;
    for (const Gate& gate : verdict.gates) {
      if (!gate.pass) names.push_back(gate.name);
    }
    return names;
  }

  const Gate& gate(const std::string& name) const {
    const auto found = std::ranges::find(verdict.gates, name, &Gate::name);
    if (found != verdict.gates.end()) return *found;
    ADD_FAILURE() << "no gate " << name;
    static const Gate none;
    return none;
  }

  Json metrics() const { return metrics_json(inputs, verdict); }

  // Every mutant for which there is room; gradcheck passes, so one is planted, and each that is is caught.
  std::vector<MutantVerdict> all_mutants() const {
    GradcheckConfig asked = config;
    asked.mutants = true;
    ThreadTeam two(2);
    const GradcheckReport report{verdict, judge_mutants(asked, inputs, results, verdict, two), {}};
    EXPECT_EQ(tools::failures(asked, report), Sets());
    return report.mutants;
  }

  // Those that are planted.
  std::vector<MutantVerdict> mutants() const {
    std::vector<MutantVerdict> planted = all_mutants();
    std::erase_if(planted, [](const MutantVerdict& mutant) { return !mutant.planted; });
    return planted;
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

// Of what mutants() gives: whether this one is among them, and a gate whose name has the part caught it.
inline bool is_caught(const std::vector<MutantVerdict>& mutants, const std::string& name, const std::string& part = "") {
  const auto found = std::ranges::find(mutants, name, &MutantVerdict::name);
  return found != mutants.end() && has_part(found->caught_by, part);
}

// Those `of_gradient` are planted, and caught by a gate of dlogits, those `of_values` by others alone.
inline void expect_mutants(const GradcheckCall& check, const std::set<std::string>& of_gradient,
                           const std::set<std::string>& of_values) {
  const std::vector<MutantVerdict> mutants = check.mutants();
  for (const std::string& name : of_gradient) EXPECT_TRUE(is_caught(mutants, name, "/dlogits/")) << name;
  for (const std::string& name : of_values)
    EXPECT_TRUE(is_caught(mutants, name) && !is_caught(mutants, name, "/dlogits/")) << name;
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

// What `action` is refused with: "2: c.yaml: seed: expected an integer"; "" if it is not. A library's error has the place of the
// config's key.
template <class Action>
std::string refusal_of(const std::optional<GradcheckConfig>& config, const Action& action) {
  try {
    action();
    return "";
  } catch (const LibraryError& error) {
    const ToolError told = config ? config->located(error) : ToolError(error);
    return std::to_string(told.code()) + ": " + told.what();
  } catch (const ToolError& error) {
    return std::to_string(error.code()) + ": " + error.what();
  }
}

inline std::string refusal(const std::string& text, const Sets& sets = {}, const std::vector<TensorFile>& files = {}) {
  std::optional<GradcheckConfig> config;
  return refusal_of(config, [&] {
    config = config_of(text, sets, files);
    GradcheckCall{*config};
  });
}

// A wrong config (2) in whose message this stands.
inline testing::AssertionResult is_refused(const std::string& refusal, const std::string& message) {
  if (refusal.starts_with("2: ") && refusal.find(message) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << message << " is not in " << refusal;
}

inline void expect_config_errors(const std::string& text, const std::vector<std::pair<Sets, std::string>>& errors) {
  for (const auto& [sets, message] : errors) EXPECT_TRUE(is_refused(refusal(text, sets), message));
}

// Of a tensor of the inputs as another implementation gets them.
inline std::vector<int64_t> drawn_shape(const std::string& text, const Sets& sets, const std::string& name) {
  GradcheckConfig config = config_of(text, sets);
  forget_kernels(config);
  ThreadTeam team(1);
  const CheckInputs inputs = make_inputs(config, team);
  return TensorFile("inputs", input_tensors(config, inputs)).tensor(name).shape;
}

inline const Sets kDivergences = {"forward_kl",      "reverse_kl",     "jsd", "jeffreys", "skew_forward_kl",
                                  "skew_reverse_kl", "total_variation"};

}  // namespace tileloss::tools
