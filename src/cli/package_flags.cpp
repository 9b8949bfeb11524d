#include "cli/package_flags.h"

#include <CLI/CLI.hpp>
#include <limits>
#include <nlohmann/json.hpp>

#include "support/flags.h"
#include "support/result_writer.h"

namespace tileloss::tools {

void add_package_flags(CLI::App& app, PackageFlags& flags) {
  app.add_option("--skip-key", flags.skipped, "Key of the config to be left out")->allow_extra_args(false)->group("");
  app.add_option_function<int>("--results-fd", copy_results_to, "Every line of results goes to this descriptor as well")
      ->transform(integer_in(0, std::numeric_limits<int>::max()))
      ->group("");
}

void add_case_flags(CLI::App& app, PackageFlags& flags) {
  app.add_flag("--only-read", flags.only_read, "Read the config and stop")->group("");
  const CLI::Validator is_object(
      [](const std::string& text) {
        const bool is_one = Json::parse(text, nullptr, /*allow_exceptions=*/false).is_object();
        return is_one ? std::string() : "expected a JSON object, got " + text;
      },
      "JSON");
  app.add_option("--facts", flags.facts, "For the report: a JSON object")->check(is_object)->group("");
}

void PackageFlags::add_facts(GradcheckConfig& config) const {
  const Json known = Json::parse(facts);
  if (known.contains("model")) config.source.shown_as = known["model"].get<std::string>();
}

void PackageFlags::add_facts(Json& metrics) const { metrics.update(Json::parse(facts)); }

}  // namespace tileloss::tools
