#include "support/result_writer.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/signals.h"
#include "support/standard_streams.h"

namespace tileloss::tools {
namespace {

// `name` is shown() already.
[[noreturn]] void fail(const std::string& name, const char* action) {
  throw ToolError(kExitEnvironment, formatted("results file {}: cannot {}: {}", name, action, std::strerror(errno)));
}

// A line goes out whole, but into a pipe that nobody empties: there a stop ends the wait.
bool write_all(int file, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t written = ::write(file, text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) {
      if (!wait_for(file, POLLOUT)) check_stop();
      continue;
    }
    if (written <= 0) return false;
    done += static_cast<size_t>(written);
  }
  return true;
}

// Pipes and devices cannot be synced (EINVAL, ENOTSUP); that is no failure.
bool sync(int file) { return fsync(file) == 0 || errno == EINVAL || errno == ENOTSUP; }

// A writer that was killed leaves its lock to a child that has not come as far as its exec, which then dies: some milliseconds.
constexpr int kTries = 25;
constexpr timespec kBetweenTries = {0, 20'000'000};

bool lock(int file) {
  for (int i = 0; i < kTries; ++i) {
    if (flock(file, LOCK_EX | LOCK_NB) == 0) return true;
    if (errno != EWOULDBLOCK && errno != EINTR) return false;
    if (i + 1 < kTries) nanosleep(&kBetweenTries, nullptr);
  }
  errno = EWOULDBLOCK;
  return false;
}

int copy = -1;  // a descriptor that every line goes to as well

// Every line of gradcheck and sweep begins so; a torn one may be shorter.
bool may_be_torn(std::string_view line) {
  constexpr std::string_view kStart = R"({"tool":")";
  const size_t common = std::min(line.size(), kStart.size());
  return line.substr(0, common) == kStart.substr(0, common);
}

}  // namespace

ResultFile read_results(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (!in.is_open() || in.bad()) fail(shown(path.string()), "read");
  ResultFile result;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    const std::string_view line(text.data() + start, end - start);
    const bool is_whole = end < text.size();
    Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() && !is_whole && may_be_torn(line)) {
      result.torn_bytes = std::ssize(line);
      break;
    }
    if (!json.is_object()) {
      throw ToolError(kExitUsage,
                      formatted("results file {}:{}: not a JSON object", shown(path.string()), result.lines.size() + 1));
    }
    result.lines.push_back(std::move(json));
    result.lacks_newline = !is_whole;
    start = end + 1;
    result.complete_bytes = static_cast<int64_t>(std::min(start, text.size()));
  }
  return result;
}

LockedFile::LockedFile(const std::filesystem::path& path)
    : descriptor_(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0644)) {
  const std::string name = shown(path.string());
  if (descriptor_.get() < 0 && errno == ENXIO) {
    throw ToolError(kExitEnvironment, formatted("results file {}: a pipe that no process reads", name));
  }
  if (descriptor_.get() < 0) fail(name, "open");
  struct stat status = {};
  is_regular_ = fstat(descriptor_.get(), &status) != 0 || S_ISREG(status.st_mode);
  if (!is_regular_ || lock(descriptor_.get())) return;
  if (errno == EWOULDBLOCK) {
    throw ToolError(kExitEnvironment, formatted("results file {}: another process writes to it", name));
  }
  fail(name, "lock");
}

void copy_results_to(int descriptor) {
  copy = descriptor;
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  std::signal(SIGPIPE, SIG_IGN);  // a reader that has gone away
}

ResultWriter::ResultWriter(const std::optional<std::filesystem::path>& path, const Judge& judge) {
  if (!path) return;
  name_ = shown(path->string());
  file_.emplace(*path);
  if (!file_->is_regular() || lseek(file_->descriptor(), 0, SEEK_END) == 0) return;
  ResultFile earlier = read_results(*path);
  int64_t number = 0;
  for (Json& line : earlier.lines) {
    ++number;
    if (judge) judge(std::move(line), formatted("{}:{}", name_, number));
  }
  if (earlier.torn_bytes > 0) {
    write_stderr(formatted("tileloss: warning: {}: dropped a torn last line of {} bytes\n", name_, earlier.torn_bytes));
    if (ftruncate(file_->descriptor(), earlier.complete_bytes) != 0) fail(name_, "truncate");
  }
  if (earlier.lacks_newline && !write_all(file_->descriptor(), "\n")) fail(name_, "write");
}

void ResultWriter::write(const Json& result) {
  const std::string line = result.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  if (file_) write_to_file(line);
  if (copy >= 0 && !write_all(copy, line)) copy = -1;
}

void ResultWriter::write_to_file(const std::string& line) {
  const int file = file_->descriptor();
  const off_t before = file_->is_regular() ? lseek(file, 0, SEEK_END) : 0;
  if (write_all(file, line) && sync(file)) return;
  const int error = errno;
  if (file_->is_regular() && ftruncate(file, before) != 0) {
    write_stderr(formatted("tileloss: warning: {}: a torn last line is left behind\n", name_));
  }
  errno = error;
  fail(name_, "write");
}

}  // namespace tileloss::tools
