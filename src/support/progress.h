// How far a long piece of work is.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

#include "support/timer.h"

namespace tileloss::tools {

// While it lives, who is told, now and then. One at a time.
class ProgressTo {
 public:
  using Told = std::function<void(const char* work, int64_t done, int64_t total)>;
  explicit ProgressTo(Told told);
  ~ProgressTo();
  ProgressTo(const ProgressTo&) = delete;
  ProgressTo& operator=(const ProgressTo&) = delete;
};

class Progress {
 public:
  // `work` must outlive it.
  Progress(const char* work, int64_t total) : work_(work), total_(total) {}

  // One more is done. From any thread.
  void step();

 private:
  const char* work_;
  int64_t total_;
  std::mutex mutex_;
  int64_t done_ = 0;
  double told_s_ = 0;  // since the start
  Timer since_start_;
};

}  // namespace tileloss::tools
