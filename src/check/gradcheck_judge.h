// The oracle beside the kernels: row by row, on all threads, never more than a row of doubles each.
#ifndef TILELOSS_CHECK_GRADCHECK_JUDGE_H_
#define TILELOSS_CHECK_GRADCHECK_JUDGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "check/error_metric.h"
#include "check/gradcheck_config.h"
#include "check/gradcheck_run.h"
#include "check/row_outputs.h"
#include "support/thread_team.h"

namespace tileloss::tools {

// Everything that is compared for each row.
struct Checks {
  // `dlogits`: the formats of the gradients, as KernelResults::gradients.
  explicit Checks(const std::vector<reference::NumberFormat>& dlogits) : gradients(dlogits.begin(), dlogits.end()) {}
  void merge(const Checks& other);

  std::vector<GradientMetric> gradients;  // as KernelResults::gradients
  OutputMetric per_loss{"per_loss"};
  std::vector<RowOutputMetric> outputs{checked_outputs().begin(), checked_outputs().end()};
  ExactMetric fused_logp_bits{"value_and_grad/logp_same_bits"};
  int64_t rows = 0;            // not ignored
  int64_t nonfinite_rows = 0;  // of them, those whose gradient the oracle has as NaN or infinite at the label
};

struct Verdict {
  explicit Verdict(const std::vector<reference::NumberFormat>& dlogits) : checks(dlogits) {}

  Checks checks;
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
  double margin = std::numeric_limits<double>::infinity();  // see PolicyOracleCase
  std::vector<Gate> gates;
};

// Throws ToolError (usage) for a loss that the oracle does not know.
Verdict judge(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results, ThreadTeam& team);

struct MutantVerdict {
  std::string name;
  bool planted = false;  // it changed at least one bit
  std::vector<std::string> caught_by;
};

// Rows that the mutants are planted in: the first used ones.
constexpr int64_t kMutantRows = 64;
std::vector<int64_t> first_used_rows(const CheckInputs& inputs);

// Each applicable mutant of the kernel's outputs, held against the same gates.
std::vector<MutantVerdict> judge_mutants(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results,
                                         const Verdict& verdict, ThreadTeam& team);

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_GRADCHECK_JUDGE_H_
