// The oracle beside the kernels: row by row, on all threads, never more than a row of doubles each; with the LM head some rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "judge/gates/linear_metric.h"
#include "judge/gates/rows.h"
#include "judge/inputs/call.h"
#include "judge/inputs/config.h"
#include "judge/inputs/inputs.h"
#include "support/thread_team.h"

namespace tileloss::tools {

struct Verdict {
  explicit Verdict(Checks row_checks) : checks(std::move(row_checks)) {}

  Checks checks;
  std::shared_ptr<LinearOracleCase> linear;  // with the LM head: what its gradients were compared with
  bool has_loss = false;
  double loss_ref = 0;  // with reduction none: the sum over the rows, as loss_kernel
  double loss_kernel = 0;
  double loss_magnitude = 0;
  double seconds = 0;
  struct Metric {
    std::string name;
    double kernel = 0;
    double reference = 0;
  };
  std::vector<Metric> metrics;                              // the loss's own
  double margin = std::numeric_limits<double>::infinity();  // see PolicyOracle
  std::vector<Gate> gates;

  bool passes() const { return std::ranges::all_of(gates, &Gate::pass); }
};

Verdict judge(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results, ThreadTeam& team);

// The scalar loss, by the metric's budget and by the config's own limit. A loss per row is judged with the rows.
std::vector<Gate> loss_gates(const GradcheckConfig& config, const std::string& name, double loss, const Verdict& verdict);

struct MutantVerdict {
  std::string name;
  bool planted = false;  // it changed at least one bit
  std::vector<std::string> caught_by;
};

// Rows that the mutants are planted in: the first used ones.
constexpr int64_t kMutantRows = 64;
std::vector<int64_t> first_used_rows(const CheckInputs& inputs);

// Each applicable mutant of the kernel's outputs, compared with the same gates; with the LM head of its gradients.
std::vector<MutantVerdict> judge_mutants(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results,
                                         const Verdict& verdict, ThreadTeam& team);
std::vector<MutantVerdict> judge_linear_mutants(const GradcheckConfig& config, const CheckInputs& inputs,
                                                const KernelResults& results, const Verdict& verdict, ThreadTeam& team);

}  // namespace tileloss::tools
