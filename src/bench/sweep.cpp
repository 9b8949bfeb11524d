#include "bench/sweep.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "bench/sweep_case.h"
#include "bench/sweep_file.h"
#include "bench/sweep_report.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/progress.h"
#include "support/signals.h"
#include "support/standard_streams.h"
#include "support/timer.h"

namespace tileloss::tools {
namespace {

// Where a sweep stands, on stderr: a bar on a terminal, a line a case otherwise.
class SweepProgress {
 public:
  // `done` of the `total` cases have results from an earlier run.
  SweepProgress(int64_t done, int64_t total)
      : terminal_(isatty(STDERR_FILENO) == 1), done_before_(done), done_(done), total_(total) {}
  // Takes the bar away.
  ~SweepProgress() {
    if (terminal_) clear_bar();
  }
  SweepProgress(const SweepProgress&) = delete;
  SweepProgress& operator=(const SweepProgress&) = delete;

  void starting(const std::string& description) {
    if (terminal_) show_bar(done_, total_, done_before_, since_start_, description);
  }
  // Failures stay on the terminal, above the bar.
  void finished(const std::string& description, const Json& result) {
    ++done_;
    if (terminal_ && result.at("status") == "ok") return;
    if (terminal_) clear_bar();
    write_stderr(formatted("[{}/{}] {}: {}\n", done_, total_, description, describe_result(result)));
  }

 private:
  bool terminal_;
  int64_t done_before_, done_, total_;
  Timer since_start_;
};

int64_t count_done(const SweepConfig& config, const SweepFile& file) {
  return std::count_if(config.cases.begin(), config.cases.end(), [&](const Json& c) { return file.find(c) != nullptr; });
}

void print_start(const SweepConfig& config, const SweepFile& file, int64_t done) {
  print_formatted("sweep {}: {} cases, results in {}\n", shown(config.file), config.cases.size(), shown(config.output.string()));
  if (done > 0) print_formatted("{} of them are there already\n", done);
  if (const int64_t others = file.size() - done; others > 0) {
    print_formatted("note: {} results there belong to other settings: kept and ignored\n", others);
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

int finish(const std::vector<Json>& lines) {
  print_formatted("{}", sweep_report(lines));
  std::map<std::string, int> counts;
  for (const Json& line : lines) ++counts[line.at("status").get<std::string>()];
  print_formatted("\n");
  for (const auto& [status, count] : counts) print_formatted("{}: {}\n", status, count);
  return counts.size() == 1 && counts.contains("ok") ? kExitPass : kExitCheckFailed;
}

}  // namespace

void check_memory_limit(const ChildLimits& limits, int64_t own_bytes) {
  constexpr int64_t kMegabyte = 1'000'000;
  const int64_t least_mb = (own_bytes + kMegabyte - 1) / kMegabyte;
  if (limits.memory_mb == 0 || limits.memory_mb >= least_mb) return;
  throw ToolError(
      kExitUsage,
      formatted("memory_limit_mb: expected 0 (no limit) or at least {}, the address space of the program itself, got {}",
                least_mb, limits.memory_mb));
}

int run_sweep(const SweepConfig& config, const std::vector<std::string>& case_command) {
  SweepFile file(config.output);
  const int64_t done = count_done(config, file);
  print_start(config, file, done);
  try {
    run_cases(config, case_command, file, done);
  } catch (const Stopped&) {
    print_formatted("stopped with {} of {} cases done: the same command goes on from here\n", count_done(config, file),
                    config.cases.size());
    throw;
  }
  std::vector<Json> lines;
  for (const Json& sweep_case : config.cases) lines.push_back(*file.find(sweep_case));
  return finish(lines);
}

}  // namespace tileloss::tools
