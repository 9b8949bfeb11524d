// What the tests of gradcheck --strict share: a small check, kernels with something planted, and how findings are looked up.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "judge/gradcheck_run.h"
#include "judge/strict/guarded_args.h"
#include "tests/api/calls.h"
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

// Overruns each tensor of a call by one element, and expects the report to say so. The names go to `overrun`.
inline void overrun_tensors(const Function& function, tileloss_pass pass, tileloss_args args, std::set<std::string>& overrun) {
  const tileloss_plan plan = make_plan(function, pass, args, {});
  const tileloss_args given = args;
  for_each_tensor(args, pass, [&](const TensorView& tensor) {
    const std::string name = tensor.name;
    const auto read_past = [&](const Function&, tileloss_pass, tileloss_args guarded, const tileloss_plan&, const tileloss_run*) {
      for_each_tensor(guarded, pass, [&](const TensorView& view) {
        const int64_t elements = (view.rows - 1) * view.stride + view.cols;
        if (view.name == name) read_at<char>(view.data, elements * static_cast<int64_t>(view.element));
      });
    };
    StrictReport report;
    call_strictly(function, pass, given, plan, read_past, report);
    const std::string line = tensor.is_transposed ? "column " : "row ";
    const std::string unit = tensor.element == 1 ? "1 byte" : "1 element";
    const std::string where = (tensor.is_matrix ? line + std::to_string(tensor.rows - 1) + ", " : "") + unit;
    ASSERT_FALSE(report.findings.empty()) << name;
    EXPECT_TRUE(report.findings.front().starts_with(name + " overrun: " + where + " past the end")) << report.text();
    overrun.insert(name);
  });
}

// The same for all calls of a check, whose row state has every array. An ordinary call overruns nothing.
inline std::set<std::string> overrun_every_tensor(const std::string& text, const Sets& sets = {}) {
  const GradcheckConfig config = config_of(text, sets);
  ThreadTeam team(1);
  const CheckInputs inputs = make_inputs(config, team);
  EXPECT_EQ(check_strict(config, inputs, team, call).findings, Sets());
  test::RowStateArrays state(inputs.rows, inputs.labels_per_row);
  std::set<std::string> overrun;
  const auto kernel = [&](const Function& function, tileloss_pass pass, tileloss_args args, const tileloss_plan&,
                          const tileloss_run*) {
    if (function.has_row_state()) args.row_state = &state.get();
    call(function, pass, args, make_plan(function, pass, args, {}));
    overrun_tensors(function, pass, args, overrun);
    if (pass != TILELOSS_FORWARD || !function.has_row_state() || config.is_linear()) return;
    Function of_state = function;
    of_state.set_integer("vocab_total", inputs.cols);
    args.logits = {};
    overrun_tensors(of_state, TILELOSS_FROM_ROW_STATE, args, overrun);
  };
  run_kernels(config, inputs, kernel);
  return overrun;
}

}  // namespace tileloss::tools
