#include "bench/sweep_progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "support/format.h"
#include "support/standard_streams.h"

namespace tileloss::tools {
namespace {

constexpr int64_t kBarWidth = 24;
constexpr const char* kClearLine = "\r\033[K";

size_t terminal_width() {
  winsize size = {};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

std::string duration(double seconds) {
  if (seconds < 100) return formatted("{:.0f} s", seconds);
  if (seconds < 6000) return formatted("{:.0f} min", seconds / 60);
  return formatted("{:.1f} h", seconds / 3600);
}

}  // namespace

std::string describe_result(const Json& result) {
  const auto status = result.at("status").get<std::string>();
  if (status == "ok") return formatted("{:.4g} ms", result.at("median_ms").get<double>());
  return status + ": " + result.value("message", "");
}

SweepProgress::SweepProgress(int64_t done, int64_t total)
    : terminal_(isatty(STDERR_FILENO) == 1), done_before_(done), done_(done), total_(total) {}

SweepProgress::~SweepProgress() {
  if (terminal_) show("");
}

void SweepProgress::show(const std::string& line) const { write_stderr(kClearLine + line.substr(0, terminal_width() - 1)); }

void SweepProgress::starting(const std::string& description) {
  if (!terminal_) return;
  const auto filled = static_cast<size_t>(kBarWidth * done_ / total_);
  std::string left;
  if (const int64_t ran = done_ - done_before_; ran > 0) {
    left = duration(since_start_.seconds() / static_cast<double>(ran) * static_cast<double>(total_ - done_)) + " left, ";
  }
  show(formatted("[{}{}] {}/{} {}{}", std::string(filled, '#'), std::string(kBarWidth - filled, '-'), done_, total_, left,
                 description));
}

void SweepProgress::finished(const std::string& description, const Json& result) {
  ++done_;
  if (terminal_ && result.at("status") == "ok") return;
  write_stderr(formatted("{}[{}/{}] {}: {}\n", terminal_ ? kClearLine : "", done_, total_, description, describe_result(result)));
}

}  // namespace tileloss::tools
