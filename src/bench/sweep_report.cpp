#include "bench/sweep_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "bench/roofs.h"
#include "bench/sweep_case.h"
#include "support/format.h"
#include "support/table.h"

namespace tileloss::tools {
namespace {

constexpr double kChartWidth = 40;

bool is_ok(const Json& line) { return line.at("status") == "ok"; }
double median_ms(const Json& line) { return line.at("median_ms").get<double>(); }

bool is_faster(const Json* a, const Json* b) {
  return is_ok(*a) && is_ok(*b) ? median_ms(*a) < median_ms(*b) : is_ok(*a) && !is_ok(*b);
}

// In the order in which their first case comes.
std::vector<std::vector<const Json*>> groups_of(const std::vector<Json>& lines) {
  std::vector<std::vector<const Json*>> groups;
  std::map<std::string, size_t> known;
  for (const Json& line : lines) {
    const auto [at, is_new] = known.emplace(describe_work(line.at("case")), groups.size());
    if (is_new) groups.emplace_back();
    groups[at->second].push_back(&line);
  }
  return groups;
}

std::string group_text(const std::vector<const Json*>& group, const std::vector<std::string>& axes) {
  const Json& best = **std::min_element(group.begin(), group.end(), is_faster);
  double slowest = 0;
  for (const Json* line : group) slowest = std::max(slowest, is_ok(*line) ? median_ms(*line) : 0);

  std::vector<std::string> header = axes;
  const bool has_products = best.at("case").contains("hidden");
  const std::string scale = is_ok(best) ? formatted("0 to {:.4g} ms", slowest) : "";
  for (const std::string& name : {std::string("runs as"), std::string("min ms"), std::string(has_products ? "TFLOP/s" : "GB/s"),
                                  std::string("median ms"), scale})
    header.push_back(name);
  Table table(header);
  for (const Json* line : group) {
    std::vector<std::string> cells;
    for (const std::string& axis : axes) cells.push_back(value_text(line->at("case"), axis));
    if (is_ok(*line)) {
      const auto bar = static_cast<size_t>(std::lround(kChartWidth * median_ms(*line) / slowest));
      cells.push_back(formatted("{} x{} {} {}x{}", line->at("isa").get<std::string>(), line->at("threads").get<int>(),
                                line->at("schedule").get<std::string>(), line->at("row_block").get<int64_t>(),
                                line->at("vocab_block").get<int64_t>()));
      cells.push_back(formatted("{:.4g}", line->at("min_ms").get<double>()));
      cells.push_back(formatted("{:.3g}", line->at(has_products ? "tflops" : "gb_per_s").get<double>()));
      cells.push_back(formatted("{:.4g}", median_ms(*line)));
      cells.push_back(std::string(bar, '#') + (line == &best ? " best" : ""));
    } else {
      cells.insert(cells.end(), {"-", "-", "-", line->at("status").get<std::string>(), ""});
    }
    table.add(std::move(cells));
  }
  std::string text = "\n" + describe_work(best.at("case")) + "\n" + table.text();
  if (!is_ok(best)) return text + "best: none\n";
  const std::string how = describe_axes(best.at("case"), axes);
  return text + formatted("best: {}{}{}\n", how, how.empty() ? "" : ": ", describe_result(best));
}

// Cases that differ in `axis` alone: the slowest median over the fastest.
std::string effect_text(const std::vector<Json>& lines, const std::string& axis) {
  std::map<std::string, std::vector<double>> alike;
  for (const Json& line : lines) {
    if (!is_ok(line)) continue;
    Json others = line.at("case");
    others.erase(axis);
    alike[others.dump()].push_back(median_ms(line));
  }
  std::vector<double> ratios;
  for (const auto& [others, medians] : alike) {
    const auto [fastest, slowest] = std::minmax_element(medians.begin(), medians.end());
    if (medians.size() > 1) ratios.push_back(*slowest / *fastest);
  }
  if (ratios.empty()) return "";
  return formatted("{}: {:.3f} x, at most {:.3f} x\n", axis, median(ratios), *std::max_element(ratios.begin(), ratios.end()));
}

}  // namespace

std::string describe_result(const Json& result) {
  const auto status = result.at("status").get<std::string>();
  if (status == "ok") return formatted("{:.4g} ms", median_ms(result));
  return status + ": " + result.value("message", "");
}

std::string sweep_report(const std::vector<Json>& lines) {
  std::vector<Json> cases;
  for (const Json& line : lines) cases.push_back(line.at("case"));
  const std::vector<std::string> axes = varied_axes(cases);
  std::string text;
  for (const auto& group : groups_of(lines)) text += group_text(group, axes);
  std::string effects;
  for (const std::string& axis : axes) effects += effect_text(lines, axis);
  if (!effects.empty()) {
    text += "\nslowest over fastest median with all else the same (typical, and the largest):\n" + effects;
  }
  return text;
}

}  // namespace tileloss::tools
