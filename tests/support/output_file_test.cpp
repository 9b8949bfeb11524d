// What stands at an output's path: inputs, pipes, devices and folders are left alone, links are followed.
#include "support/output_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "support/exit_codes.h"
#include "tests/shared/program.h"
#include "tests/shared/resource_limit.h"

namespace tileloss::tools {
namespace {

using test::ProgramResult;
using test::read_text;
using test::run_program;
using test::TemporaryFolder;

constexpr const char* kSmall = "loss: cross_entropy\nbatch_size: 1\nseq_len: 4\nvocab_size: 64\ndtype: fp32\n";
// JSON is YAML: as a config it is whole, and as a results file too.
constexpr const char* kJson =
    "{\"loss\": \"cross_entropy\", \"batch_size\": 1, \"seq_len\": 4, \"vocab_size\": 64, \"dtype\": \"fp32\"}\n";
constexpr const char* kSweep = "{\"loss\": \"cross_entropy\", \"shape\": \"4x64\", \"dtype\": \"fp32\"}\n";

void write(const std::filesystem::path& path, const std::string& text) {
  WholeFile file(path);
  file.write(text.data(), std::ssize(text));
  file.finish();
}

int64_t files_in(const TemporaryFolder& folder) {
  return std::distance(std::filesystem::directory_iterator(folder.path()), std::filesystem::directory_iterator());
}

TEST(WholeFile, ReplacesWhatALinkLeadsTo) {
  const TemporaryFolder folder;
  const auto real = folder.write("real", "old");
  chmod(real.c_str(), 0600);
  std::filesystem::create_symlink("real", folder.path() / "link");
  std::filesystem::create_symlink("link", folder.path() / "link_to_link");
  std::filesystem::create_symlink("new", folder.path() / "dangling");
  write(folder.path() / "link_to_link", "text");
  write(folder.path() / "dangling", "made");
  EXPECT_TRUE(std::filesystem::is_symlink(folder.path() / "link"));
  EXPECT_EQ(read_text(real), "text");
  EXPECT_EQ(std::filesystem::status(real).permissions(), std::filesystem::perms{0600});
  EXPECT_EQ(read_text(folder.path() / "new"), "made");
  EXPECT_EQ(files_in(folder), 5);
}

TEST(WholeFile, ThatIsNotFinishedLeavesNothing) {
  const TemporaryFolder folder;
  const auto path = folder.write("x", "old");
  { WholeFile(path).write("new", 3); }
  {
    const test::FileSizeLimit limit(20);
    EXPECT_THROW(write(path, std::string(100, 'x')), ToolError);
  }
  EXPECT_EQ(read_text(path), "old");
  EXPECT_EQ(files_in(folder), 1);
}

// One line, exit code 2, and nothing is replaced.
TEST(Outputs, ThatWouldDestroyWhatIsThereAreRefused) {
  const TemporaryFolder folder;
  const std::string config = folder.write("c.yaml", kSmall), json = folder.write("c.json", kJson);
  const std::string sweep = folder.write("s.json", kSweep);
  const std::string link = folder.path() / "link", pipe = folder.path() / "pipe";
  std::filesystem::create_symlink("c.yaml", link);
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const auto write_inputs = [&](const std::string& path) {
    return std::vector<std::string>{"judge", "--config", config, "--write-inputs", path};
  };
  const std::string own = "expected a file that is not read, got ", of_config = ", the file of --config";
  for (const auto& [arguments, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {write_inputs(config), "--write-inputs: " + own + config + of_config},
           {write_inputs(link), "--write-inputs: " + own + link + of_config},
           {write_inputs(pipe), pipe + ": expected a regular file, got a pipe"},
           {write_inputs("/dev/full"), "/dev/full: expected a regular file, got a device"},
           {write_inputs(folder.path()), folder.path().string() + ": expected a regular file, got a folder"},
           {write_inputs("-"), "--write-inputs: expected a file to write, got '-'"},
           {{"gradcheck", "--config", json, "--set", "output=" + json}, "output: " + own + json + of_config},
           {{"gradcheck", "--config", config, "--set", "output=-"}, "output: expected a path, got a list"},
           {{"sweep", "--config", sweep, "--set", "output=" + sweep}, "output: " + own + sweep + of_config},
           {{"sweep", "--config", sweep, "--set", "output=-"}, "output: expected a path, got a list"},
           {{"bench", "--output", "-"}, "--output: expected a file to write, got '-'"},
           {{"judge", "--config", config, "--outputs", json, "--set", "output=" + json},
            "output: " + own + json + ", the file of --outputs"}}) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << message << result.out;
    EXPECT_NE(result.err.find(message), std::string::npos) << message << "\n" << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
  EXPECT_EQ(read_text(config), kSmall);
  EXPECT_EQ(read_text(json), kJson);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/full"));
  EXPECT_EQ(files_in(folder), 5);
}

}  // namespace
}  // namespace tileloss::tools
