#include "check/gradcheck_config.h"
#include "support/safetensors.h"

namespace tileloss::tools {

GradcheckConfig read_gradcheck_config(const std::filesystem::path& file, const std::vector<std::string>& overrides,
                                      const std::vector<std::string>& skipped) {
  GradcheckConfig config = read_gradcheck_config(load_config(file, overrides, skipped), file.string());
  for (const std::filesystem::path& path : {config.source.path, config.teacher.path}) {
    if (!path.empty()) config.files.push_back(load_safetensors(path));
  }
  return config;
}

}  // namespace tileloss::tools
