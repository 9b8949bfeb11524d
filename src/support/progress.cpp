#include "support/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "support/format.h"
#include "support/json.h"
#include "support/standard_streams.h"

namespace tileloss::tools {
namespace {

constexpr int64_t kBarWidth = 24;
constexpr const char* kClearLine = "\r\033[K";
constexpr double kNever = std::numeric_limits<double>::infinity();

bool is_quiet = false;
ProgressTo::Told told;
constexpr double kBetweenTold = 0.1;

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

void show_bar(int64_t done, int64_t total, int64_t done_before, const Timer& since_start, const std::string& text) {
  const auto filled = static_cast<size_t>(kBarWidth * done / std::max<int64_t>(total, 1));
  std::string left;
  if (const int64_t ran = done - done_before; ran > 0) {
    left = duration(since_start.seconds() / static_cast<double>(ran) * static_cast<double>(total - done)) + " left, ";
  }
  const std::string line =
      formatted("[{}{}] {}/{} {}{}", std::string(filled, '#'), std::string(kBarWidth - filled, '-'), done, total, left, text);
  write_stderr(kClearLine + line.substr(0, terminal_width() - 1));
}

void clear_bar() { write_stderr(kClearLine); }

Progress::Progress(const char* work, int64_t total, const Pace& pace)
    : work_(work), total_(total), pace_(pace), is_terminal_(isatty(STDERR_FILENO) == 1) {
  next_s_ = told ? kBetweenTold : is_quiet ? kNever : is_terminal_ ? pace.first_bar : pace.between_lines;
}

Progress::~Progress() {
  if (is_shown_) clear_bar();
}

void Progress::step() {
  const std::lock_guard lock(mutex_);
  ++done_;
  const double now = since_start_.seconds();
  if (now < next_s_) return;
  if (told) {
    next_s_ = now + kBetweenTold;
    return told(work_, done_, total_);
  }
  next_s_ = now + (is_terminal_ ? pace_.between_bars : pace_.between_lines);
  if (is_terminal_) {
    show_bar(done_, total_, 0, since_start_, work_);
    is_shown_ = true;
  } else {
    const Json line = {{"progress", work_}, {"done", done_}, {"total", total_}};
    write_stderr(line.dump() + "\n");
  }
}

void Progress::be_quiet() { is_quiet = true; }

ProgressTo::ProgressTo(Told each) { told = std::move(each); }

ProgressTo::~ProgressTo() { told = nullptr; }

}  // namespace tileloss::tools
