// The tensors of a file, or outputs of somebody else's, as whoever asks for a check hands them over: by name, in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "oracle/number_formats.h"

namespace tileloss::tools {

struct StoredTensor {
  std::string name;
  std::string dtype;  // as safetensors has it: F32, BF16, F16, I64, ...
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  const char* data = nullptr;

  int64_t elements() const;
};

class TensorFile {
 public:
  // `name`: as messages have it. `owner`: of the memory, null if somebody else keeps it.
  TensorFile(std::string name, std::vector<StoredTensor> tensors, std::shared_ptr<const void> owner = nullptr);

  const std::string& name() const { return name_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  // Throws ToolError (usage) listing the names there are.
  const StoredTensor& tensor(std::string_view name) const;
  // One that must have an element for each row of `matrix` [..., C]: in the same leading dimensions, or flat. Any others of as
  // many elements or more would be paired with the wrong rows. `columns`: with so many behind these dimensions, unless it is 0.
  const StoredTensor& row_tensor(std::string_view name, const StoredTensor& matrix, std::int64_t columns = 0) const;
  // Bytes [first, first + bytes) of its data.
  void read(const StoredTensor& tensor, int64_t first, int64_t bytes, void* to) const;
  std::vector<char> read(const StoredTensor& tensor) const { return {tensor.data, tensor.data + tensor.bytes}; }
  // "x.safetensors: labels: problem", usage.
  [[noreturn]] void refuse(const StoredTensor& tensor, const std::string& problem) const;

 private:
  std::string name_;
  std::vector<StoredTensor> tensors_;
  std::shared_ptr<const void> owner_;
};

// Of a tensor of BF16, F16 or F32; refuses others.
oracle::NumberFormat number_format(const TensorFile& file, const StoredTensor& tensor);
// "BF16", "F16", "F32".
const char* dtype_name(oracle::NumberFormat format);
std::string shape_text(const std::vector<int64_t>& shape);  // "[2, 40]"

}  // namespace tileloss::tools
