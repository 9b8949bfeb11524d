// What the Python package's command hands over when it calls the program: flags that --help does not show.
#ifndef TILELOSS_CLI_PACKAGE_FLAGS_H_
#define TILELOSS_CLI_PACKAGE_FLAGS_H_

#include <string>
#include <vector>

#include "check/gradcheck_config.h"
#include "support/json.h"

namespace CLI {
class App;
}

namespace tileloss::tools {

struct PackageFlags {
  std::vector<std::string> skipped;  // keys of the config that the package has read
  bool only_read = false;            // the config: is it right? Before a model is loaded
  std::string facts = "{}";          // JSON: what it knows of the case, for the report and the line of results

  // Into the report. `model` is the source's name there.
  void add_facts(GradcheckConfig& config) const;
  void add_facts(Json& metrics) const;
};

// --skip-key and --results-fd.
void add_package_flags(CLI::App& app, PackageFlags& flags);
// --only-read and --facts.
void add_case_flags(CLI::App& app, PackageFlags& flags);

}  // namespace tileloss::tools

#endif  // TILELOSS_CLI_PACKAGE_FLAGS_H_
