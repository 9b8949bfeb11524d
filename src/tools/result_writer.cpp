#include "tools/result_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "tools/exit_codes.h"
#include "tools/standard_streams.h"

namespace tileloss::tools {
namespace {

[[noreturn]] void fail(const std::string& name, const char* action) {
  throw ToolError(kExitEnvironment, fmt::format("results file {}: cannot {}: {}", name, action, std::strerror(errno)));
}

bool write_all(int file, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t written = ::write(file, text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    done += static_cast<size_t>(written);
  }
  return true;
}

// Pipes and devices cannot be synced (EINVAL, ENOTSUP); that is no failure.
bool sync(int file) { return fsync(file) == 0 || errno == EINVAL || errno == ENOTSUP; }

}  // namespace

ResultFile read_results(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (!in.is_open() || in.bad()) fail(path.string(), "read");
  ResultFile result;
  size_t start = 0;
  for (int64_t number = 1; start < text.size(); ++number) {
    const size_t end = text.find('\n', start);
    if (end == std::string::npos) {
      result.torn_bytes = static_cast<int64_t>(text.size() - start);
      break;
    }
    Json line = Json::parse(text.begin() + static_cast<ptrdiff_t>(start), text.begin() + static_cast<ptrdiff_t>(end), nullptr,
                            /*allow_exceptions=*/false);
    if (!line.is_object()) {
      throw ToolError(kExitUsage, fmt::format("results file {}:{}: not a JSON object", path.string(), number));
    }
    result.lines.push_back(std::move(line));
    start = end + 1;
    result.complete_bytes = static_cast<int64_t>(start);
  }
  return result;
}

ResultWriter::ResultWriter(const std::filesystem::path& path) : name_(path.string()) {
  struct stat status = {};
  regular_ = stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode);
  ResultFile earlier;
  if (regular_ && status.st_size > 0) earlier = read_results(path);
  file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file_ < 0) fail(name_, "open");
  if (earlier.torn_bytes > 0) {
    write_stderr(fmt::format("tileloss: warning: {}: dropped a torn last line of {} bytes\n", name_, earlier.torn_bytes));
    if (ftruncate(file_, earlier.complete_bytes) != 0) {
      const int error = errno;
      close(file_);
      errno = error;
      fail(name_, "truncate");
    }
  }
}

ResultWriter::~ResultWriter() { close(file_); }

void ResultWriter::write(const Json& result) {
  const off_t before = regular_ ? lseek(file_, 0, SEEK_END) : 0;
  const std::string line = result.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  if (write_all(file_, line) && sync(file_)) return;
  const int error = errno;
  if (regular_ && ftruncate(file_, before) != 0) {
    write_stderr(fmt::format("tileloss: warning: {}: a torn last line is left behind\n", name_));
  }
  errno = error;
  fail(name_, "write");
}

}  // namespace tileloss::tools
