// Files that the tools write: where a file may go, and a whole one that replaces what is there only when it is complete.
#ifndef TILELOSS_SUPPORT_OUTPUT_FILE_H_
#define TILELOSS_SUPPORT_OUTPUT_FILE_H_

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "support/descriptor.h"

namespace tileloss::tools {

// "a folder", "a pipe", "a device", ...: what is no regular file.
const char* kind_of_file(mode_t mode);

// A file that the same command reads, and the flag or key that names it.
struct InputFile {
  std::string_view argument;
  std::filesystem::path path;
};

// Throws ToolError (usage), naming `argument`, where an output's path is "-" or one of the inputs, under whatever name.
void check_output(std::string_view argument, const std::filesystem::path& path, const std::vector<InputFile>& inputs);

// A file that is written beside its place and renamed by finish(); without that nothing of it stays. A link at its place stays,
// and what it leads to is replaced. Throws ToolError: usage where something is at its place that is no regular file, environment
// where it cannot be written.
class WholeFile {
 public:
  explicit WholeFile(const std::filesystem::path& path);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  void write(const void* data, int64_t bytes);
  void finish();

 private:
  std::string name_;
  std::filesystem::path place_, beside_;
  Descriptor descriptor_;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_OUTPUT_FILE_H_
