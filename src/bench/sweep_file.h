// The results file of a sweep: one writer at a time, and which cases it holds already.
#ifndef TILELOSS_BENCH_SWEEP_FILE_H_
#define TILELOSS_BENCH_SWEEP_FILE_H_

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "support/result_writer.h"

namespace tileloss::tools {

class SweepFile {
 public:
  // Opens the file as ResultWriter does. A line that is no case's result, or the second one of a case, is a ToolError (usage)
  // naming the line.
  explicit SweepFile(const std::filesystem::path& path);

  // The line of a case; null if it has none yet.
  const Json* find(const Json& sweep_case) const;
  int64_t size() const { return static_cast<int64_t>(lines_.size()); }
  // Returns once the line is on the disk. Throws as ResultWriter does.
  void add(const Json& line);

 private:
  void keep(Json line, const std::string& where);

  std::unordered_map<std::string, Json> lines_;  // by the case's text
  ResultWriter writer_;                          // made last: it fills the lines
};

}  // namespace tileloss::tools

#endif  // TILELOSS_BENCH_SWEEP_FILE_H_
