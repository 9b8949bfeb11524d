// Result files: one JSON object per line.
#ifndef TILELOSS_SUPPORT_RESULT_WRITER_H_
#define TILELOSS_SUPPORT_RESULT_WRITER_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "support/descriptor.h"
#include "support/json.h"

namespace tileloss::tools {

// The lines of a results file. What is behind the last newline is a line if it is a whole object; if it begins as the lines of
// this program do, it is torn (the writer was killed), is left out, and `torn_bytes` counts it. Anything else that is not a JSON
// object is a ToolError (usage) naming the file and line: such a file is not ours to cut.
struct ResultFile {
  std::vector<Json> lines;
  bool lacks_newline = false;  // the last of them
  int64_t complete_bytes = 0;
  int64_t torn_bytes = 0;
};
ResultFile read_results(const std::filesystem::path& path);

// A file open for appending, made if there is none, and locked (flock): no other process has it so. The lock goes with the
// process, however that ends, and its children lose it at their exec. Any number of processes may write to a pipe or a device.
class LockedFile {
 public:
  // Throws ToolError (environment) if another process holds the lock, or if it is a pipe that no process reads. Not blocking: a
  // write into a full pipe ends with EAGAIN.
  explicit LockedFile(const std::filesystem::path& path);

  int descriptor() const { return descriptor_.get(); }
  bool is_regular() const { return is_regular_; }

 private:
  Descriptor descriptor_;
  bool is_regular_ = false;
};

// Every line goes to this descriptor as well, once it is on the disk: to whoever called the program and follows it. Nothing that
// happens to it there changes what the program does.
void copy_results_to(int descriptor);

// Appends to a results file, which is locked meanwhile. A line that cannot be written whole (disk full) is taken back, so that
// the earlier results stay intact, and a ToolError (environment) is thrown.
class ResultWriter {
 public:
  // Sees a line that is there already, which stands at `where` ("FILE:LINE"); throws if the file should have no such line.
  using Judge = std::function<void(Json line, const std::string& where)>;
  // Once every line is read and judged, drops a torn last line with a warning on stderr, or adds the newline that it lacks.
  // Without a path there is no file, and a line goes where copies go alone.
  explicit ResultWriter(const std::optional<std::filesystem::path>& path, const Judge& judge = nullptr);

  // Returns once the line is on the disk (fsync). Throws Stopped where a pipe has no room for it and a stop is asked for.
  void write(const Json& result);

 private:
  void write_to_file(const std::string& line);

  std::string name_;
  std::optional<LockedFile> file_;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_RESULT_WRITER_H_
