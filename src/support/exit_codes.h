// The program's exit codes, and the exception that carries one up to main().
#pragma once

#include <stdexcept>
#include <string>

namespace tileloss::tools {

enum ExitCode : int {
  kExitPass = 0,
  kExitCheckFailed = 1,
  kExitUsage = 2,        // command line, config or the contents of an input file
  kExitEnvironment = 3,  // memory, device, file system
};

// What may be long is shown() in the message.
class ToolError : public std::runtime_error {
 public:
  ToolError(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

// Memory that cannot be had: a sweep records it apart from other errors.
class OutOfMemory : public ToolError {
 public:
  explicit OutOfMemory(const std::string& message) : ToolError(kExitEnvironment, message) {}
};

}  // namespace tileloss::tools
