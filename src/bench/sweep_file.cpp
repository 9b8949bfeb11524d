#include "bench/sweep_file.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"

namespace tileloss::tools {
namespace {

std::string lacks(const char* member) { return std::string("no ") + member; }

// What makes a line no result; empty if nothing does.
std::string fault_of(const Json& line) {
  if (!line.contains("case") || !line["case"].is_object()) return lacks("case");
  if (!line.contains("status") || !line["status"].is_string()) return lacks("status");
  if (line["status"] != "ok") return "";
  for (const char* text : {"isa", "schedule"}) {
    if (!line.contains(text) || !line[text].is_string()) return lacks(text);
  }
  std::vector<const char*> numbers = {"threads", "row_block", "vocab_block", "gb_per_s"};
  if (line["case"].contains("hidden")) numbers.push_back("tflops");
  for (const char* number : numbers) {
    if (!line.contains(number) || !line[number].is_number()) return lacks(number);
  }
  // A time of 0 or below is none, and the report divides by times.
  for (const char* time : {"median_ms", "min_ms"}) {
    if (!line.contains(time)) return lacks(time);
    if (!line[time].is_number() || !(line[time].get<double>() > 0)) {
      return formatted("{}: expected a number above 0, got {}", time, shown(line[time].dump()));
    }
  }
  return "";
}

}  // namespace

SweepFile::SweepFile(const std::filesystem::path& path)
    : writer_(path, [this](Json line, const std::string& where) { keep(std::move(line), where); }) {}

void SweepFile::keep(Json line, const std::string& where) {
  if (const std::string fault = fault_of(line); !fault.empty()) {
    throw ToolError(kExitUsage, formatted("results file {}: not a sweep's result: {}", where, fault));
  }
  std::string text = line["case"].dump();
  const auto [at, is_new] = lines_.emplace(std::move(text), std::move(line));
  if (!is_new) throw ToolError(kExitUsage, formatted("results file {}: a second result of the case {}", where, shown(at->first)));
}

const Json* SweepFile::find(const Json& sweep_case) const {
  const auto found = lines_.find(sweep_case.dump());
  return found != lines_.end() ? &found->second : nullptr;
}

void SweepFile::add(const Json& line) {
  keep(line, "of a new case");
  writer_.write(line);
}

}  // namespace tileloss::tools
