#include "tools/sweep_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "tools/exit_codes.h"

namespace tileloss::tools {
namespace {

// A sweep that was killed leaves its lock to a child that has not come as far as its exec, which then dies: some milliseconds.
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

// The member without which a line is no result, empty if it has them all.
std::string what_lacks(const Json& line) {
  if (!line.contains("case") || !line["case"].is_object()) return "case";
  if (!line.contains("status") || !line["status"].is_string()) return "status";
  if (line["status"] != "ok") return "";
  for (const char* text : {"isa", "schedule"}) {
    if (!line.contains(text) || !line[text].is_string()) return text;
  }
  for (const char* number : {"threads", "row_block", "vocab_block", "median_ms", "min_ms", "gb_per_s"}) {
    if (!line.contains(number) || !line[number].is_number()) return number;
  }
  return "";
}

}  // namespace

FileLock::FileLock(const std::filesystem::path& path) : file_(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644)) {
  struct stat status = {};
  // Any number of sweeps may write to a device.
  const bool is_device = file_ >= 0 && fstat(file_, &status) == 0 && !S_ISREG(status.st_mode);
  if (is_device || (file_ >= 0 && lock(file_))) return;
  const int error = errno;
  if (file_ >= 0) close(file_);
  const std::string name = path.string();
  if (error == EWOULDBLOCK) throw ToolError(kExitEnvironment, fmt::format("results file {}: another sweep writes to it", name));
  throw ToolError(kExitEnvironment, fmt::format("results file {}: cannot open and lock: {}", name, std::strerror(error)));
}

FileLock::~FileLock() { close(file_); }

SweepFile::SweepFile(const std::filesystem::path& path) : lock_(path), writer_(path) {
  if (!std::filesystem::is_regular_file(path)) return;
  int64_t number = 0;
  for (Json& line : read_results(path).lines) keep(std::move(line), fmt::format("{}:{}", path.string(), ++number));
}

void SweepFile::keep(Json line, const std::string& where) {
  if (const std::string lacking = what_lacks(line); !lacking.empty()) {
    throw ToolError(kExitUsage, fmt::format("results file {}: not a sweep's result: no {}", where, lacking));
  }
  std::string text = line["case"].dump();
  const auto [at, is_new] = lines_.emplace(std::move(text), std::move(line));
  if (!is_new) throw ToolError(kExitUsage, fmt::format("results file {}: a second result of the case {}", where, at->first));
}

const Json* SweepFile::find(const Json& sweep_case) const {
  const auto found = lines_.find(sweep_case.dump());
  return found != lines_.end() ? &found->second : nullptr;
}

void SweepFile::add(const Json& line) {
  keep(line, "of a new case");
  writer_.write(line);
}

}  // namespace tileloss::tools
