#include "support/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "support/exit_codes.h"
#include "support/format.h"
#include "support/output_file.h"
#include "support/printable.h"
#include "support/signals.h"
#include "support/tensor_file.h"

namespace tileloss::tools {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;
// A look at whether to stop in between: a slow disk takes 0.1 s for it.
constexpr int64_t kBytesAtOnce = int64_t{16} << 20;

}  // namespace

// Not blocking: a pipe without a writer would keep open() waiting, before it can be seen that it is one.
SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : name_(shown(path.string())), descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (descriptor_.get() < 0)
    throw ToolError(kExitEnvironment, formatted("{}: cannot be opened: {}", name_, std::strerror(errno)));
  const std::string header = read_header();
  tensors_ = parse_safetensors_header(name_, header, kLengthBytes + std::ssize(header), bytes_);
}

std::string SafetensorsFile::read_header() {
  struct stat status = {};
  if (fstat(descriptor_.get(), &status) != 0) {
    throw ToolError(kExitEnvironment, formatted("{}: cannot be read: {}", name_, std::strerror(errno)));
  }
  if (!S_ISREG(status.st_mode)) {
    throw ToolError(kExitEnvironment, formatted("{}: expected a regular file, got {}", name_, kind_of_file(status.st_mode)));
  }
  const auto fail = [this](const char* field, const std::string& problem) { refuse_safetensors(name_, field, problem); };
  bytes_ = status.st_size;
  if (bytes_ < kLengthBytes) fail("header length", "the file is shorter than the 8 bytes of a header length");
  unsigned char start[kLengthBytes + 1] = {};
  read_bytes("header", 0, std::min<int64_t>(bytes_, sizeof start), start);
  // Pickle protocol 2 and later starts with 0x80 and its number; PyTorch's newer files are zip archives. Neither is ever loaded.
  if (start[0] == 0x80 && start[1] >= 2 && start[1] <= 5 && start[kLengthBytes] != '{') {
    fail("content", "this is a pickle file, which can run code when loaded; only safetensors files are read");
  }
  if (std::memcmp(start, "PK\x03\x04", 4) == 0) {
    fail("content", "this is a zip archive (PyTorch's pickle format?); only safetensors files are read");
  }
  uint64_t length = 0;
  std::memcpy(&length, start, sizeof length);  // little-endian, as x86 is
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) fail("header length", formatted("{} bytes, more than 100 MB", length));
  const auto header_bytes = static_cast<int64_t>(length);
  if (header_bytes > bytes_ - kLengthBytes) {
    fail("header length", formatted("{} bytes, but the file has only {} after it", header_bytes, bytes_ - kLengthBytes));
  }
  if (header_bytes == 0 || start[kLengthBytes] != '{') fail("header", "does not start with '{'");
  std::string header(length, '\0');
  read_bytes("header", kLengthBytes, header_bytes, header.data());
  // For the JSON parser its text would end there.
  if (header.find('\0') != std::string::npos) fail("header", "expected JSON, got a NUL in it");
  return header;
}

void SafetensorsFile::read_bytes(const std::string& what, int64_t offset, int64_t bytes, void* to) const {
  for (int64_t done = 0; done < bytes;) {
    check_stop();
    const auto wanted = static_cast<size_t>(std::min(bytes - done, kBytesAtOnce));
    const ssize_t count = pread(descriptor_.get(), static_cast<char*>(to) + done, wanted, offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      throw ToolError(kExitEnvironment, formatted("{}: {}: cannot be read: {}", name_, what, std::strerror(errno)));
    }
    if (count == 0) {
      throw ToolError(kExitEnvironment, formatted("{}: {}: expected {} bytes from byte {} on, got {}: the file was cut while it "
                                                  "was read",
                                                  name_, what, bytes, offset, done));
    }
    done += count;
  }
}

void SafetensorsFile::read(const FileTensor& tensor, int64_t first, int64_t bytes, void* to) const {
  read_bytes(shown(tensor.name), tensor.offset + first, bytes, to);
}

std::vector<char> SafetensorsFile::read(const FileTensor& tensor) const {
  std::vector<char> data(static_cast<size_t>(tensor.bytes));
  read(tensor, 0, tensor.bytes, data.data());
  return data;
}

void SafetensorsFile::refuse(const FileTensor& tensor, const std::string& problem) const {
  refuse_safetensors(name_, tensor.name, problem);
}

const FileTensor& SafetensorsFile::tensor(std::string_view name) const {
  std::vector<std::string> names;
  for (const FileTensor& tensor : tensors_) {
    if (tensor.name == name) return tensor;
  }
  for (const FileTensor& tensor : tensors_) names.push_back(tensor.name);
  throw ToolError(kExitUsage, formatted("{}: no tensor '{}'; there are: {}", name_, shown(name), shown_list(names)));
}

const FileTensor& SafetensorsFile::row_tensor(std::string_view name, const FileTensor& matrix) const {
  const FileTensor& tensor = this->tensor(name);
  const std::vector<int64_t> leading(matrix.shape.begin(), matrix.shape.end() - 1);
  const std::vector<int64_t> flat = {matrix.elements() / matrix.shape.back()};
  if (tensor.shape == leading || tensor.shape == flat) return tensor;
  refuse(tensor,
         formatted("expected {}{}, as {} is {}, got {}", shape_text(leading), leading == flat ? "" : " or " + shape_text(flat),
                   shown(matrix.name), shape_text(matrix.shape), shape_text(tensor.shape)));
}

TensorFile load_safetensors(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  const auto data = std::make_shared<std::vector<std::vector<char>>>();
  std::vector<StoredTensor> tensors;
  for (const FileTensor& tensor : file.tensors()) {
    data->push_back(file.read(tensor));
    tensors.push_back({tensor.name, std::string(tensor.dtype), tensor.shape, tensor.bytes, data->back().data()});
  }
  return {path.string(), std::move(tensors), data};
}

void write_safetensors(const std::filesystem::path& path, const std::vector<Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const Tensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes}}};
    offset += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the format pads with spaces, so that the data is aligned
  const uint64_t length = text.size();
  WholeFile out(path);
  out.write(&length, sizeof length);
  out.write(text.data(), std::ssize(text));
  for (const Tensor& tensor : tensors) out.write(tensor.data, tensor.bytes);
  out.finish();
}

}  // namespace tileloss::tools
