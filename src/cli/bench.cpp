// tileloss bench: how long a loss takes, beside what the machine could do at best.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/bench_report.h"
#include "cli/subcommands.h"
#include "support/exit_codes.h"
#include "support/flags.h"
#include "support/format.h"
#include "support/output_file.h"
#include "support/printable.h"
#include "support/result_writer.h"
#include "support/signals.h"
#include "support/standard_streams.h"
#include "support/table.h"

namespace tileloss::tools {
namespace {

struct Command {
  BenchSettings settings;
  std::string dtype = "bf16";
  std::string workspace = "0";
  std::string head_layout = "vh";
  std::string dhead_dtype = "fp32";
  std::string implementation = "kernel";
  std::string device = "cpu";
  std::vector<std::string> options;
  std::string pass;  // "": forward, then the gradient in one call
  bool json = false;
  std::optional<std::string> output;
};

// "[64, 32000]", or "[64, 1536] x [32000, 1536]".
std::string shape_text(const BenchSettings& settings) {
  const int64_t hidden = settings.head.hidden;
  if (hidden == 0) return formatted("[{}, {}]", settings.tokens, settings.vocab);
  const bool turned = settings.head.is_transposed;
  return formatted("[{}, {}] x [{}, {}]{}", settings.tokens, hidden, turned ? hidden : settings.vocab,
                   turned ? settings.vocab : hidden, settings.head.is_frozen ? ", frozen head" : "");
}

Device device_of_flag(const std::string& name) {
  try {
    return Device(name);
  } catch (const ToolError& error) {
    throw ToolError(kExitUsage, std::string("--device: ") + error.what());
  }
}

using Cell = std::pair<std::string, std::string>;

// A pass as a row of the table, by column.
std::vector<Cell> cells(const Bench& bench, const BenchReport& report, const Timing& timing) {
  const auto megabytes = [](int64_t bytes) { return formatted("{:.2f}", static_cast<double>(bytes) / 1e6); };
  const auto milliseconds = [&](double ms) { return formatted("{:.{}f}", ms, timing.host_ns > 0 ? 4 : 2); };
  const double roof = bench.roof_ms(report.roofs, timing);
  const Json facts = timing.facts();
  std::vector<Cell> cells = {{"pass", timing.pass},
                             {"impl", timing.implementation},
                             {"isa", facts.value("isa", "-")},
                             {"schedule", facts.value("schedule", facts.value("kernel", "-"))},
                             {"first s", formatted("{:.3f}", timing.first_call_s)},
                             {"median ms", milliseconds(timing.median_ms)},
                             {"min ms", milliseconds(timing.min_ms)},
                             {"mean ms", milliseconds(timing.mean_ms)}};
  if (timing.host_ns > 0) cells.emplace_back("host us a call", formatted("{:.1f}", timing.host_ns / 1e3));
  if (bench.function().is_linear()) {
    for (const auto& [title, fact] : {std::pair{"kept columns", "kept_columns"}, {"rows in dhead", "kept_rows"}})
      cells.emplace_back(title, formatted("{}", facts.value(fact, int64_t{0})));
    cells.emplace_back("TFLOP/s", formatted("{:.3f}", tflops(timing)));
    if (report.roofs.tflops > 0) cells.emplace_back("of roof", formatted("{:.1f} %", 100 * tflops(timing) / report.roofs.tflops));
  } else {
    cells.emplace_back("GB/s", formatted("{:.1f}", gb_per_s(timing)));
  }
  cells.emplace_back("roof ms", milliseconds(roof));
  cells.emplace_back("ratio", formatted("{:.2f}", timing.median_ms / roof));
  cells.emplace_back("workspace MB", megabytes(timing.workspace_bytes()));
  cells.emplace_back("measured MB", megabytes(timing.mem_scratch));
  cells.emplace_back("peak MB", formatted("{:.0f}", static_cast<double>(timing.mem_peak) / 1e6));
  return cells;
}

void print_workspaces(const BenchReport& report) {
  Table table({"pass", "part of its workspace", "MB"});
  for (const Timing& timing : report.timings) {
    for (const tileloss_plan_buffer& buffer : timing.buffers()) {
      table.add({timing.pass, buffer.name, formatted("{:.2f}", static_cast<double>(buffer.bytes) / 1e6)});
    }
  }
  print_formatted("\n{}", table.text());
}

void print_table(const Command& command, const Bench& bench, const BenchReport& report) {
  const BenchSettings& settings = command.settings;
  const std::string where =
      settings.device.is_cpu() ? formatted("{} threads", bench.threads()) : "device " + settings.device.name();
  print_formatted("{}{} {} {}{}{}, {}, {} iterations after {}\n", settings.loss,
                  bench.function().preset().empty() ? "" : " " + bench.function().preset(), shape_text(settings),
                  reference::format_info(settings.dtype).name, settings.in_place ? ", in place" : "",
                  settings.entropy ? ", with entropy" : "", where, settings.iterations, settings.warmup);
  if (const Json options = bench.function().to_json(); !options.empty()) print_formatted("options {}\n", options.dump());
  Table roofs({"roof", "ms"});
  roofs.add({"in place: read + write", formatted("{:.2f}", report.roofs.in_place_ms)});
  roofs.add({"copy: read + non-temporal write", formatted("{:.2f}", report.roofs.copy_ms)});
  roofs.add({"read", formatted("{:.2f}", report.roofs.read_ms)});
  if (report.roofs.exp_ms > 0) roofs.add({"exp: one an element, in L1", formatted("{:.2f}", report.roofs.exp_ms)});
  if (report.roofs.tflops > 0) roofs.add({"products, in L1", formatted("{:.3f} TFLOP/s", report.roofs.tflops)});
  print_formatted("\n{}{}\n\n", roofs.text(), report.roofs_description);

  if (report.timings.empty()) return;
  std::vector<std::string> header;
  for (const auto& [name, value] : cells(bench, report, report.timings.front())) header.push_back(name);
  Table table(header);
  for (const Timing& timing : report.timings) {
    std::vector<std::string> row;
    for (const auto& [name, value] : cells(bench, report, timing)) row.push_back(value);
    table.add(std::move(row));
  }
  print_formatted("{}", table.text());
  for (const Timing& timing : report.timings) {
    if (const auto ratio = speedup(report, timing)) print_formatted("{}: {:.1f} x the reference\n", timing.pass, *ratio);
  }
  if (bench.function().is_linear()) print_workspaces(report);
}

void tell(const Command& command, const Bench& bench, const BenchReport& report, ResultWriter& writer) {
  if (!command.json) print_table(command, bench, report);
  for (const Timing& timing : report.timings) {
    Json line = {{"tool", "bench"}, {"version", tileloss_version()}};
    line.update(to_json(command.settings, bench, report, timing));
    if (command.json) print_formatted("{}\n", line.dump());
    writer.write(line);
  }
  if (report.roofs_difference && !is_steady(report)) {
    std::fflush(stdout);
    write_stderr(
        formatted("tileloss: warning: the roofs at the start and at the end differ by {:.0f} %: the machine was not quiet\n",
                  *report.roofs_difference * 100));
  }
}

std::vector<tileloss_pass> passes_of(const Command& command, const Bench& bench) {
  if (command.pass.empty()) return {TILELOSS_FORWARD, bench.gradient_pass()};
  const tileloss_pass pass = parse_pass(command.pass);
  bench.check_pass(pass, command.implementation != "kernel");
  return {pass};
}

int run_bench(Command command) {
  BenchSettings& settings = command.settings;
  settings.dtype = parse_dtype(command.dtype);
  settings.options = parse_overrides(command.options);
  const std::optional<int64_t> workspace = parse_bytes(command.workspace);
  if (!workspace) {
    throw ToolError(kExitUsage, formatted("--workspace: expected {}, got '{}'", kBytesExpected, shown(command.workspace)));
  }
  settings.kernel.workspace_bytes = *workspace;
  settings.head.is_transposed = command.head_layout == "hv";
  settings.head.dhead_dtype = parse_dtype(command.dhead_dtype);
  settings.device = device_of_flag(command.device);
  if (!settings.device.is_cpu()) {
    if (command.implementation != "kernel")
      throw ToolError(kExitUsage, "--device: the reference runs on the cpu alone; use --impl kernel");
    (void)settings.device.memory();  // before anything is allocated
  }
  if (command.output) check_output("--output", *command.output, {});
  ResultWriter writer(command.output);  // before the work, so that a file that cannot be written is known at once
  Bench bench(command.settings);
  const std::vector<tileloss_pass> passes = passes_of(command, bench);
  BenchReport report;
  try {
    time_passes(bench, passes, command.implementation != "reference", command.implementation != "kernel", report);
  } catch (const Stopped&) {
    tell(command, bench, report, writer);  // what was measured so far, against the first roofs
    throw;
  }
  tell(command, bench, report, writer);
  return kExitPass;
}

constexpr const char* kFooter =
    "Roofs are measured on the same buffers with the same number of threads before and after the passes, each the median of the\n"
    "fastest of several loops; the faster of both counts. Buffers are reused, touched and on huge pages; logits are random\n"
    "(64 rows, repeated down the matrix). Policy losses get sequences of 256 tokens, advantages of both signs and old_logp near\n"
    "the kernel's logp; max_length, where one is needed and none given, is the longest sequence's. An in-place pass overwrites\n"
    "the logits: they are put back before each call, outside the timing. The copy roof of an in-place run copies one half of\n"
    "the matrix over the other and counts it twice. The reference materialises float32 logits and softmax (8 bytes an element)\n"
    "and runs at most 5 iterations. --pass backward is what PyTorch runs by default, the gradient from the row state that a\n"
    "forward has saved: it reads and writes as much as value_and_grad, and has the same roof. The forward is not timed.\n"
    "A distillation's teacher is drawn apart from the student; it saves no row state, and its backward is a value_and_grad\n"
    "without the loss. linear_distillation's two heads have the same width.\n"
    "With the LM head (linear_*): the hidden states are normal numbers, the head normal / sqrt(H). TFLOP/s count useful work,\n"
    "2 N H V for a side's logits and as much again for each of dhidden and dhead, whatever the schedule computes twice; the roof "
    "is\n"
    "the kernels' inner loop over random panels in L1. 'measured' is the peak above inputs, outputs and code.\n"
    "With --device cuda a time is the mean of many calls that are queued at once, and roofs are the device's own copies; caches\n"
    "do not hold the tensors of the call before. 'host us a call': until the host has queued one.\n"
    "The Python package's command also has --frontend jax: the times of tileloss.jax.";

}  // namespace

void add_bench(CLI::App& program, Action& action) {
  auto command = std::make_shared<Command>();
  BenchSettings& settings = command->settings;
  CLI::App* app = program.add_subcommand("bench", "Time a loss and its gradient, and the machine's roofs in the same run");
  app->add_option("--loss", settings.loss, "cross_entropy, logprobs, ...")->capture_default_str();
  app->add_option("--preset", settings.preset, "Of a policy loss: grpo, gspo, ...");
  app->add_option("--tokens", settings.tokens, "Rows")->transform(integer_in(1, int64_t{1} << 31))->capture_default_str();
  app->add_option("--vocab", settings.vocab, "Columns")->transform(integer_in(1, int64_t{1} << 31))->capture_default_str();
  app->add_option("--dtype", command->dtype, "Of the logits, or of hidden and head")
      ->check(one_of(dtype_names()))
      ->capture_default_str();
  app->add_option("--hidden", settings.head.hidden, "Hidden size, for the functions linear_*")
      ->transform(integer_in(1, int64_t{1} << 20));
  app->add_option("--head-layout", command->head_layout, "The head lies as [V,H] or as [H,V]")
      ->check(one_of({"vh", "hv"}))
      ->capture_default_str();
  app->add_option("--dhead-dtype", command->dhead_dtype, "Of the head's gradient: fp32, or the head's dtype")
      ->check(one_of(dtype_names()))
      ->capture_default_str();
  app->add_flag("--frozen-head", settings.head.is_frozen, "No gradient of the head");
  app->add_option("--workspace", command->workspace, "A cap on scratch memory: 64MiB; 0: the planner's choice")
      ->capture_default_str();
  app->add_flag("--in-place", settings.in_place, "dlogits over the logits themselves");
  app->add_option("--pass", command->pass, "That pass alone, in place of forward and gradient; backward: from a saved row state")
      ->check(one_of(pass_names()));
  app->add_flag("--entropy", settings.entropy, "Ask for each row's entropy as well");
  app->add_option("--impl", command->implementation, "The kernel, a plain unfused baseline (reference), or both")
      ->check(one_of({"kernel", "reference", "both"}))
      ->capture_default_str();
  app->add_option("--device", command->device, "cpu, cuda or cuda:N; there by the device's own clock")->capture_default_str();
  app->add_option("--iters", settings.iterations, "Timed calls")->transform(integer_in(1, 1'000'000))->capture_default_str();
  app->add_option("--warmup", settings.warmup, "Calls before them")->transform(integer_in(0, 1'000'000))->capture_default_str();
  app->add_option("--seed", settings.seed, "Of the logits and labels")
      ->transform(integer_in(0, std::numeric_limits<int64_t>::max()))
      ->capture_default_str();
  app->add_option("--isa", settings.kernel.isa, "Instruction set")->check(one_of(isa_names()))->capture_default_str();
  app->add_option("--schedule", settings.kernel.schedule, "Of value_and_grad")
      ->check(one_of(schedule_names()))
      ->capture_default_str();
  app->add_option("--threads", settings.kernel.threads, "0: as many as the library takes")
      ->transform(integer_in(0, kMaxThreads))
      ->capture_default_str();
  app->add_option("--row-block", settings.kernel.row_block, "Rows a thread takes at a time; 0: the planner's choice")
      ->transform(integer_in(0, int64_t{1} << 31))
      ->capture_default_str();
  app->add_option("--vocab-block", settings.kernel.vocab_block, "Columns of a tile, a multiple of 64; 0: the planner's choice")
      ->transform(integer_in(0, int64_t{1} << 31))
      ->capture_default_str();
  app->add_option("--cuda-kernel", settings.kernel.cuda_kernel, "With --device cuda, from logits")
      ->check(one_of(cuda_kernel_names()))
      ->capture_default_str();
  app->add_option("--set", command->options, "An option of the loss: label_smoothing=0.1 (repeatable)")->allow_extra_args(false);
  app->add_flag("--json", command->json, "One JSON object a line, value_and_grad last");
  app->add_option("--output", command->output, "Append the same lines to this results file");
  app->footer(kFooter);
  app->callback([command, &action] { action = [command] { return run_bench(*command); }; });
}

}  // namespace tileloss::tools
