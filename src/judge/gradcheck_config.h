// Reads a gradcheck config.
#ifndef TILELOSS_JUDGE_GRADCHECK_CONFIG_H_
#define TILELOSS_JUDGE_GRADCHECK_CONFIG_H_

#include <string>

#include "judge/inputs/config.h"

namespace tileloss::tools {

// Throws ToolError (usage) naming the key and where it stands. `name`: of the config, in reports.
GradcheckConfig read_gradcheck_config(const ConfigNode& root, const std::string& name);

}  // namespace tileloss::tools

#endif  // TILELOSS_JUDGE_GRADCHECK_CONFIG_H_
