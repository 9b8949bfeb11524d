// A case's process: every way in which it can end. Shell scripts stand in for cases that crash, hang or fail.
#include "bench/sweep_child.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "bench/sweep_file.h"
#include "support/format.h"
#include "tests/bench/sweep_support.h"

namespace tileloss::tools {
namespace {

using test::read_text;
using test::TemporaryFolder;

Json run_script(const std::string& script, const ChildLimits& limits = {60, 0}) {
  return run_child({"/bin/sh", "-c", script}, limits);
}

std::string message_of(const Json& outcome) { return outcome.value("message", ""); }

TEST(SweepChild, AReportInTheLastLineIsTheOutcome) {
  const Json outcome = run_script("echo warming up; echo '{\"status\":\"ok\",\"median_ms\":1.5}'");
  EXPECT_EQ(outcome["status"], "ok");
  EXPECT_EQ(outcome["median_ms"], 1.5);
  EXPECT_GT(outcome["seconds"], 0.0);
}

TEST(SweepChild, ALongOutputKeepsItsReport) {
  const Json outcome = run_script("yes 0123456789 | head -c 1000000; echo; echo '{\"status\":\"ok\"}'");
  EXPECT_EQ(outcome["status"], "ok") << outcome.dump().substr(0, 500);
}

TEST(SweepChild, ACrashIsNamedWithItsSignalAndLastWords) {
  const Json outcome = run_script("echo 'heap is broken' >&2; kill -SEGV $$");
  EXPECT_EQ(outcome["status"], "crashed");
  EXPECT_EQ(outcome["signal"], SIGSEGV);
  EXPECT_NE(message_of(outcome).find("heap is broken"), std::string::npos) << outcome;
}

TEST(SweepChild, AReportBeforeACrashDoesNotCount) {
  EXPECT_EQ(run_script("echo '{\"status\":\"ok\"}'; kill -ABRT $$")["status"], "crashed");
  const Json failed = run_script("echo '{\"status\":\"ok\"}'; exit 7");
  EXPECT_EQ(failed["status"], "error");
  EXPECT_NE(message_of(failed).find("exit code 7"), std::string::npos) << failed;
}

TEST(SweepChild, NoReportIsAnError) {
  for (const char* script : {"true", "echo hello", "echo '[1]'", "echo '{\"median_ms\":1}'", "echo '{\"status\":3}'"}) {
    EXPECT_EQ(run_script(script)["status"], "error") << script;
  }
}

TEST(SweepChild, AProgramThatIsNotThereIsAnErrorNamingIt) {
  const Json outcome = run_child({"/nonexistent/program"}, {60, 0});
  EXPECT_EQ(outcome["status"], "error");
  EXPECT_NE(message_of(outcome).find("/nonexistent/program"), std::string::npos) << outcome;
}

// 'S' for a sleeping process, 'Z' for a zombie that nobody has reaped, 0 for none.
char process_state(pid_t process) {
  const std::string text = read_text("/proc/" + std::to_string(process) + "/stat");
  const size_t name_end = text.rfind(") ");
  return name_end == std::string::npos ? '\0' : text[name_end + 2];
}

TEST(SweepChild, TheTimeLimitKillsTheWholeProcessGroup) {
  const TemporaryFolder folder;
  const std::string file = (folder.path() / "pid").string();
  std::string said;
  for (const double seconds : {0.3, 3.0, 30.0}) {  // on a busy machine the script comes as far only later
    const Json outcome = run_script("sleep 3000 & echo $! > " + file + "; echo waiting; wait", {seconds, 0});
    EXPECT_EQ(outcome["status"], "timeout");
    said = message_of(outcome);
    if (said == formatted("killed after {:g} s; it said: waiting", seconds)) break;
  }
  EXPECT_NE(said.find("it said: waiting"), std::string::npos) << said;
  const pid_t grandchild = std::stoi(read_text(file));
  for (int i = 0; i < 30'000 && process_state(grandchild) == 'S'; ++i) usleep(10'000);
  EXPECT_NE(process_state(grandchild), 'S');
}

TEST(SweepChild, TheTimeLimitHoldsForAChildThatClosesItsOutput) {
  EXPECT_EQ(run_script("exec >&- 2>&-; sleep 3000", {0.2, 0})["status"], "timeout");
}

TEST(SweepChild, TheMemoryLimitIsSet) {
  const Json outcome = run_script("echo \"{\\\"status\\\":\\\"ok\\\",\\\"kib\\\":$(ulimit -v)}\"", {60, 4000});
  EXPECT_EQ(outcome["status"], "ok") << outcome;
  EXPECT_EQ(outcome["kib"], 4'000'000'000 / 1024);
}

TEST(SweepChild, AKillByTheKernelForMemoryIsOutOfMemory) {
  ChildEnd end;
  end.wait_status = SIGKILL;  // as wait() reports it
  ASSERT_TRUE(WIFSIGNALED(end.wait_status));
  EXPECT_EQ(outcome_of(end, {})["status"], "crashed");
  end.oom_killer_ran = true;
  EXPECT_EQ(outcome_of(end, {})["status"], "out_of_memory");
  end.wait_status = SIGSEGV;
  EXPECT_EQ(outcome_of(end, {})["status"], "crashed");
}

TEST(SweepChild, SecretsStayInTheParent) {
  setenv("WANDB_API_KEY", "secret", 1);
  setenv("TILELOSS_TEST_PLAIN", "plain", 1);
  const Json outcome = run_script("echo \"${WANDB_API_KEY-none} $TILELOSS_TEST_PLAIN\"; exit 1");
  unsetenv("WANDB_API_KEY");
  unsetenv("TILELOSS_TEST_PLAIN");
  EXPECT_EQ(message_of(outcome), "exit code 1; it said: none plain");
}

// The results file and its lock are open in the parent; a child has its three standard descriptors and what the shell opens.
TEST(SweepChild, InheritsNoDescriptor) {
  const TemporaryFolder folder;
  const SweepFile file(folder.path() / "r.jsonl");
  const Json outcome = run_script("ls -l /proc/$$/fd | grep -c jsonl; exit 1");
  EXPECT_EQ(message_of(outcome), "exit code 1; it said: 0");
}

}  // namespace
}  // namespace tileloss::tools
