// The functions of the library that a check knows.
#ifndef TILELOSS_JUDGE_FUNCTIONS_H_
#define TILELOSS_JUDGE_FUNCTIONS_H_

#include <string>
#include <string_view>
#include <vector>

#include "judge/inputs/checked_function.h"

namespace tileloss::tools {

// By the names that `loss` has in a config.
std::vector<std::string> checked_losses();
// Throws ToolError (usage) for another.
const CheckedFunction& checked_function(std::string_view loss);

}  // namespace tileloss::tools

#endif  // TILELOSS_JUDGE_FUNCTIONS_H_
