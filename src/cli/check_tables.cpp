#include "cli/check_tables.h"

#include <nlohmann/json.hpp>

#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/table.h"

namespace tileloss::tools {
namespace {

std::string number(const Json& value) {
  if (value.is_number_float()) return formatted("{:.6g}", value.get<double>());
  return value.is_string() ? value.get<std::string>() : value.dump();
}

}  // namespace

void print_case(const char* tool, const GradcheckConfig& config, const CheckInputs& inputs) {
  const std::string file = config.source.shown_as.empty() ? config.source.path.string() : config.source.shown_as;
  const std::string source = config.source.is_file ? shown(file) : "synthetic, " + config.source.distribution;
  const std::string hidden = inputs.linear ? formatted(", hidden {}", inputs.linear->hidden_view.cols) : "";
  print_formatted("{} {}: {}{} [{}, {}, {}{}] {}{}; {}; seed {}\n", tool, shown(config.file), config.function.name(),
                  config.function.preset().empty() ? "" : " " + config.function.preset(), inputs.batch_size, inputs.seq_len,
                  inputs.cols, hidden, reference::format_info(inputs.format).name, config.in_place ? ", in place" : "", source,
                  config.seed);
  if (const Json options = config.function.to_json(); !options.empty()) print_formatted("options {}\n", options.dump());
}

void print_metrics(const Json& metrics) {
  Table table({"metric", "value"});
  for (const auto& [name, value] : metrics.items()) table.add({name, number(value)});
  print_formatted("\n{}", table.text());
}

void print_gates(const std::vector<Gate>& gates) {
  Table table({"gate", "value", "limit", "result"});
  for (const Gate& gate : gates) {
    table.add({gate.name, formatted("{:.4g}", gate.value), formatted("{:.4g}", gate.limit), gate.pass ? "pass" : "FAIL"});
  }
  print_formatted("\n{}", table.text());
}

void print_mutants(const GradcheckReport& report, bool is_linear) {
  if (!report.verdict.passes()) return print_formatted("\nmutants: not judged, as gates fail without any\n");
  Table table({"mutant", "caught by"});
  for (const MutantVerdict& mutant : report.mutants) {
    const std::string caught = !mutant.planted            ? "(no effect on this config)"
                               : mutant.caught_by.empty() ? "NOT CAUGHT"
                                                          : formatted("{}", fmt::join(mutant.caught_by, ", "));
    table.add({mutant.name, caught});
  }
  print_formatted("\nmutants{}\n{}", is_linear ? "" : formatted(", planted in the first {} used rows", kMutantRows),
                  table.text());
}

int print_verdict(const std::vector<std::string>& failed) {
  if (failed.empty()) {
    print_formatted("\nPASS\n");
    return kExitPass;
  }
  print_formatted("\nFAIL: {}\n", fmt::join(failed, ", "));
  return kExitCheckFailed;
}

}  // namespace tileloss::tools
