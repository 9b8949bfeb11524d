#include "bench/sweep_child.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/descriptor.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/signals.h"
#include "support/standard_streams.h"
#include "support/timer.h"

namespace tileloss::tools {
namespace {

// A report has some 500 bytes, a sanitizer's some thousand.
constexpr size_t kKeptOutput = 1 << 16;
constexpr size_t kMaxMessage = 300;
// The kernel's out-of-memory killer takes the child and not the sweep, nor what else runs here.
constexpr const char* kFirstVictim = "1000";

[[noreturn]] void fail(const char* action) {
  throw ToolError(kExitEnvironment, formatted("sweep: cannot {}: {}", action, std::strerror(errno)));
}

// Only what may follow a fork. The parent has no other threads, so that the C library's locks are free.
[[noreturn]] void become(const std::vector<char*>& argv, const ChildLimits& limits, pid_t parent, int output) {
  // Dies with its parent; which may have died already.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
  setpgid(0, 0);
  const int input = open("/dev/null", O_RDONLY | O_CLOEXEC);
  dup2(input, STDIN_FILENO);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  std::ofstream("/proc/self/oom_score_adj") << kFirstVictim;
  unsetenv("WANDB_API_KEY");
  if (limits.memory_mb > 0) {
    const auto bytes = static_cast<rlim_t>(limits.memory_mb) * 1'000'000;
    const rlimit limit = {bytes, bytes};
    setrlimit(RLIMIT_AS, &limit);
  }
  execv(argv[0], argv.data());
  write_stderr(formatted("cannot start {}: {}\n", argv[0], std::strerror(errno)));
  _exit(127);
}

// Reads until the child has closed its end; false at the time limit or when asked to stop.
bool collect(int pipe_end, const Timer& timer, double seconds, std::string& output) {
  while (wait_for(pipe_end, POLLIN, seconds - timer.seconds())) {
    char buffer[4096];
    const ssize_t count = read(pipe_end, buffer, sizeof buffer);
    if (count == 0) return true;
    if (count < 0) continue;
    output.append(buffer, static_cast<size_t>(count));
    if (output.size() > 2 * kKeptOutput) output.erase(0, output.size() - kKeptOutput);
  }
  return false;
}

// A child that has closed its output is about to end; one that does not is killed like any other.
bool ends_by_itself(pid_t child, const Timer& timer, double seconds, int& status) {
  for (long nap_ns = 100'000; stop_requested() == 0 && timer.seconds() < seconds; nap_ns = std::min(2 * nap_ns, 50'000'000L)) {
    if (waitpid(child, &status, WNOHANG) == child) return true;
    const timespec nap = {0, nap_ns};
    nanosleep(&nap, nullptr);
  }
  return false;
}

int64_t oom_kills() {
  std::ifstream in("/proc/vmstat");
  std::string name;
  int64_t value = 0;
  while (in >> name >> value) {
    if (name == "oom_kill") return value;
  }
  return 0;
}

std::string last_line(const std::string& text) {
  const size_t end = text.find_last_not_of("\n ");
  if (end == std::string::npos) return "";
  const size_t start = text.rfind('\n', end);
  return text.substr(start == std::string::npos ? 0 : start + 1, end - (start == std::string::npos ? 0 : start + 1) + 1);
}

Json failure(const char* status, const std::string& what, const ChildEnd& end) {
  const std::string said = last_line(end.output);
  return {{"status", status}, {"message", said.empty() ? what : formatted("{}; it said: {}", what, shown(said, kMaxMessage))}};
}

}  // namespace

Json outcome_of(const ChildEnd& end, const ChildLimits& limits) {
  if (end.timed_out) return failure("timeout", formatted("killed after {:g} s", limits.seconds), end);
  if (WIFSIGNALED(end.wait_status)) {
    const int signal = WTERMSIG(end.wait_status);
    if (signal == SIGKILL && end.oom_killer_ran) return failure("out_of_memory", "killed by the kernel for its memory", end);
    Json crash = failure("crashed", formatted("signal {}, {}", signal, strsignal(signal)), end);
    crash["signal"] = signal;
    return crash;
  }
  if (const int code = WEXITSTATUS(end.wait_status); code != 0) return failure("error", formatted("exit code {}", code), end);
  const Json report = Json::parse(last_line(end.output), nullptr, /*allow_exceptions=*/false);
  const bool reported = report.is_object() && report.contains("status") && report["status"].is_string();
  return reported ? report : failure("error", "no report", end);
}

Json run_child(const std::vector<std::string>& command, const ChildLimits& limits) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail("make a pipe");
  const Descriptor read_end(ends[0]);
  Descriptor write_end(ends[1]);
  std::vector<char*> argv;
  for (const std::string& argument : command) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const int64_t oom_kills_before = oom_kills();
  const Timer timer;
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) fail("start a process");
  if (child == 0) become(argv, limits, parent, write_end.get());
  setpgid(child, child);  // here as well as there: whichever comes first
  write_end.reset();

  ChildEnd end;
  const bool ended =
      collect(read_end.get(), timer, limits.seconds, end.output) && ends_by_itself(child, timer, limits.seconds, end.wait_status);
  if (!ended) {
    kill(-child, SIGKILL);
    waitpid(child, &end.wait_status, 0);
    check_stop();
    end.timed_out = true;
  }
  end.oom_killer_ran = oom_kills() > oom_kills_before;
  Json outcome = outcome_of(end, limits);
  outcome["seconds"] = timer.seconds();
  return outcome;
}

}  // namespace tileloss::tools
