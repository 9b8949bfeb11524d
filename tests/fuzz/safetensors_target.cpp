// What the safetensors reader accepts lies in the file without gap or overlap, and can be written and read back.
#include <unistd.h>

#include <string>
#include <vector>

#include "support/safetensors.h"
#include "tests/fuzz/target.h"

namespace tileloss::test {
namespace {

using tools::SafetensorsFile;
using tools::FileTensor;

void check_contents(const SafetensorsFile& file, std::size_t size) {
  std::int64_t bytes = 0, next = 0;
  std::vector<std::vector<char>> data;
  std::vector<tools::Tensor> copies;
  for (const FileTensor& tensor : file.tensors()) {
    require(tensor.bytes >= 0 && tensor.elements() >= 0, "sizes are not negative");
    bytes += tensor.bytes;
    require(bytes < static_cast<std::int64_t>(size), "the tensors fit into the file");
    require(&file.tensor(tensor.name) == &tensor, "a name is found");
    require(next == 0 || tensor.offset == next, "they come in the order of the file, without a gap");
    next = tensor.offset + tensor.bytes;
    data.push_back(file.read(tensor));
    copies.push_back({tensor.name, std::string(tensor.dtype), tensor.shape, nullptr, tensor.bytes});
  }
  for (std::size_t i = 0; i < copies.size(); ++i) copies[i].data = data[i].data();
  const auto copy = std::filesystem::temp_directory_path() / ("tileloss_fuzz_" + std::to_string(getpid()));
  tools::write_safetensors(copy, copies);
  const SafetensorsFile again(copy);
  require(again.tensors().size() == copies.size(), "what is written has as many tensors");
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const FileTensor& tensor = again.tensor(copies[i].name);
    const bool same = tensor.dtype == copies[i].dtype && tensor.shape == copies[i].shape && again.read(tensor) == data[i];
    require(same, "what is written is read back");
  }
  std::filesystem::remove(copy);
}

}  // namespace

bool accepts(const std::uint8_t* data, std::size_t size) {
  const MemoryFile input(data, size);
  return ends_well([&] { check_contents(SafetensorsFile(input.path()), size); });
}

}  // namespace tileloss::test
