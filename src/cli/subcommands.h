// A subcommand is one file with one of these functions, and one line in main.cpp.
#ifndef TILELOSS_CLI_SUBCOMMANDS_H_
#define TILELOSS_CLI_SUBCOMMANDS_H_

#include <functional>

#include "check/gradcheck_run.h"

namespace CLI {
class App;
}

namespace tileloss::tools {

// What the chosen subcommand does; it returns the exit code.
using Action = std::function<int()>;

// Adds the subcommand's flags to the program; its callback sets `action`.
void add_gradcheck(CLI::App& program, Action& action);
// `guarded` makes the calls on guard-page buffers that --strict asks for: a test plants overruns there.
void add_gradcheck(CLI::App& program, Action& action, const KernelCall& guarded);
void add_judge(CLI::App& program, Action& action);
void add_bench(CLI::App& program, Action& action);
void add_sweep(CLI::App& program, Action& action);
void add_info(CLI::App& program, Action& action);

}  // namespace tileloss::tools

#endif  // TILELOSS_CLI_SUBCOMMANDS_H_
