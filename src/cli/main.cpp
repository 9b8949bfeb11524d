// The `tileloss` program: finds the subcommand, turns every error into one line on stderr and an exit code.
#include <tileloss/tileloss.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>

#include "cli/subcommands.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/signals.h"
#include "support/standard_streams.h"

namespace tileloss::tools {
namespace {

constexpr void (*kSubcommands[])(CLI::App&, Action&) = {
    add_gradcheck, add_judge, add_bench, add_sweep, add_info,
};

// The parser's messages quote the command line, and may list all subcommands.
constexpr size_t kLongestUsageError = 1000;

// In pieces: to put them together takes memory, which may be what is lacking.
int report(int code, const char* message) {
  std::fflush(stdout);
  for (const char* piece : {"tileloss: ", message, "\n"}) write_stderr(piece);
  return code;
}

// A full disk behind standard output shows only when it is flushed.
int finish(int code) {
  if (std::cout.flush() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  return report(kExitEnvironment, "cannot write to standard output");
}

int run(const Action& action) {
  try {
    return finish(action());
  } catch (const ToolError& error) {
    return report(error.code(), error.what());
  } catch (const Stopped& stopped) {
    return report(128 + stopped.signal, stopped.signal == 2 ? "stopped by SIGINT" : "stopped by SIGTERM");
  } catch (const std::bad_alloc&) {
    return report(kExitEnvironment, "out of memory");
  } catch (const std::exception& error) {
    return report(kExitEnvironment, escaped(error.what()).c_str());
  }
}

int main_program(int argc, char** argv) {
  occupy_standard_descriptors();
  CLI::App program{
      "TileLoss: tiled cross-entropy, log-probabilities and policy losses over large vocabularies, checked and measured."};
  program.set_version_flag("--version", tileloss_version());
  program.require_subcommand(0, 1);
  program.footer("Exit codes: 0 pass, 1 a check failed, 2 usage or config error, 3 memory, device or file system.");
  Action action;
  for (const auto add : kSubcommands) add(program, action);
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) return report(kExitUsage, shown(error.what(), kLongestUsageError).c_str());
    return finish(program.exit(error));  // prints help or version
  }
  if (!action) {
    action = [&program] {
      print_formatted("{}", program.help());
      return kExitUsage;
    };
  }
  install_signal_handlers();
  return run(action);
}

}  // namespace
}  // namespace tileloss::tools

int main(int argc, char** argv) { return tileloss::tools::main_program(argc, argv); }
