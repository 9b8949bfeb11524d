// The requests about a case: check it, look at one row of it, hand over its inputs, judge somebody else's outputs.
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "judge/gates/mutants.h"
#include "judge/gradcheck_report.h"
#include "judge/gradcheck_run.h"
#include "judge/inputs/case_files.h"
#include "judge/requests.h"
#include "judge/row_trace.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"

namespace tileloss::tools {
namespace {

GradcheckConfig read_config(Request& request) {
  GradcheckConfig config = read_gradcheck_config(config_node(request.json.at("config")), request.json.at("name"));
  config.files = std::move(request.files);
  config.mutants |= request.json.value("mutants", false);
  config.strict |= request.json.value("strict", false);
  if (config.strict && !config.device.is_cpu())
    throw ToolError(kExitUsage,
                    formatted("strict: expected device cpu, as guard pages are the host's, got {}", config.device.name()));
  return config;
}

// What the library refuses is told with the place of the key that it is about.
int located(const GradcheckConfig& config, const std::function<int()>& run) {
  try {
    return run();
  } catch (const LibraryError& error) {
    throw config.located(error);
  }
}

void tell_case(const Request& request, const GradcheckConfig& config, const CheckInputs& inputs) {
  Json event = {
      {"event", "case"},
      {"loss", config.function.name()},
      {"preset", config.function.preset()},
      {"options", config.function.to_json()},
      {"batch_size", inputs.batch_size},
      {"seq_len", inputs.seq_len},
      {"vocab_size", inputs.cols},
      {"dtype", oracle::format_info(inputs.format).name},
      {"in_place", config.in_place},
      {"source", config.source.is_file ? shown(config.source.path.string()) : "synthetic, " + config.source.distribution},
      {"seed", config.seed}};
  if (inputs.linear) event["hidden_size"] = inputs.linear->hidden_view.cols;
  request.tell(event);
}

void add_kernel(const GradcheckConfig& config, const KernelResults& results, Json& json) {
  const Json facts = plan_facts(results.plan);
  for (const auto& [fact, value] : facts.items()) {
    if (fact != "function" && fact != "pass" && fact != "buffers") json["kernel/" + fact] = value;
  }
  json["kernel/device"] = config.device.name();
  json["kernel/in_place"] = config.in_place;
}

int tell_findings(const Request& request, const GradcheckConfig& config, const CheckInputs& inputs, const GradcheckReport& report,
                  const Json& metrics) {
  Json line = case_json(request.json.at("do").get<std::string>().c_str(), config, inputs);
  if (request.json.contains("outputs")) line["outputs"] = request.json["outputs"];
  if (request.json.contains("producer")) line["producer"] = request.json["producer"];
  add_findings(config, report, metrics, line);
  const std::vector<std::string> failed = failures(config, report);
  request.tell({{"event", "result"},
                {"line", line},
                {"metrics", metrics},
                {"failures", failed},
                {"mutants_judged", report.verdict.passes()},
                {"mutant_rows", config.is_linear() ? Json() : Json(kMutantRows)}});
  return failed.empty() ? kExitPass : kExitCheckFailed;
}

int check(const Request& request, const GradcheckConfig& config) {
  ThreadTeam team(tileloss_default_threads());
  const CheckInputs inputs = make_inputs(config, team);
  tell_case(request, config, inputs);
  StrictReport strict;
  if (config.strict) {
    strict = check_strict(config, inputs, team);
    // A kernel that overruns may end this process in what follows.
    request.tell({{"event", "strict"}, {"text", strict.text()}, {"report", strict.to_json()}});
  }
  const KernelResults results = run_kernels(config, inputs);
  GradcheckReport report = judge_all(config, inputs, results, team);
  report.strict = std::move(strict);
  Json metrics = metrics_json(inputs, report.verdict);
  metrics["time/kernel_s"] = results.kernel_s;
  metrics["time/kernel_forward_s"] = results.forward_s;
  metrics["time/kernel_backward_s"] = results.backward_s;
  add_kernel(config, results, metrics);
  return tell_findings(request, config, inputs, report, metrics);
}

int trace(const Request& request, const GradcheckConfig& config) {
  const auto row = request.json.at("row").get<int64_t>();
  std::optional<int64_t> column;
  if (request.json.contains("column")) column = request.json["column"].get<int64_t>();
  ThreadTeam team(tileloss_default_threads());
  const CheckInputs inputs = make_inputs(config, team);
  check_trace_range(inputs, row, column);
  tell_case(request, config, inputs);
  const KernelResults results = run_kernels(config, inputs);
  const RowTrace found = trace_row(config, inputs, results, row, column);
  Json line = case_json("gradcheck", config, inputs);
  add_kernel(config, results, line);
  line["trace"] = found.to_json();
  line["pass"] = found.failures().empty();
  request.tell(
      {{"event", "result"}, {"line", line}, {"failures", found.failures()}, {"ignored", found.ignored}, {"rows", inputs.rows}});
  return found.failures().empty() ? kExitPass : kExitCheckFailed;
}

}  // namespace

int request_read(Request& request) {
  read_config(request);
  return kExitPass;
}

int request_gradcheck(Request& request) {
  const GradcheckConfig config = read_config(request);
  config.device.use();
  return located(config, [&] { return check(request, config); });
}

int request_trace(Request& request) {
  const GradcheckConfig config = read_config(request);
  config.device.use();
  return located(config, [&] { return trace(request, config); });
}

int request_draw(Request& request) {
  GradcheckConfig config = read_config(request);
  const GradcheckConfig as_read = config;
  forget_kernels(config);
  return located(config, [&] {
    ThreadTeam team(tileloss_default_threads());
    const CheckInputs inputs = make_inputs(config, team);
    for (const StoredTensor& tensor : input_tensors(as_read, inputs)) request.hand_over(tensor);
    request.tell({{"event", "case"}, {"case", described_case(as_read, inputs)}});
    return kExitPass;
  });
}

int request_judge(Request& request) {
  GradcheckConfig config = read_config(request);
  forget_kernels(config);
  config.mutants = request.json.value("mutants", false);
  return located(config, [&] {
    ThreadTeam team(tileloss_default_threads());
    const CheckInputs inputs = make_inputs(config, team);
    tell_case(request, config, inputs);
    const KernelResults results = read_outputs(request.outputs, config, inputs);
    if (config.mutants && results.gradients.empty()) {
      throw ToolError(kExitUsage,
                      formatted("mutants: expected a gradient in {}, got none to plant them in", request.outputs.name()));
    }
    const GradcheckReport report = judge_all(config, inputs, results, team);
    return tell_findings(request, config, inputs, report, metrics_json(inputs, report.verdict));
  });
}

}  // namespace tileloss::tools
