// tileloss judge: what something else computed, compared with the oracle by gradcheck's gates.

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "check/gradcheck_report.h"
#include "check/inputs/case_files.h"
#include "check/oracles/row_outputs.h"
#include "cli/check_tables.h"
#include "cli/package_flags.h"
#include "cli/subcommands.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/output_file.h"
#include "support/printable.h"
#include "support/progress.h"
#include "support/result_writer.h"
#include "support/safetensors.h"

namespace tileloss::tools {
namespace {

struct Command {
  std::string config;
  std::vector<std::string> overrides;
  std::string outputs;
  std::string inputs;  // to be written
  std::string producer;
  bool mutants = false;
  PackageFlags package;
};

int hand_over_inputs(GradcheckConfig config, const std::string& path) {
  const GradcheckConfig as_read = config;
  check_output("--write-inputs", path, config.inputs());
  forget_kernels(config);
  ThreadTeam team(tileloss_default_threads());
  const CheckInputs inputs = make_inputs(config, team);
  print_case("judge", config, inputs);
  std::vector<Tensor> tensors;
  for (const StoredTensor& each : input_tensors(as_read, inputs))
    tensors.push_back({each.name, each.dtype, each.shape, each.data, each.bytes});
  write_safetensors(path, tensors, {{"case", described_case(as_read, inputs).dump()}});
  print_formatted("inputs written to {}\n", shown(path));
  return kExitPass;
}

int judge_file(GradcheckConfig config, const Command& command) {
  forget_kernels(config);
  config.mutants = command.mutants;
  const std::string& path = command.outputs;
  if (config.output) check_output("output", *config.output, {{{"--outputs", path}}});
  // Opened before the work, so that files that cannot be read or written are known at once.
  ResultWriter writer(config.output);
  const TensorFile file = load_safetensors(path);

  ThreadTeam team(tileloss_default_threads());
  const CheckInputs inputs = make_inputs(config, team);
  print_case("judge", config, inputs);
  print_formatted("outputs {}{}\n", shown(path), command.producer.empty() ? "" : ", made by " + shown(command.producer));
  const KernelResults results = read_outputs(file, config, inputs);
  if (config.mutants && results.gradients.empty()) {
    throw ToolError(kExitUsage, formatted("--mutants: expected a gradient in {}, got none to plant them in", shown(path)));
  }
  const GradcheckReport report = judge_all(config, inputs, results, team);
  Json metrics = metrics_json(inputs, report.verdict);
  command.package.add_facts(metrics);
  print_metrics(metrics);
  print_gates(report.verdict.gates);
  if (config.mutants) print_mutants(report, config.is_linear());
  Json line = case_json("judge", config, inputs);
  line["outputs"] = path;
  if (!command.producer.empty()) line["producer"] = command.producer;
  add_findings(config, report, metrics, line);
  writer.write(line);
  return print_verdict(failures(config, report));
}

int run_judge(const Command& command) {
  GradcheckConfig config = read_gradcheck_config(command.config, command.overrides, command.package.skipped);
  command.package.add_facts(config);
  if (command.package.only_read) return kExitPass;
  try {
    return command.inputs.empty() ? judge_file(config, command) : hand_over_inputs(config, command.inputs);
  } catch (const LibraryError& error) {
    throw config.located(error);
  }
}

std::string footer() {
  return formatted(
      "The config is gradcheck's; what concerns the library's own kernels (the section kernel, head_layout, mutants, strict) "
      "has\n"
      "no effect. The tensors of both files have the names of tileloss_args: logits, labels, ... are inputs; outputs, any of\n"
      "them, are: loss, {},\n"
      "metrics, and dlogits or dhidden, dhead, dbias. divergence, teacher_entropy and agreement are distillation's.\n"
      "Gates, exit codes and the results file are gradcheck's. docs/users/gradcheck.md says more.",
      fmt::join(output_names(true), ", "));
}

}  // namespace

void add_judge(CLI::App& program, Action& action) {
  auto command = std::make_shared<Command>();
  CLI::App* app = program.add_subcommand("judge", "Hold what something else computed against the double-precision oracle");
  app->add_option("--config", command->config, "YAML file, as gradcheck's")->required();
  app->add_option("--set", command->overrides, "Override a key: seq_len=33 (repeatable)")->allow_extra_args(false);
  CLI::Option_group* files = app->add_option_group("Files", "one of the two");
  CLI::Option* outputs = files->add_option("--outputs", command->outputs, "safetensors file of what was computed: it is judged");
  files->add_option("--write-inputs", command->inputs, "safetensors file to be written: what it is to be computed on");
  files->require_option(1);
  app->add_flag("--mutants", command->mutants, "Plant every applicable mutant in the outputs; each must be caught")
      ->needs(outputs);
  app->add_option("--producer", command->producer, "Who made the outputs: text for the report")->needs(outputs);
  app->add_flag_function(
      "--quiet", [](int64_t) { Progress::be_quiet(); }, "No progress on stderr");
  add_package_flags(*app, command->package);
  add_case_flags(*app, command->package);
  app->footer(footer());
  app->callback([command, &action] { action = [command] { return run_judge(*command); }; });
}

}  // namespace tileloss::tools
