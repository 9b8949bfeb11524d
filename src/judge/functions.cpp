// The functions of the library that a check knows.
#include <algorithm>

#include "judge/inputs/policy.h"
#include "judge/inputs/targets.h"
#include "support/exit_codes.h"
#include "support/format.h"

namespace tileloss::tools {
namespace {

constexpr OwnInputs kLabels{};

constexpr CheckedFunction kFunctions[] = {
    {"cross_entropy", &kLabels, make_cross_entropy},
    {"logprobs", &kSeveralLabels, make_logprobs, wrong_logprobs},
    {"policy_loss", &kPolicyInputs, make_policy_loss, wrong_policy_losses},
    {"distillation", &kTeacherInputs, make_distillation, wrong_distillations},
    {"soft_cross_entropy", &kProbabilityInputs, make_soft_cross_entropy, wrong_soft_cross_entropies},
    {"sparse_distillation", &kColumnInputs, make_sparse_distillation, wrong_sparse_distillations},
};

}  // namespace

std::vector<std::string> checked_losses() {
  std::vector<std::string> names;
  for (const CheckedFunction& function : kFunctions) names.emplace_back(function.loss);
  return names;
}

const CheckedFunction& checked_function(std::string_view loss) {
  const auto* found = std::find_if(std::begin(kFunctions), std::end(kFunctions),
                                   [&](const CheckedFunction& function) { return function.loss == loss; });
  if (found == std::end(kFunctions)) throw ToolError(kExitUsage, formatted("there is no oracle for {}", loss));
  return *found;
}

}  // namespace tileloss::tools
