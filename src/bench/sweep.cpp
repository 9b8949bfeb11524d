// tileloss sweep: the bench over every combination of a config's lists.
#include "bench/sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>

#include "bench/sweep_case.h"
#include "bench/sweep_file.h"
#include "bench/sweep_progress.h"
#include "bench/sweep_report.h"
#include "cli/subcommands.h"
#include "support/exit_codes.h"
#include "support/memory.h"
#include "support/printable.h"
#include "support/signals.h"

namespace tileloss::tools {
namespace {

constexpr const char* kCaseCommand = "sweep-case";

int64_t count_done(const SweepConfig& config, const SweepFile& file) {
  return std::count_if(config.cases.begin(), config.cases.end(), [&](const Json& c) { return file.find(c) != nullptr; });
}

void print_start(const SweepConfig& config, const SweepFile& file, int64_t done) {
  fmt::print("sweep {}: {} cases, results in {}\n", shown(config.file), config.cases.size(), shown(config.output.string()));
  if (done > 0) fmt::print("{} of them are there already\n", done);
  if (const int64_t others = file.size() - done; others > 0) {
    fmt::print("note: {} results there belong to other settings: kept and ignored\n", others);
  }
  std::fflush(stdout);
}

void run_cases(const SweepConfig& config, const std::vector<std::string>& case_command, SweepFile& file, int64_t done) {
  const std::vector<std::string> axes = varied_axes(config.cases);
  SweepProgress progress(done, static_cast<int64_t>(config.cases.size()));
  for (const Json& sweep_case : config.cases) {
    if (file.find(sweep_case) != nullptr) continue;
    check_stop();
    const std::string description = describe_work(sweep_case) + " " + describe_axes(sweep_case, axes);
    progress.starting(description);
    std::vector<std::string> command = case_command;
    command.push_back(sweep_case.dump());
    Json line = {{"tool", "sweep"}, {"version", tileloss_version()}, {"case", sweep_case}};
    line.update(run_child(command, config.limits));
    file.add(line);
    progress.finished(description, line);
  }
}

// A case that cannot even start would be recorded as a crash: the loader's, not the case's. It starts as this process did, and
// has room for that where there is room for this process.
void check_memory_limit(const ChildLimits& limits, int64_t own_bytes) {
  constexpr int64_t kMegabyte = 1'000'000;
  const int64_t least_mb = (own_bytes + kMegabyte - 1) / kMegabyte;
  if (limits.memory_mb == 0 || limits.memory_mb >= least_mb) return;
  throw ToolError(
      kExitUsage,
      fmt::format("memory_limit_mb: expected 0 (no limit) or at least {}, the address space of the program itself, got {}",
                  least_mb, limits.memory_mb));
}

int finish(const std::vector<Json>& lines) {
  fmt::print("{}", sweep_report(lines));
  std::map<std::string, int> counts;
  for (const Json& line : lines) ++counts[line.at("status").get<std::string>()];
  fmt::print("\n");
  for (const auto& [status, count] : counts) fmt::print("{}: {}\n", status, count);
  return counts.size() == 1 && counts.contains("ok") ? kExitPass : kExitCheckFailed;
}

constexpr const char* kFooter =
    "The config gives lists, or single values: loss (a name, or {name: cross_entropy, label_smoothing: 0.1}), shape\n"
    "(TOKENSxVOCAB), dtype, pass (forward, value_and_grad, backward), isa, threads, schedule, row_block, vocab_block, with an LM "
    "head\n"
    "(linear_*) hidden, head_layout (vh, hv), workspace (64MiB); and in_place, iters, warmup, seed, time_limit_s,\n"
    "memory_limit_mb, output. Every combination is a case, measured in a process of its own, and\n"
    "becomes a line of the results file at once: run the same command again after whatever stopped it, and it goes on from\n"
    "there. Exit code 1: every case has its line, but some are not ok. docs/sweep.md says more, configs/ has examples.";

}  // namespace

int run_sweep(const SweepConfig& config, const std::vector<std::string>& case_command) {
  SweepFile file(config.output);
  const int64_t done = count_done(config, file);
  print_start(config, file, done);
  try {
    run_cases(config, case_command, file, done);
  } catch (const Stopped&) {
    fmt::print("stopped with {} of {} cases done: the same command goes on from here\n", count_done(config, file),
               config.cases.size());
    throw;
  }
  std::vector<Json> lines;
  for (const Json& sweep_case : config.cases) lines.push_back(*file.find(sweep_case));
  return finish(lines);
}

void add_sweep(CLI::App& program, Action& action) {
  struct Command {
    std::string config;
    std::vector<std::string> overrides;
    std::string sweep_case;
  };
  auto command = std::make_shared<Command>();
  CLI::App* app = program.add_subcommand("sweep", "Time every combination of blocks, threads, instruction sets, shapes, losses");
  app->add_option("--config", command->config, "YAML file")->required();
  app->add_option("--set", command->overrides, "Override a key: threads=[1,2] (repeatable)")->allow_extra_args(false);
  app->footer(kFooter);
  app->callback([command, &action] {
    action = [command] {
      const int64_t own_bytes = virtual_bytes();  // before the cases, which are the parent's alone
      const SweepConfig config = read_sweep_config(command->config, command->overrides);
      check_memory_limit(config.limits, own_bytes);
      return run_sweep(config, {"/proc/self/exe", kCaseCommand});
    };
  });

  CLI::App* case_app = program.add_subcommand(kCaseCommand, "One case of a sweep")->group("");
  case_app->add_option("case", command->sweep_case, "As sweep writes it")->required();
  case_app->callback([command, &action] {
    action = [command] {
      const Json sweep_case = Json::parse(command->sweep_case, nullptr, /*allow_exceptions=*/false);
      fmt::print("{}\n", measure(sweep_case).dump());
      return kExitPass;
    };
  });
}

}  // namespace tileloss::tools
