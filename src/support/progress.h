// How far a long piece of work is, on stderr.
#ifndef TILELOSS_SUPPORT_PROGRESS_H_
#define TILELOSS_SUPPORT_PROGRESS_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "support/timer.h"

namespace tileloss::tools {

// A line of a terminal that each call writes anew: "[####----] 4/8 12 s left, text", from the work done since `since_start`
// began with `done_before`.
void show_bar(int64_t done, int64_t total, int64_t done_before, const Timer& since_start, const std::string& text);
void clear_bar();

// A bar on a terminal, once a person has waited; a line of JSON now and then on anything else.
class Progress {
 public:
  struct Pace {  // seconds
    double first_bar = 2;
    double between_bars = 0.2;
    double between_lines = 10;
  };

  // `work` must outlive it.
  Progress(const char* work, int64_t total) : Progress(work, total, Pace()) {}
  Progress(const char* work, int64_t total, const Pace& pace);
  // Takes the bar away.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // One more is done. From any thread.
  void step();

  // None is shown from here on, in all of the program.
  static void be_quiet();

 private:
  const char* work_;
  int64_t total_;
  Pace pace_;
  bool is_terminal_;
  bool is_shown_ = false;
  std::mutex mutex_;
  int64_t done_ = 0;
  double next_s_;  // since the start
  Timer since_start_;
};

// While it lives, who is told how far work is, now and then, in place of stderr. One at a time.
class ProgressTo {
 public:
  using Told = std::function<void(const char* work, int64_t done, int64_t total)>;
  explicit ProgressTo(Told told);
  ~ProgressTo();
  ProgressTo(const ProgressTo&) = delete;
  ProgressTo& operator=(const ProgressTo&) = delete;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_PROGRESS_H_
