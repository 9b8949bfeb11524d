#include "bench/sweep_progress.h"

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "support/format.h"
#include "support/progress.h"
#include "support/standard_streams.h"

namespace tileloss::tools {
std::string describe_result(const Json& result) {
  const auto status = result.at("status").get<std::string>();
  if (status == "ok") return formatted("{:.4g} ms", result.at("median_ms").get<double>());
  return status + ": " + result.value("message", "");
}

SweepProgress::SweepProgress(int64_t done, int64_t total)
    : terminal_(isatty(STDERR_FILENO) == 1), done_before_(done), done_(done), total_(total) {}

SweepProgress::~SweepProgress() {
  if (terminal_) clear_bar();
}

void SweepProgress::starting(const std::string& description) {
  if (terminal_) show_bar(done_, total_, done_before_, since_start_, description);
}

void SweepProgress::finished(const std::string& description, const Json& result) {
  ++done_;
  if (terminal_ && result.at("status") == "ok") return;
  if (terminal_) clear_bar();
  write_stderr(formatted("[{}/{}] {}: {}\n", done_, total_, description, describe_result(result)));
}

}  // namespace tileloss::tools
