#include "tests/fuzz/target.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "support/exit_codes.h"

namespace tileloss::test {

MemoryFile::MemoryFile(const void* data, std::size_t size) : file_(memfd_create("tileloss_fuzz", MFD_CLOEXEC)) {
  require(file_ >= 0 && write(file_, data, size) == static_cast<ssize_t>(size), "no file in memory");
  path_ = "/proc/self/fd/" + std::to_string(file_);
}

MemoryFile::~MemoryFile() { close(file_); }

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

bool ends_well(const std::function<void()>& read) {
  try {
    read();
    return true;
  } catch (const tools::ToolError& error) {
    require(error.code() == tools::kExitUsage, "a malformed file is a usage error");
    require(std::strlen(error.what()) > 0, "a usage error says what is wrong");
    return false;
  }
}

}  // namespace tileloss::test
