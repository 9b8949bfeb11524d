// Where a sweep stands, on stderr: a bar on a terminal, a line a case otherwise.
#ifndef TILELOSS_BENCH_SWEEP_PROGRESS_H_
#define TILELOSS_BENCH_SWEEP_PROGRESS_H_

#include <cstdint>
#include <string>

#include "support/json.h"
#include "support/timer.h"

namespace tileloss::tools {

class SweepProgress {
 public:
  // `done` of the `total` cases have results from an earlier run.
  SweepProgress(int64_t done, int64_t total);
  // Takes the bar away.
  ~SweepProgress();
  SweepProgress(const SweepProgress&) = delete;
  SweepProgress& operator=(const SweepProgress&) = delete;

  void starting(const std::string& description);
  // Failures stay on the terminal, above the bar.
  void finished(const std::string& description, const Json& result);

 private:
  bool terminal_;
  int64_t done_before_;
  int64_t done_;
  int64_t total_;
  Timer since_start_;
};

// "12.34 ms", or the status and what is known of it.
std::string describe_result(const Json& result);

}  // namespace tileloss::tools

#endif  // TILELOSS_BENCH_SWEEP_PROGRESS_H_
