// Runs the built `tileloss` program and collects what it says.
#ifndef TILELOSS_TESTS_TOOLS_PROGRAM_H_
#define TILELOSS_TESTS_TOOLS_PROGRAM_H_

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "tests/tools/temporary_folder.h"

namespace tileloss::test {

struct ProgramResult {
  int exit_code = -1;  // 128 + signal if one killed it
  std::string out;
  std::string err;

  std::string last_line() const {
    const std::string text = out.substr(0, out.find_last_not_of('\n') + 1);
    return text.substr(text.rfind('\n') + 1);
  }
};

class Program {
 public:
  // `out`: a file to take standard output; empty: collected.
  explicit Program(std::vector<std::string> arguments, const std::string& out = "") {
    arguments.insert(arguments.begin(), TILELOSS_PROGRAM);
    out_ = out.empty() ? (folder_.path() / "out").string() : out;
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const std::string err = (folder_.path() / "err").string();
    child_ = fork();
    if (child_ < 0) throw std::runtime_error("cannot fork");
    if (child_ == 0) {
      redirect(out_, STDOUT_FILENO);
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
    result.out = out_ == "/dev/full" ? "" : read_text(out_);
    result.err = read_text(folder_.path() / "err");
    return result;
  }

 private:
  static void redirect(const std::string& file, int descriptor) {
    const int opened = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (opened < 0 || dup2(opened, descriptor) < 0) _exit(127);
  }

  TemporaryFolder folder_;
  std::string out_;
  pid_t child_ = -1;
};

inline ProgramResult run_program(std::vector<std::string> arguments) { return Program(std::move(arguments)).wait(); }

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_TOOLS_PROGRAM_H_
