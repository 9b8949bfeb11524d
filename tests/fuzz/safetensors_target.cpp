// What the safetensors reader accepts lies in the file without gap or overlap, and can be written and read back.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/fuzz/target.h"
#include "tools/safetensors.h"

namespace tileloss::test {
namespace {

using tools::SafetensorsFile;
using tools::Tensor;

bool same(const Tensor& a, const Tensor& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes &&
         (a.bytes == 0 || std::memcmp(a.data, b.data, static_cast<std::size_t>(a.bytes)) == 0);
}

void check_contents(const SafetensorsFile& file, std::size_t size) {
  std::int64_t bytes = 0;
  for (const Tensor& tensor : file.tensors()) {
    require(tensor.bytes >= 0 && tensor.elements() >= 0, "sizes are not negative");
    bytes += tensor.bytes;
    require(bytes < static_cast<std::int64_t>(size), "the tensors fit into the file");
    require(&file.tensor(tensor.name) == &tensor, "a name is found");
  }
  // In the order of the file, as only that leaves no gap.
  std::vector<Tensor> tensors = file.tensors();
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const Tensor& a, const Tensor& b) { return a.data != b.data ? a.data < b.data : a.bytes < b.bytes; });
  const auto copy = std::filesystem::temp_directory_path() / ("tileloss_fuzz_" + std::to_string(getpid()));
  tools::write_safetensors(copy, tensors);
  const SafetensorsFile again(copy);
  require(again.tensors().size() == tensors.size(), "what is written has as many tensors");
  for (std::size_t i = 0; i < tensors.size(); ++i) require(same(tensors[i], again.tensors()[i]), "what is written is read back");
  std::filesystem::remove(copy);
}

}  // namespace

bool accepts(const std::uint8_t* data, std::size_t size) {
  const MemoryFile input(data, size);
  return ends_well([&] { check_contents(SafetensorsFile(input.path()), size); });
}

}  // namespace tileloss::test
