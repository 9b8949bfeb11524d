// The functions of the library that a check knows.
#ifndef TILELOSS_CHECK_FUNCTIONS_H_
#define TILELOSS_CHECK_FUNCTIONS_H_

#include <string>
#include <string_view>
#include <vector>

#include "check/inputs/checked_function.h"

namespace tileloss::tools {

// By the names that `loss` has in a config.
std::vector<std::string> checked_losses();
// Throws ToolError (usage) for another.
const CheckedFunction& checked_function(std::string_view loss);

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_FUNCTIONS_H_
