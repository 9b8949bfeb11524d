// The one reader of safetensors files, checked whole before any tensor is handed out, and their writer.
#ifndef TILELOSS_SUPPORT_SAFETENSORS_H_
#define TILELOSS_SUPPORT_SAFETENSORS_H_

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "support/descriptor.h"
#include "support/safetensors_header.h"
#include "support/tensor_file.h"

namespace tileloss::tools {

class SafetensorsFile {
 public:
  // Throws ToolError: environment if it is no regular file or cannot be read, usage naming the field if it is malformed. Refused:
  // a header longer than the file or 100 MB, metadata that is not text, an unknown dtype, a negative or overflowing shape, a size
  // that differs from the shape's, offsets out of range, overlapping or with gaps, duplicate names, trailing bytes, pickle and
  // zip files. Throws Stopped when asked to stop.
  explicit SafetensorsFile(const std::filesystem::path& path);

  // As messages name it.
  const std::string& name() const { return name_; }
  // In the order of their data.
  const std::vector<FileTensor>& tensors() const { return tensors_; }
  // Throws ToolError (usage) listing the names there are.
  const FileTensor& tensor(std::string_view name) const;
  // One that must have an element for each row of `matrix` [..., C]: in the same leading dimensions, or flat. Any others of as
  // many elements or more would be paired with the wrong rows.
  const FileTensor& row_tensor(std::string_view name, const FileTensor& matrix) const;

  // Bytes [first, first + bytes) of its data. Read, not mapped: a file that another process shortens meanwhile, which would be a
  // fault, is a ToolError (environment), and so is any other error. Throws Stopped when asked to stop.
  void read(const FileTensor& tensor, int64_t first, int64_t bytes, void* to) const;
  std::vector<char> read(const FileTensor& tensor) const;
  // "x.safetensors: labels: problem", usage.
  [[noreturn]] void refuse(const FileTensor& tensor, const std::string& problem) const;

 private:
  std::string read_header();
  void read_bytes(const std::string& what, int64_t offset, int64_t bytes, void* to) const;

  std::string name_;
  Descriptor descriptor_;
  int64_t bytes_ = 0;
  std::vector<FileTensor> tensors_;
};

TensorFile load_safetensors(const std::filesystem::path& path);

// A tensor to be written.
struct Tensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  int64_t bytes = 0;
};

// Writes one as a WholeFile. The tensors are laid out in the order given; `metadata` is the format's own, text by name.
void write_safetensors(const std::filesystem::path& path, const std::vector<Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_SAFETENSORS_H_
