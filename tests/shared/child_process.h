// Runs a piece of a test in a forked child.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace tileloss::test {

// 0 if `body` returned true in the child, 1 if false, 128 + signal if one ended it. A child that hangs is ended by alarm().
inline int exit_code_of_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace tileloss::test
