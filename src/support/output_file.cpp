#include "support/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"

namespace tileloss::tools {
namespace {

constexpr int kMostLinks = 40;  // as many as Linux follows

// Not by canonical(): what the last link leads to need not be there.
std::filesystem::path behind_links(std::filesystem::path path) {
  std::error_code error;
  for (int i = 0; i < kMostLinks && std::filesystem::is_symlink(path, error); ++i) {
    const std::filesystem::path target = std::filesystem::read_symlink(path, error);
    path = target.is_absolute() ? target : path.parent_path() / target;
  }
  return path;
}

[[noreturn]] void fail(const std::string& name) {
  throw ToolError(kExitEnvironment, formatted("{}: cannot be written: {}", name, std::strerror(errno)));
}

}  // namespace

const char* kind_of_file(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

void check_output(std::string_view argument, const std::filesystem::path& path, const std::vector<InputFile>& inputs) {
  if (path == "-") {
    throw ToolError(kExitUsage, formatted("{}: expected a file to write, got '-' (./- is a file of that name)", argument));
  }
  std::error_code error;
  for (const InputFile& input : inputs) {
    if (input.path.empty() || !std::filesystem::equivalent(path, input.path, error)) continue;
    throw ToolError(kExitUsage, formatted("{}: expected a file that is not read, got {}, the file of {}", argument,
                                          shown(path.string()), input.argument));
  }
}

WholeFile::WholeFile(const std::filesystem::path& path)
    : name_(shown(path.string())), place_(behind_links(path)), descriptor_(-1) {
  struct stat status = {};
  const bool is_there = stat(place_.c_str(), &status) == 0;
  if (is_there && !S_ISREG(status.st_mode)) {
    throw ToolError(kExitUsage, formatted("{}: expected a regular file, got {}", name_, kind_of_file(status.st_mode)));
  }
  std::filesystem::path beside = place_.parent_path() / formatted(".{}.{}", place_.filename().string(), getpid());
  descriptor_.reset(open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (descriptor_.get() < 0) fail(name_);
  beside_ = std::move(beside);
  if (is_there) fchmod(descriptor_.get(), status.st_mode & 07777U);
}

WholeFile::~WholeFile() {
  if (!beside_.empty()) unlink(beside_.c_str());
}

void WholeFile::write(const void* data, int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t count = ::write(descriptor_.get(), static_cast<const char*>(data) + done, static_cast<size_t>(bytes - done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(name_);
    done += count;
  }
}

void WholeFile::finish() {
  if (rename(beside_.c_str(), place_.c_str()) != 0) fail(name_);
  beside_.clear();
  descriptor_.reset();
}

}  // namespace tileloss::tools
