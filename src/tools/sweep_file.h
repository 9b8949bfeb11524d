// The results file of a sweep: one writer at a time, and which cases it holds already.
#ifndef TILELOSS_TOOLS_SWEEP_FILE_H_
#define TILELOSS_TOOLS_SWEEP_FILE_H_

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tools/result_writer.h"

namespace tileloss::tools {

// A lock (flock) that goes with the process that holds it, however that ends, and that its children do not inherit.
class FileLock {
 public:
  // Makes the file if there is none. Throws ToolError (environment) if another process holds it.
  explicit FileLock(const std::filesystem::path& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int file_ = -1;
};

class SweepFile {
 public:
  // Locks and reads the file. A torn last line is dropped with a warning; a line that is no case's result, or the second one of
  // a case, is a ToolError (usage) naming the line.
  explicit SweepFile(const std::filesystem::path& path);

  // The line of a case; null if it has none yet.
  const Json* find(const Json& sweep_case) const;
  int64_t size() const { return static_cast<int64_t>(lines_.size()); }
  // Returns once the line is on the disk. Throws as ResultWriter does.
  void add(const Json& line);

 private:
  void keep(Json line, const std::string& where);

  FileLock lock_;
  ResultWriter writer_;
  std::unordered_map<std::string, Json> lines_;  // by the case's text
};

}  // namespace tileloss::tools

#endif  // TILELOSS_TOOLS_SWEEP_FILE_H_
