// The one reader of safetensors files: mapped, not copied, and checked whole before any tensor is handed out.
#ifndef TILELOSS_TOOLS_SAFETENSORS_H_
#define TILELOSS_TOOLS_SAFETENSORS_H_

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tileloss::tools {

struct Tensor {
  std::string name;
  std::string dtype;  // the file's word: F32, BF16, F16, I64, ...
  std::vector<int64_t> shape;
  const void* data = nullptr;  // in the mapped file; aligned as the file is, so possibly not to its element
  int64_t bytes = 0;

  int64_t elements() const;
};

class SafetensorsFile {
 public:
  // Throws ToolError: environment if the file cannot be opened, usage naming the field if it is malformed. Refused: a header
  // longer than the file or 100 MB or nested deeply, metadata that is not text, an unknown dtype, a negative or overflowing
  // shape, a size that differs from the shape's, offsets out of range, overlapping or with gaps, duplicate names, trailing bytes,
  // pickle and zip files.
  explicit SafetensorsFile(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  // In the order of their data.
  const std::vector<Tensor>& tensors() const { return tensors_; }
  // Throws ToolError (usage) listing the names there are.
  const Tensor& tensor(std::string_view name) const;
  // One that must have an element for each row of `matrix` [..., C]: in the same leading dimensions, or flat. Any others of as
  // many elements or more would be paired with the wrong rows.
  const Tensor& row_tensor(std::string_view name, const Tensor& matrix) const;

 private:
  void map(const std::filesystem::path& path);
  void parse();
  const unsigned char* check_header() const;
  Tensor parse_entry(const std::string& name, const nlohmann::json& entry, const unsigned char* payload) const;
  void check_metadata(const nlohmann::json& entry) const;
  void sort_and_check_layout(const unsigned char* payload);
  [[noreturn]] void fail(const std::string& field, const std::string& problem) const;

  std::string name_;
  const unsigned char* data_ = nullptr;
  int64_t bytes_ = 0;
  std::vector<Tensor> tensors_;
};

// Writes one (beside, then renamed). The tensors are laid out in the order given.
void write_safetensors(const std::filesystem::path& path, const std::vector<Tensor>& tensors);

}  // namespace tileloss::tools

#endif  // TILELOSS_TOOLS_SAFETENSORS_H_
