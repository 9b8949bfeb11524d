// Reads a gradcheck config.
#ifndef TILELOSS_CHECK_GRADCHECK_CONFIG_H_
#define TILELOSS_CHECK_GRADCHECK_CONFIG_H_

#include <filesystem>
#include <string>
#include <vector>

#include "check/inputs/config.h"

namespace tileloss::tools {

// Throws ToolError (usage) naming the key and where it stands. `name`: of the config, in reports.
GradcheckConfig read_gradcheck_config(const ConfigNode& root, const std::string& name);
// Throws ToolError as support/config.h says, of the keys that are skipped too.
GradcheckConfig read_gradcheck_config(const std::filesystem::path& file, const std::vector<std::string>& overrides,
                                      const std::vector<std::string>& skipped = {});

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_GRADCHECK_CONFIG_H_
