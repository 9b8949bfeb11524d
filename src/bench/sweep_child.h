// A case in a process of its own: whatever happens to it, the sweep goes on.
#ifndef TILELOSS_BENCH_SWEEP_CHILD_H_
#define TILELOSS_BENCH_SWEEP_CHILD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "support/json.h"

namespace tileloss::tools {

struct ChildLimits {
  double seconds = 300;   // of wall time, then it is killed
  int64_t memory_mb = 0;  // of address space (RLIMIT_AS); 0: no limit
};

// How a child ended, as far as its parent can see.
struct ChildEnd {
  int wait_status = 0;
  bool timed_out = false;
  bool oom_killer_ran = false;  // somewhere on this machine, meanwhile
  std::string output;           // the last of its stdout and stderr
};

// "status": ok, timeout, crashed, out_of_memory or error, a "message" for all but ok, the "signal" of a crash; the rest is what
// the child reported. Its report is an object with a status in the last line of its output, and counts if it exits with 0.
Json outcome_of(const ChildEnd& end, const ChildLimits& limits);

// Runs `command` (the program's path first) in a process group of its own, which a signal sent to this process's group does not
// reach but which dies with this process, however that ends. Its standard input is empty; secrets are taken from its environment.
// Throws Stopped, with the child dead, when this process is asked to stop, and ToolError (environment) if it cannot fork.
Json run_child(const std::vector<std::string>& command, const ChildLimits& limits);

}  // namespace tileloss::tools

#endif  // TILELOSS_BENCH_SWEEP_CHILD_H_
