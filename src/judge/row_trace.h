// One row at every stage, kernel beside oracle: why is this row's gradient wrong? The first stage that does not pass is where it
// goes wrong.
//
//   state          the forward's row state (tileloss_row_state), as far as the outputs asked for need it
//   statistics     logp, lse and the other row outputs, the label's p, and 1 - p as it follows from the state
//   term           what the loss is made of; then the loss itself
//   coefficient    of the gradient: dL/dz_j = target [j = y] + p_j (prob + prob_logp log p_j) + uniform u_j
//   dlogits        at the label, at the worst column or at one that was named, and the gates over the row; with the LM head
//   dhidden
//
// The kernel's side is what the C ABI gives out: terms and coefficients, and with the LM head dlogits, are the oracle's alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "judge/inputs/call.h"
#include "judge/inputs/config.h"
#include "support/json.h"

namespace tileloss::tools {

struct Stage {
  std::string name;
  std::int64_t column = -1;  // of the vocabulary, or of dhidden; -1: of the row as a whole
  // Absent: cannot be had, or is not judged. A gate over the row has its value for a difference.
  std::optional<double> kernel, oracle, difference, allowed;
  bool pass = true;
};

struct RowTrace {
  std::int64_t row = 0;
  std::int64_t label = 0;
  std::string ignored;  // why it is; empty: it is not. All its outputs are then 0 (argmax -1)
  std::vector<Stage> stages;

  std::vector<std::string> failures() const;  // by name, in order
  Json to_json() const;
};

// Throws ToolError (usage) for a row or column that the inputs do not have.
void check_trace_range(const CheckInputs& inputs, std::int64_t row, std::optional<std::int64_t> column);

RowTrace trace_row(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results, std::int64_t row,
                   std::optional<std::int64_t> column);

}  // namespace tileloss::tools
