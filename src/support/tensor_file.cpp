#include "support/tensor_file.h"

#include <cstring>
#include <utility>

#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"

namespace tileloss::tools {

int64_t StoredTensor::elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

TensorFile::TensorFile(std::string name, std::vector<StoredTensor> tensors, std::shared_ptr<const void> owner)
    : name_(shown(name)), tensors_(std::move(tensors)), owner_(std::move(owner)) {}

const StoredTensor& TensorFile::tensor(std::string_view name) const {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : tensors_) {
    if (tensor.name == name) return tensor;
    names.push_back(tensor.name);
  }
  throw ToolError(kExitUsage, formatted("{}: no tensor '{}'; there are: {}", name_, shown(name), shown_list(names)));
}

const StoredTensor& TensorFile::row_tensor(std::string_view name, const StoredTensor& matrix, int64_t columns) const {
  const StoredTensor& tensor = this->tensor(name);
  std::vector<int64_t> leading(matrix.shape.begin(), matrix.shape.end() - 1);
  std::vector<int64_t> flat = {matrix.elements() / matrix.shape.back()};
  for (std::vector<int64_t>* shape : {&leading, &flat}) {
    if (columns > 0) shape->push_back(columns);
  }
  if (tensor.shape == leading || tensor.shape == flat) return tensor;
  refuse(tensor,
         formatted("expected {}{}, as {} is {}, got {}", shape_text(leading), leading == flat ? "" : " or " + shape_text(flat),
                   shown(matrix.name), shape_text(matrix.shape), shape_text(tensor.shape)));
}

void TensorFile::read(const StoredTensor& tensor, int64_t first, int64_t bytes, void* to) const {
  if (bytes > 0) std::memcpy(to, tensor.data + first, static_cast<size_t>(bytes));
}

void TensorFile::refuse(const StoredTensor& tensor, const std::string& problem) const {
  throw ToolError(kExitUsage, formatted("{}: {}: {}", name_, shown(tensor.name), problem));
}

std::string shape_text(const std::vector<int64_t>& shape) { return formatted("[{}]", fmt::join(shape, ", ")); }

oracle::NumberFormat number_format(const TensorFile& file, const StoredTensor& tensor) {
  using oracle::NumberFormat;
  for (const NumberFormat format : {NumberFormat::kBfloat16, NumberFormat::kFloat16, NumberFormat::kFloat32}) {
    if (tensor.dtype == dtype_name(format)) return format;
  }
  file.refuse(tensor, formatted("expected BF16, F16 or F32, got {}", tensor.dtype));
}

const char* dtype_name(oracle::NumberFormat format) {
  switch (format) {
    case oracle::NumberFormat::kBfloat16: return "BF16";
    case oracle::NumberFormat::kFloat16: return "F16";
    case oracle::NumberFormat::kFloat32: break;
  }
  return "F32";
}

}  // namespace tileloss::tools
