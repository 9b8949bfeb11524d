// What ./dev refuses, tried on a copy in an empty folder: what a faulty one would build, rewrite or remove is not there.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::Program;
using test::ProgramResult;
using test::TemporaryFolder;

ProgramResult dev(const std::vector<std::string>& arguments) {
  const TemporaryFolder folder;
  const auto copy = folder.path() / "dev";
  std::filesystem::copy_file(TILELOSS_SOURCE_DIR "/dev", copy);
  return Program(arguments, {}, copy.string()).wait();
}

TEST(Dev, CommandsRefuseArgumentsThatTheyDoNotTake) {
  for (const auto& [arguments, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"build", "debug"}, "dev: build takes no arguments, got 'debug'\n"},
           {{"build", "extra", "args"}, "dev: build takes no arguments, got 'extra args'\n"},
           {{"demo", "x"}, "dev: demo takes no arguments, got 'x'\n"},
           {{"kit", "x"}, "dev: kit takes no arguments, got 'x'\n"},
           {{"package", "x"}, "dev: package takes no arguments, got 'x'\n"},
           {{"format", "src"}, "dev: format takes no arguments, got 'src'\n"},
           {{"clean", "x"}, "dev: clean takes no arguments, got 'x'\n"},
           {{"help", "build"}, "dev: help takes no arguments, got 'build'\n"},
           {{"fuzz", "60", "x"}, "dev: fuzz takes a number of seconds, not '60 x'\n"},
           {{"fuzz", "0"}, "dev: fuzz takes a number of seconds, not '0'\n"},
           {{"test", "all"}, "or nothing, not 'all'\n"},
           {{"test", "full", "x"}, "dev: test full takes no arguments, got 'x'\n"},
           {{"test", "both", "-R", "x"}, "or nothing, not 'both -R x'\n"},
           {{"sanitize", "msan"}, "dev: sanitize takes asan-ubsan, tsan or both, not 'msan'\n"},
           {{"paint"}, "dev: no command 'paint'\n"}}) {
    const ProgramResult result = dev(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments.front() << result.err;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  }
}

}  // namespace
}  // namespace tileloss::tools
