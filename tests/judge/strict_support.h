// What the tests of gradcheck --strict share: a small check, kernels with something planted, and how findings are looked up.
#ifndef TILELOSS_TESTS_CHECK_STRICT_SUPPORT_H_
#define TILELOSS_TESTS_CHECK_STRICT_SUPPORT_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "judge/gradcheck_run.h"
#include "judge/strict/guarded_args.h"
#include "tests/shared/configs.h"

namespace tileloss::tools {

// 8 rows; bfloat16.
inline constexpr const char* kConfig =
    "loss=cross_entropy batch_size=2 seq_len=4 vocab_size=1000 dtype=bf16 seed=3 ignore_prob=0.2 source.std=2 "
    "outputs=[logp, lse, entropy, argmax, correct]";

inline StrictReport strict_report(const Sets& sets, const KernelCall& kernel = call, const std::string& text = kConfig) {
  const GradcheckConfig config = config_of(text, sets);
  ThreadTeam team(1);
  const CheckInputs inputs = make_inputs(config, team);
  return check_strict(config, inputs, team, kernel);
}

inline testing::AssertionResult finds(const StrictReport& report, const std::string& finding) {
  const auto begins = [&](const std::string& found) { return found.starts_with(finding + ", "); };
  if (std::any_of(report.findings.begin(), report.findings.end(), begins)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "not found: " << finding << "\n" << report.text();
}

inline std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const std::string& name : isa_names()) {
    if (name != "auto" && tileloss_isa_supported(KernelHints{.isa = name}.plan_options().cpu.isa) != 0) names.push_back(name);
  }
  return names;
}

// Calls the shipped kernel and then does one thing more, in one pass.
template <class Plant>
KernelCall planted(tileloss_pass where, const Plant& plant) {
  return [where, plant](const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
                        const tileloss_run* run) {
    call(function, pass, args, plan, run);
    if (pass == where) plant(args, *run);
  };
}

template <class T>
T read_at(const void* data, int64_t index) {
  return static_cast<const volatile T*>(data)[index];
}

template <class T>
void write_at(void* data, int64_t index) {
  static_cast<volatile T*>(data)[index] = T{1};
}

}  // namespace tileloss::tools

#endif  // TILELOSS_TESTS_CHECK_STRICT_SUPPORT_H_
