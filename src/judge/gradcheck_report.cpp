#include "judge/gradcheck_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace tileloss::tools {
namespace {

// The worse of all gradients.
Worst worst_of(const Checks& checks, Worst (GradientMetric::*figure)() const) {
  Worst worst;
  for (const GradientMetric& gradient : checks.gradients) {
    const Worst candidate = (gradient.*figure)();
    // Written so that a NaN wins.
    if (!(candidate.value <= worst.value)) worst = candidate;
  }
  return worst;
}

double mean_abs(const Checks& checks) {
  double worst = 0;
  for (const GradientMetric& gradient : checks.gradients) worst = std::max(worst, gradient.mean_abs());
  return worst;
}

void add_dlogits_metrics(const Checks& checks, Json& json) {
  json["dlogits_max_abs"] = worst_of(checks, &GradientMetric::max_abs).value;
  json["dlogits_max_rel"] = worst_of(checks, &GradientMetric::max_rel).value;
  json["dlogits_mean_abs"] = mean_abs(checks);
  json["dlogits_ulp_target"] = worst_of(checks, &GradientMetric::worst_ulp_target).value;
  json["dlogits_ulp_off_target"] = worst_of(checks, &GradientMetric::worst_ulp_off_target).value;
  const Worst off_target = worst_of(checks, &GradientMetric::worst_budget_off_target);
  json["dlogits_worst_off_target_at"] = {off_target.at.row, off_target.at.column};
  json["dlogits_normwise"] = worst_of(checks, &GradientMetric::worst_normwise).value;
  json["dlogits_zero_fraction"] = checks.gradients.front().zero_fraction();
}

Json gates_json(const std::vector<Gate>& gates) {
  Json list = Json::array();
  for (const Gate& gate : gates) {
    list.push_back({{"name", gate.name}, {"limit", gate.limit}, {"value", gate.value}, {"pass", gate.pass}});
  }
  return list;
}

Json mutants_json(const std::vector<MutantVerdict>& mutants) {
  Json list = Json::array();
  for (const MutantVerdict& mutant : mutants) {
    list.push_back({{"name", mutant.name}, {"planted", mutant.planted}, {"caught_by", mutant.caught_by}});
  }
  return list;
}

}  // namespace

GradcheckReport judge_all(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results,
                          ThreadTeam& team) {
  GradcheckReport report{judge(config, inputs, results, team), {}, {}};
  if (config.mutants && report.verdict.passes()) report.mutants = judge_mutants(config, inputs, results, report.verdict, team);
  return report;
}

std::vector<std::string> failures(const GradcheckConfig& config, const GradcheckReport& report) {
  std::vector<std::string> failed;
  for (const Gate& gate : report.verdict.gates) {
    if (!gate.pass) failed.push_back(gate.name);
  }
  bool any_planted = false;
  for (const MutantVerdict& mutant : report.mutants) {
    any_planted |= mutant.planted;
    if (mutant.planted && mutant.caught_by.empty()) failed.push_back("mutant " + mutant.name);
  }
  if (config.mutants && report.verdict.passes() && !any_planted) failed.emplace_back("mutants (none could be planted)");
  if (!report.strict.findings.empty()) failed.emplace_back("strict");
  return failed;
}

Json metrics_json(const CheckInputs& inputs, const Verdict& verdict) {
  const Checks& checks = verdict.checks;
  Json json;
  if (verdict.has_loss) {
    json["loss_ref"] = verdict.loss_ref;
    json["loss_kernel"] = verdict.loss_kernel;
    json["abs_diff_loss"] = std::abs(verdict.loss_kernel - verdict.loss_ref);
  }
  if (checks.per_loss.count() > 0) json["fwd/per_loss_max_abs"] = checks.per_loss.max_abs().value;
  for (const OutputMetric& metric : checks.outputs) {
    if (metric.count() == 0) continue;
    const std::string name = "fwd/" + metric.name();
    if (metric.is_exact()) {
      json[name + "_mismatches"] = metric.mismatches();
    } else {
      json[name + "_max_abs"] = metric.max_abs().value;
    }
  }
  if (inputs.linear) {
    json["shape/hidden_size"] = inputs.linear->hidden_view.cols;
    if (inputs.target.linear) json["shape/teacher_hidden_size"] = inputs.target.linear->hidden_view.cols;
    json["logits_bytes"] = inputs.rows * inputs.row_bytes();  // what is never stored
  }
  if (!checks.gradients.empty()) add_dlogits_metrics(checks, json);
  for (const Verdict::Metric& metric : verdict.metrics) {
    if (std::isnan(metric.kernel) && std::isnan(metric.reference)) continue;
    json["metric/" + metric.name] = metric.kernel;
    json["metric/" + metric.name + "_ref"] = metric.reference;
  }
  if (std::isfinite(verdict.margin)) json["decision_margin"] = verdict.margin;
  json["time/ref_s"] = verdict.seconds;
  json["shape/batch_size"] = inputs.batch_size;
  json["shape/seq_len"] = inputs.seq_len;
  json["shape/rows"] = inputs.rows;
  json["shape/rows_used"] = inputs.used_rows().size();
  json["shape/vocab_size"] = inputs.cols;
  json["shape/valid_vocab"] = inputs.valid;
  return json;
}

Json case_json(const char* tool, const GradcheckConfig& config, const CheckInputs& inputs) {
  return {{"tool", tool},
          {"version", tileloss_version()},
          {"config", config.file},
          {"loss", config.function.name()},
          {"options", config.function.to_json()},
          {"preset", config.function.preset().empty() ? Json() : Json(config.function.preset())},
          {"dtype", oracle::format_info(inputs.format).name},
          {"seed", config.seed}};
}

void add_findings(const GradcheckConfig& config, const GradcheckReport& report, const Json& metrics, Json& line) {
  line.update(metrics);
  line["gates"] = gates_json(report.verdict.gates);
  if (config.mutants) line["mutants"] = mutants_json(report.mutants);
  if (config.strict) line["strict"] = report.strict.to_json();
  line["pass"] = failures(config, report).empty();
}

}  // namespace tileloss::tools
