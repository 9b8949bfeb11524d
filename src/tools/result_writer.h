// Result files: one JSON object per line.
#ifndef TILELOSS_TOOLS_RESULT_WRITER_H_
#define TILELOSS_TOOLS_RESULT_WRITER_H_

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tileloss::tools {

// nlohmann's ordered_json keeps the fields in the order they were written; NaN and infinities become null.
using Json = nlohmann::ordered_json;

// The complete lines of a results file. A torn last line (the writer was killed) is left out and `torn_bytes` counts it; any
// other line that is not a JSON object is a ToolError naming the file and line.
struct ResultFile {
  std::vector<Json> lines;
  int64_t complete_bytes = 0;
  int64_t torn_bytes = 0;
};
ResultFile read_results(const std::filesystem::path& path);

// Appends to a results file. Opening drops a torn last line with a warning on stderr. A line that cannot be written whole (disk
// full) is taken back, so that the earlier results stay intact, and a ToolError (environment) is thrown.
class ResultWriter {
 public:
  explicit ResultWriter(const std::filesystem::path& path);
  ~ResultWriter();
  ResultWriter(const ResultWriter&) = delete;
  ResultWriter& operator=(const ResultWriter&) = delete;

  // Returns once the line is on the disk (fsync).
  void write(const Json& result);

 private:
  std::string name_;
  int file_ = -1;
  bool regular_ = false;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_TOOLS_RESULT_WRITER_H_
