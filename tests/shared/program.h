// Runs the built `tileloss` program, or another one, and collects what it says.
#ifndef TILELOSS_TESTS_SHARED_PROGRAM_H_
#define TILELOSS_TESTS_SHARED_PROGRAM_H_

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/shared/temporary_folder.h"

namespace tileloss::test {

// What was built beside the test program that runs.
inline std::string built(const std::string& name) { return std::filesystem::read_symlink("/proc/self/exe").parent_path() / name; }

struct ProgramResult {
  int exit_code = -1;  // 128 + signal if one killed it
  std::string out;
  std::string err;

  std::string last_line() const {
    const std::string text = out.substr(0, out.find_last_not_of('\n') + 1);
    return text.substr(text.rfind('\n') + 1);
  }
};

// Files in place of the program's standard output and error, which are collected if empty.
struct Streams {
  std::string out = {};
  std::string err = {};
  bool closed_input = false;
};
inline constexpr const char* kClosed = "closed";  // in place of a file: the program starts without the descriptor

class Program {
 public:
  explicit Program(std::vector<std::string> arguments, const Streams& streams = {}, const std::string& path = built("tileloss"))
      : streams_(streams) {
    arguments.insert(arguments.begin(), path);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const std::string out = streams_.out.empty() ? (folder_.path() / "out").string() : streams_.out;
    const std::string err = streams_.err.empty() ? (folder_.path() / "err").string() : streams_.err;
    child_ = fork();
    if (child_ < 0) throw std::runtime_error("cannot fork");
    if (child_ == 0) {
      if (streams_.closed_input) close(STDIN_FILENO);
      redirect(out, STDOUT_FILENO);
      redirect(err, STDERR_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
  }

  pid_t child() const { return child_; }

  ProgramResult wait() {
    int status = 0;
    waitpid(child_, &status, 0);
    ProgramResult result;
    result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (streams_.out.empty()) result.out = read_text(folder_.path() / "out");
    if (streams_.err.empty()) result.err = read_text(folder_.path() / "err");
    return result;
  }

 private:
  static void redirect(const std::string& file, int descriptor) {
    if (file == kClosed) {
      close(descriptor);
      return;
    }
    const int opened = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (opened < 0 || dup2(opened, descriptor) < 0) _exit(127);
    if (opened != descriptor) close(opened);
  }

  TemporaryFolder folder_;
  Streams streams_;
  pid_t child_ = -1;
};

inline ProgramResult run_program(std::vector<std::string> arguments) { return Program(std::move(arguments)).wait(); }

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_SHARED_PROGRAM_H_
