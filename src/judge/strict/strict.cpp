#include "judge/strict/strict.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "judge/strict/guarded_args.h"
#include "support/exit_codes.h"
#include "support/format.h"

namespace tileloss::tools {
namespace {

using Rows = GuardLayout::Rows;

constexpr GuardLayout kLayouts[] = {
    {Flush::kRight, Rows::kAdjoining}, {Flush::kLeft, Rows::kAdjoining}, {Flush::kRight, Rows::kGaps},
    {Flush::kRight, Rows::kApart},     {Flush::kLeft, Rows::kApart},     {Flush::kRight, Rows::kGroups},
    {Flush::kLeft, Rows::kGroups},
};

// A kernel that an overrun has made to loop must not hang the check. The calls take well below a second, sanitized ones seconds.
constexpr unsigned kTimeLimitS = 300;

constexpr char kFaultTag = 'F';
constexpr char kTextTag = 'T';

struct FaultMessage {
  char tag;
  MemoryFault fault;
};

// Where the child's signal handler reports to.
int g_report_descriptor = -1;

MemoryFault::Access access_of(const void* context) {
#if defined(__x86_64__)
  constexpr greg_t kWriteBit = 2;  // of the page fault's error code
  const greg_t error = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR];
  return (error & kWriteBit) != 0 ? MemoryFault::kWrite : MemoryFault::kRead;
#else
  static_cast<void>(context);
  return MemoryFault::kUnknown;
#endif
}

// Only async-signal-safe calls. The parent, which has the same buffers at the same addresses, finds out whose address it is.
void on_fault(int /*signal*/, siginfo_t* info, void* context) {
  FaultMessage message;
  std::memset(&message, 0, sizeof message);
  message.tag = kFaultTag;
  message.fault = {reinterpret_cast<uintptr_t>(info->si_addr), access_of(context)};
  const bool is_sent = write(g_report_descriptor, &message, sizeof message) == static_cast<ssize_t>(sizeof message);
  _exit(is_sent ? kExitPass : kExitEnvironment);
}

void send(int descriptor, const std::string& text) {
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t count = write(descriptor, text.data() + sent, text.size() - sent);
    if (count < 0) _exit(kExitEnvironment);
    sent += static_cast<size_t>(count);
  }
}

std::string receive(int descriptor) {
  std::string text;
  char buffer[4096];
  for (;;) {
    const ssize_t count = read(descriptor, buffer, sizeof buffer);
    if (count > 0) text.append(buffer, static_cast<size_t>(count));
    if (count == 0 || (count < 0 && errno != EINTR)) return text;
  }
}

using Work = std::function<std::vector<std::string>()>;

[[noreturn]] void run_child(int descriptor, const Work& work) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  g_report_descriptor = descriptor;
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
  std::signal(SIGALRM, SIG_DFL);
  alarm(kTimeLimitS);
  std::string text(1, kTextTag);
  try {
    for (const std::string& finding : work()) text += finding + "\n";
  } catch (const std::exception& error) {
    text += std::string(error.what()) + "\n";
  }
  send(descriptor, text);
  _exit(kExitPass);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines = split(text, '\n');
  if (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

// What `work` returns when it runs in a child process, or why it did not get so far.
std::vector<std::string> run_in_child(const Work& work, const std::function<std::string(const MemoryFault&)>& describe) {
  int ends[2];
  if (pipe(ends) != 0) throw ToolError(kExitEnvironment, "strict: cannot open a pipe");
  const pid_t child = fork();
  if (child < 0) throw ToolError(kExitEnvironment, "strict: cannot fork");
  if (child == 0) {
    close(ends[0]);
    run_child(ends[1], work);
  }
  close(ends[1]);
  const std::string report = receive(ends[0]);
  close(ends[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (report.size() >= sizeof(FaultMessage) && report[0] == kFaultTag) {
    FaultMessage message;
    std::memcpy(&message, report.data(), sizeof message);
    return {describe(message.fault)};
  }
  if (WIFSIGNALED(status))
    return {formatted("the call ended with signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)))};
  if (report.empty() || report[0] != kTextTag) return {"the call ended the process"};
  return lines_of(report.substr(1));
}

// The guarded tensors may have other strides, hence another plan; all else is what was planned. With the LM head a dhead with
// gaps holds none of the logits, and the workspace more of them, which changes no bit.
KernelHints same_choices(const tileloss_plan& plan) {
  KernelHints hints{tileloss_isa_name(plan.cpu.isa), tileloss_schedule_name(plan.cpu.schedule), plan.cpu.threads,
                    plan.cpu.row_block, plan.cpu.vocab_block};
  hints.chunk_columns = plan.cpu.chunk_columns;
  return hints;
}

// By labels or mask, as far as these have the types that a check gives them.
std::vector<int64_t> unused_rows(const Function& function, const tileloss_args& args) {
  const int64_t ignored = function.get_integer("ignore_index", -100);
  const bool has_mask = args.mask.dtype == TILELOSS_UINT8 && args.mask.stride == 1;
  std::vector<int64_t> rows;
  const int64_t count = std::max<int64_t>(args.labels_per_row, 1);
  for (int64_t i = 0; args.labels.dtype == TILELOSS_INT64 && i < args.labels.size / count; ++i) {
    bool is_unused = true;
    for (int64_t k = 0; k < count; ++k)
      is_unused &= static_cast<const int64_t*>(args.labels.data)[(i * count + k) * args.labels.stride] == ignored;
    if (is_unused || (has_mask && static_cast<const uint8_t*>(args.mask.data)[i] == 0)) rows.push_back(i);
  }
  return rows;
}

}  // namespace

std::string StrictReport::text() const {
  std::string text;
  for (const std::string& finding : findings) text += "strict: " + finding + "\n";
  const std::string of_columns = columns == all_columns ? "" : formatted(", {} of {} columns", columns, all_columns);
  text += formatted("strict: {} calls in {} layouts of guard-page buffers, {} of {} rows{}: {}\n", calls, layouts, rows, all_rows,
                    of_columns, findings.empty() ? "nothing found" : formatted("{} findings", findings.size()));
  return text;
}

Json StrictReport::to_json() const {
  return {{"rows", rows}, {"columns", columns}, {"calls", calls}, {"layouts", layouts}, {"findings", findings}};
}

void call_strictly(const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
                   const KernelCall& kernel, StrictReport& report) {
  ++report.calls;
  report.layouts = 0;
  for (const GuardLayout& layout : kLayouts) {
    if (!GuardedArgs::is_of_use(args, layout)) continue;
    ++report.layouts;
    GuardedArgs guarded(pass, args, layout, function.get_integer("accumulate", 0) != 0);
    const tileloss_plan guarded_plan = make_plan(function, pass, guarded.args(), same_choices(plan));
    guarded.hide_sets(unused_rows(function, args));
    const tileloss_run run = guarded.add_workspace(guarded_plan);
    const auto work = [&] {
      kernel(function, pass, guarded.args(), guarded_plan, &run);
      call(function, pass, args, plan);
      return guarded.compare(args);
    };
    for (const std::string& finding : run_in_child(work, [&](const MemoryFault& fault) { return guarded.describe(fault); })) {
      report.findings.push_back(
          formatted("{}, {} {}, {}", finding, function.name(), pass_name(pass), tileloss_isa_name(plan.cpu.isa)));
    }
  }
  if (report.findings.empty()) call(function, pass, args, plan);
}

}  // namespace tileloss::tools
