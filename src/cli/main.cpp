// The `tileloss` program: finds the subcommand, turns every error into one line on stderr and an exit code.
#include <tileloss/tileloss.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <iterator>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "cli/subcommands.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/signals.h"
#include "support/standard_streams.h"
#include "support/suggestion.h"

namespace tileloss::tools {
namespace {

constexpr void (*kSubcommands[])(CLI::App&, Action&) = {
    add_gradcheck, add_judge, add_bench, add_sweep, add_info,
};

constexpr const char* kOfThePackage[] = {"audit", "report"};
constexpr const char* kFlagsOfThePackage[] = {"--impl", "--frontend", "--implementation"};
constexpr const char* kFooter =
    "The Python package's command (pip install '.[check]') also has\n"
    "  audit                       Check a list of implementations on a list of cases\n"
    "  report                      Show result lines on a page\n"
    "Exit codes: 0 pass, 1 a check failed, 2 usage or config error, 3 memory, device or file system.";

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

bool is_one_of(const std::string& word, std::span<const char* const> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// What the command line has that no flag or subcommand is, in words; empty if it has nothing of the kind. CLI11 would say first
// what is missing.
std::string unknown_word(const CLI::App& program) {
  const std::vector<CLI::App*> chosen = program.get_subcommands();
  std::vector<std::string> known;
  for (const std::string& word : program.remaining(/*recurse=*/true)) {
    const std::string name = word.substr(0, word.find('='));
    if (name.starts_with("--")) {
      for (const CLI::Option* option : (chosen.empty() ? &program : chosen.front())->get_options()) {
        for (const std::string& flag : option->get_lnames()) {
          if (!option->get_group().empty()) known.push_back("--" + flag);
        }
      }
      if (is_one_of(name, kFlagsOfThePackage))
        return formatted("{} is a flag of the Python package's command: `pip install '.[check]'`", name);
      known.insert(known.end(), std::begin(kFlagsOfThePackage), std::end(kFlagsOfThePackage));
      return formatted("unknown flag {}{}", shown(name), did_you_mean(name, known));
    }
    if (!chosen.empty()) continue;
    if (is_one_of(name, kOfThePackage)) {
      return formatted("{} is a command of the Python package: `pip install '.[check]'`, then its `tileloss {}`", name, name);
    }
    for (const CLI::App* app : program.get_subcommands([](const CLI::App* each) { return !each->get_group().empty(); })) {
      known.push_back(app->get_name());
    }
    known.insert(known.end(), std::begin(kOfThePackage), std::end(kOfThePackage));
    return formatted("unknown command {}{}", shown(name), did_you_mean(name, known));
  }
  return "";
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
  program.footer(kFooter);
  Action action;
  for (const auto add : kSubcommands) add(program, action);
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) {
      const std::string unknown = unknown_word(program);
      return report(kExitUsage, unknown.empty() ? shown(error.what(), kLongestUsageError).c_str() : unknown.c_str());
    }
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
