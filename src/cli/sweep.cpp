// tileloss sweep: the bench over every combination of a config's lists.
#include "bench/sweep.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/sweep_case.h"
#include "bench/sweep_config.h"
#include "cli/package_flags.h"
#include "cli/subcommands.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/memory.h"

namespace tileloss::tools {
namespace {

constexpr const char* kCaseCommand = "sweep-case";

constexpr const char* kFooter =
    "The config gives lists, or single values: loss (a name, or {name: cross_entropy, label_smoothing: 0.1}), shape\n"
    "(TOKENSxVOCAB), dtype, pass (forward, value_and_grad, backward), isa, threads, schedule, row_block, vocab_block,\n"
    "cuda_kernel, with an LM head (linear_*) hidden, head_layout (vh, hv), workspace (64MiB); and device (cpu, cuda, cuda:1),\n"
    "in_place, iters, warmup, seed, time_limit_s, memory_limit_mb, output. Every combination is a case, measured in a process of "
    "its own, and\n"
    "becomes a line of the results file at once: run the same command again after whatever stopped it, and it goes on from\n"
    "there. With the Python package's command also tracker, wandb_project, wandb_mode, wandb_name.\n"
    "Exit code 1: every case has its line, but some are not ok. docs/users/sweep.md says more, configs/ has examples.";

}  // namespace

void add_sweep(CLI::App& program, Action& action) {
  struct Command {
    std::string config;
    std::vector<std::string> overrides;
    std::string sweep_case;
    PackageFlags package;
  };
  auto command = std::make_shared<Command>();
  CLI::App* app = program.add_subcommand("sweep", "Time every combination of blocks, threads, instruction sets, shapes, losses");
  app->add_option("--config", command->config, "YAML file")->required();
  app->add_option("--set", command->overrides, "Override a key: threads=[1,2] (repeatable)")->allow_extra_args(false);
  add_package_flags(*app, command->package);
  app->footer(kFooter);
  app->callback([command, &action] {
    action = [command] {
      const int64_t own_bytes = virtual_bytes();  // before the cases, which are the parent's alone
      const SweepConfig config = read_sweep_config(command->config, command->overrides, command->package.skipped);
      check_memory_limit(config.limits, own_bytes);
      return run_sweep(config, {"/proc/self/exe", kCaseCommand});
    };
  });

  CLI::App* case_app = program.add_subcommand(kCaseCommand, "One case of a sweep")->group("");
  case_app->add_option("case", command->sweep_case, "As sweep writes it")->required();
  case_app->callback([command, &action] {
    action = [command] {
      const Json sweep_case = Json::parse(command->sweep_case, nullptr, /*allow_exceptions=*/false);
      print_formatted("{}\n", measure(sweep_case).dump());
      return kExitPass;
    };
  });
}

}  // namespace tileloss::tools
