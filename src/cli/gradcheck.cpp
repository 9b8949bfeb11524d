// tileloss gradcheck: the kernels against the double-precision oracle, forward and backward, on one config.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "check/gradcheck_config.h"
#include "check/gradcheck_report.h"
#include "check/gradcheck_run.h"
#include "check/row_trace.h"
#include "cli/check_tables.h"
#include "cli/package_flags.h"
#include "cli/subcommands.h"
#include "support/flags.h"
#include "support/format.h"
#include "support/progress.h"
#include "support/result_writer.h"
#include "support/table.h"

namespace tileloss::tools {
namespace {

struct Command {
  std::string config;
  std::vector<std::string> overrides;
  bool mutants = false;
  bool strict = false;
  std::optional<int64_t> row;
  std::optional<int64_t> column;
  PackageFlags package;
};

void add_times(const KernelResults& results, Json& json) {
  json["time/kernel_s"] = results.kernel_s;
  json["time/kernel_forward_s"] = results.forward_s;
  json["time/kernel_backward_s"] = results.backward_s;
}

void add_kernel(const GradcheckConfig& config, const KernelResults& results, Json& json) {
  const Json facts = plan_facts(results.plan);
  for (const auto& [fact, value] : facts.items()) {
    if (fact != "function" && fact != "pass" && fact != "buffers") json["kernel/" + fact] = value;
  }
  json["kernel/device"] = config.device.name();
  json["kernel/in_place"] = config.in_place;
}

int check(const GradcheckConfig& config, const Command& command, const KernelCall& guarded) {
  ResultWriter writer(config.output);  // before the work, so that a file that cannot be written is known at once
  ThreadTeam team(tileloss_default_threads());
  const CheckInputs inputs = make_inputs(config, team);
  print_case("gradcheck", config, inputs);
  StrictReport strict;
  if (config.strict) {
    strict = check_strict(config, inputs, team, guarded);
    print_formatted("\n{}", strict.text());
    std::fflush(stdout);  // a kernel that overruns may end this process in what follows
  }
  const KernelResults results = run_kernels(config, inputs);
  GradcheckReport report = judge_all(config, inputs, results, team);
  report.strict = std::move(strict);

  Json metrics = metrics_json(inputs, report.verdict);
  add_times(results, metrics);
  add_kernel(config, results, metrics);
  command.package.add_facts(metrics);
  print_metrics(metrics);
  print_gates(report.verdict.gates);
  if (config.mutants) print_mutants(report, config.is_linear());
  Json line = case_json("gradcheck", config, inputs);
  add_findings(config, report, metrics, line);
  writer.write(line);
  return print_verdict(failures(config, report));
}

void print_trace(const CheckInputs& inputs, const RowTrace& trace) {
  print_formatted("\nrow {} of {}, label {}{}\n", trace.row, inputs.rows, trace.label,
                  trace.ignored.empty() ? "" : formatted(": ignored, {}; all its outputs are 0 (argmax -1)", trace.ignored));
  Table table({"stage", "column", "kernel", "oracle", "difference", "allowed", "result"});
  for (const Stage& stage : trace.stages) {
    const auto text = [](const std::optional<double>& value, const char* format) {
      return value ? formatted(fmt::runtime(format), *value) : "-";
    };
    table.add({stage.name, stage.column >= 0 ? std::to_string(stage.column) : "-", text(stage.kernel, "{:.9g}"),
               text(stage.oracle, "{:.9g}"), text(stage.difference, "{:.3g}"), text(stage.allowed, "{:.3g}"),
               !stage.allowed ? "-"
               : stage.pass   ? "pass"
                              : "FAIL"});
  }
  print_formatted("\n{}", table.text());
}

// One row of the check at every stage, in place of all rows at the end.
int check_row(const GradcheckConfig& config, const Command& command) {
  const int64_t row = *command.row;
  const std::optional<int64_t> column = command.column;
  ResultWriter writer(config.output);
  ThreadTeam team(tileloss_default_threads());
  const CheckInputs inputs = make_inputs(config, team);
  check_trace_range(inputs, row, column);
  print_case("gradcheck", config, inputs);
  const KernelResults results = run_kernels(config, inputs);
  const RowTrace trace = trace_row(config, inputs, results, row, column);
  print_trace(inputs, trace);
  Json line = case_json("gradcheck", config, inputs);
  add_kernel(config, results, line);
  command.package.add_facts(line);
  line["trace"] = trace.to_json();
  line["pass"] = trace.failures().empty();
  writer.write(line);
  return print_verdict(trace.failures());
}

int run_gradcheck(const Command& command, const KernelCall& guarded) {
  GradcheckConfig config = read_gradcheck_config(command.config, command.overrides, command.package.skipped);
  command.package.add_facts(config);
  if (command.package.only_read) return kExitPass;
  config.mutants |= command.mutants;
  config.strict |= command.strict;
  if (config.strict && !config.device.is_cpu())
    throw ToolError(kExitUsage,
                    formatted("strict: expected device cpu, as guard pages are the host's, got {}", config.device.name()));
  config.device.use();
  try {
    return command.row ? check_row(config, command) : check(config, command, guarded);
  } catch (const LibraryError& error) {
    throw config.located(error);
  }
}

constexpr const char* kFooter =
    "Keys of the config, besides the options of the loss:\n"
    "  level (logits, linear), loss, batch_size, seq_len, vocab_size, dtype, seed, ignore_prob, token_weights and class_weights\n"
    "  (none, random), upstream (ones, random, per_row), outputs, mutants, strict, expect_mostly_zero, output\n"
    "  source: kind (synthetic, safetensors); synthetic: distribution, std, offset; safetensors: path, and the names of its\n"
    "    tensors logits and labels\n"
    "  kernel: device, isa, threads, schedule, row_block, vocab_block, cuda_kernel, in_place, row_groups\n"
    "  tolerances: ulp, loss_atol, logp_max_abs, dlogits_max_abs, dlogits_max_rel\n"
    "Of policy losses also\n"
    "  preset, sequences (batch, offsets), mask_prob, old_logp_noise_scale, ref_logp_noise_scale, sampler_logp_noise_scale\n"
    "  source: the names of mask, advantages, old_logp, ref_logp, sampler_logp\n"
    "Of distillation also\n"
    "  mask_prob; source: teacher (near, same, a distribution; the name of a tensor), teacher_path, teacher_noise, "
    "special_rows,\n"
    "    the name of mask\n"
    "Of soft_cross_entropy also\n"
    "  mask_prob; source: probs_dtype, probs_zeros, special_rows, the name of mask\n"
    "Of sparse_distillation also\n"
    "  mask_prob; source: teacher_columns, teacher_std, special_rows, the name of mask\n"
    "With level: linear (fused with the LM head) also\n"
    "  hidden_size, compute_dtype (auto, float32, bfloat16), head_layout (vh, hv), bias (none, random), gradients (dhidden,\n"
    "  dhead, dbias), dhead_dtype (float32, head), accumulate\n"
    "  source: the names of hidden and lm_head; kernel: workspace_bytes; of distillation: teacher_hidden_size, source: "
    "teacher_std\n"
    "With the Python package's command (pip install '.[check]') also\n"
    "  model_path, teacher_model_path, text (a transformers model); tracker, wandb_project, wandb_mode, wandb_name; the old "
    "names\n"
    "  kernel.block_size, kernel.time_block and mesh_shape; and the flags --impl (somebody else's implementation), --frontend "
    "jax,\n"
    "  --implementation\n"
    "docs/users/gradcheck.md says more, configs/ has examples.\n"
    "Checked: every row output asked for, the loss, and the gradient both from value_and_grad and from a backward that starts\n"
    "from the forward's row state. --row shows one row at every stage instead. The last line is PASS, or FAIL and the gates that "
    "failed.";

}  // namespace

void add_gradcheck(CLI::App& program, Action& action) { add_gradcheck(program, action, call); }

void add_gradcheck(CLI::App& program, Action& action, const KernelCall& guarded) {
  auto command = std::make_shared<Command>();
  CLI::App* app = program.add_subcommand("gradcheck", "Check a loss and its gradient against the double-precision oracle");
  app->add_option("--config", command->config, "YAML file")->required();
  app->add_option("--set", command->overrides, "Override a key: kernel.in_place=true (repeatable)")->allow_extra_args(false);
  app->add_flag("--mutants", command->mutants, "Plant every applicable mutant in the kernel's outputs; each must be caught");
  app->add_flag("--strict", command->strict, "Run the kernels on guard-page buffers as well; an access outside any tensor fails");
  app->add_option_function<std::string>(
      "--device", [command](const std::string& name) { command->overrides.push_back("kernel.device=" + name); },
      "Run the kernels on cpu, cuda or cuda:N, over copies of all tensors");
  app->add_option("--row", command->row, "Show one row at every stage, kernel beside oracle, in place of all gates")
      ->transform(integer_in(0, std::numeric_limits<int64_t>::max()))
      ->excludes("--mutants", "--strict");
  app->add_option("--column", command->column, "With --row: the gradient at this column, in place of the worst")
      ->transform(integer_in(0, std::numeric_limits<int64_t>::max()))
      ->needs("--row");
  app->add_flag_function(
      "--quiet", [](int64_t) { Progress::be_quiet(); }, "No progress on stderr");
  add_package_flags(*app, command->package);
  add_case_flags(*app, command->package);
  app->footer(kFooter);
  app->callback([command, guarded, &action] { action = [command, guarded] { return run_gradcheck(*command, guarded); }; });
}

}  // namespace tileloss::tools
