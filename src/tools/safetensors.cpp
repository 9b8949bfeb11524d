#include "tools/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tools/exit_codes.h"

namespace tileloss::tools {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;
// A shape is at depth 3. Without a limit 100 MB of brackets would become gigabytes.
constexpr size_t kMaxDepth = 16;

struct DtypeSize {
  std::string_view name;
  int64_t bytes;
};
constexpr std::array<DtypeSize, 15> kDtypes = {{{"BOOL", 1},
                                                {"U8", 1},
                                                {"I8", 1},
                                                {"F8_E5M2", 1},
                                                {"F8_E4M3", 1},
                                                {"U16", 2},
                                                {"I16", 2},
                                                {"F16", 2},
                                                {"BF16", 2},
                                                {"U32", 4},
                                                {"I32", 4},
                                                {"F32", 4},
                                                {"I64", 8},
                                                {"U64", 8},
                                                {"F64", 8}}};

int64_t dtype_bytes(std::string_view name) {
  for (const DtypeSize& dtype : kDtypes) {
    if (dtype.name == name) return dtype.bytes;
  }
  return 0;
}

// What nlohmann's parser lets pass: of two equal keys it keeps the last, and it nests as deeply as the text does. A pass of its
// own, as a parser with a callback takes time that grows with the square of the number of entries.
class HeaderRules : public nlohmann::json_sax<Json> {
 public:
  const std::string& field() const { return field_; }  // of the first offence; empty if there is none
  const std::string& problem() const { return problem_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool start_array(std::size_t) override { return enter(); }
  bool end_array() override { return leave(); }
  bool key(string_t& key) override { return keys_.back().insert(key).second || offend(key, "duplicate entry"); }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) override { return false; }

 private:
  bool enter() {
    keys_.emplace_back();
    return keys_.size() <= kMaxDepth || offend("header", "nested too deeply");
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }
  bool offend(const std::string& field, const char* problem) {
    field_ = field;
    problem_ = problem;
    return false;  // ends the parse
  }

  std::vector<std::set<std::string>> keys_;  // seen so far, in each object around; empty for a list
  std::string field_, problem_;
};

bool is_count(const Json& value) { return value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t{1} << 62; }

}  // namespace

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

void SafetensorsFile::fail(const std::string& field, const std::string& problem) const {
  throw ToolError(kExitUsage, fmt::format("{}: {}: {}", name_, field, problem));
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : name_(path.string()) {
  map(path);
  try {
    parse();
  } catch (...) {
    munmap(const_cast<unsigned char*>(data_), static_cast<size_t>(bytes_));
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() { munmap(const_cast<unsigned char*>(data_), static_cast<size_t>(bytes_)); }

void SafetensorsFile::map(const std::filesystem::path& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw ToolError(kExitEnvironment, fmt::format("{}: cannot be opened: {}", name_, std::strerror(errno)));
  struct stat status = {};
  const bool regular = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  if (!regular || status.st_size < kLengthBytes) {
    close(file);
    if (!regular) throw ToolError(kExitEnvironment, fmt::format("{}: not a regular file", name_));
    fail("header length", "the file is shorter than the 8 bytes of a header length");
  }
  bytes_ = status.st_size;
  void* data = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_PRIVATE, file, 0);
  const int error = errno;
  close(file);
  if (data == MAP_FAILED) throw ToolError(kExitEnvironment, fmt::format("{}: cannot be mapped: {}", name_, std::strerror(error)));
  data_ = static_cast<const unsigned char*>(data);
}

// Where the header ends and the data begins.
const unsigned char* SafetensorsFile::check_header() const {
  // Pickle protocol 2 and later starts with 0x80 and its number; PyTorch's newer files are zip archives. Neither is ever loaded.
  if (data_[0] == 0x80 && data_[1] >= 2 && data_[1] <= 5 && (bytes_ == kLengthBytes || data_[kLengthBytes] != '{')) {
    fail("content", "this is a pickle file, which can run code when loaded; only safetensors files are read");
  }
  if (std::memcmp(data_, "PK\x03\x04", 4) == 0) {
    fail("content", "this is a zip archive (PyTorch's pickle format?); only safetensors files are read");
  }
  uint64_t length = 0;
  std::memcpy(&length, data_, sizeof length);  // little-endian, as x86 is
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) fail("header length", fmt::format("{} bytes, more than 100 MB", length));
  const auto header_bytes = static_cast<int64_t>(length);
  if (header_bytes > bytes_ - kLengthBytes) {
    fail("header length", fmt::format("{} bytes, but the file has only {} after it", header_bytes, bytes_ - kLengthBytes));
  }
  if (header_bytes == 0 || data_[kLengthBytes] != '{') fail("header", "does not start with '{'");
  // For the JSON parser its text would end there.
  if (std::memchr(data_ + kLengthBytes, 0, length) != nullptr) fail("header", "expected JSON, got a NUL in it");
  return data_ + kLengthBytes + header_bytes;
}

Tensor SafetensorsFile::parse_entry(const std::string& name, const nlohmann::json& entry, const unsigned char* payload) const {
  if (!entry.is_object()) fail(name, "is not an object");
  for (const char* field : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(field)) fail(name, fmt::format("{} is missing", field));
  }
  Tensor tensor;
  tensor.name = name;
  if (!entry["dtype"].is_string()) fail(name, "dtype: expected text");
  tensor.dtype = entry["dtype"].get<std::string>();
  int64_t size = dtype_bytes(tensor.dtype);
  if (size == 0) fail(name, fmt::format("dtype: '{}' is unknown", tensor.dtype));
  if (!entry["shape"].is_array()) fail(name, "shape: expected a list");
  int64_t elements = 1;
  for (const Json& dimension : entry["shape"]) {
    if (!is_count(dimension)) fail(name, fmt::format("shape: expected counts, got {}", dimension.dump()));
    tensor.shape.push_back(dimension.get<int64_t>());
    // A 0 after an overflow would hide it, so zeros are left out of this product.
    if (__builtin_mul_overflow(elements, std::max<int64_t>(tensor.shape.back(), 1), &elements)) {
      fail(name, "shape: the number of elements overflows");
    }
  }
  if (__builtin_mul_overflow(size, tensor.elements(), &size)) fail(name, "shape: the number of bytes overflows");
  const Json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !is_count(offsets[0]) || !is_count(offsets[1])) {
    fail(name, "data_offsets: expected two counts");
  }
  const auto first = offsets[0].get<int64_t>();
  const auto last = offsets[1].get<int64_t>();
  const int64_t payload_bytes = data_ + bytes_ - payload;
  if (first > last || last > payload_bytes) {
    fail(name, fmt::format("data_offsets: [{}, {}] is outside the {} bytes of data", first, last, payload_bytes));
  }
  if (last - first != size) {
    fail(name, fmt::format("data_offsets: {} bytes, but the shape and dtype make {}", last - first, size));
  }
  tensor.data = payload + first;
  tensor.bytes = size;
  return tensor;
}

void SafetensorsFile::check_metadata(const nlohmann::json& entry) const {
  if (!entry.is_object()) fail("__metadata__", "is not an object");
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string()) fail("__metadata__", fmt::format("{}: expected text", key));
  }
}

// In the order of the data; no gap, no overlap, nothing behind the last.
void SafetensorsFile::sort_and_check_layout(const unsigned char* payload) {
  std::stable_sort(tensors_.begin(), tensors_.end(),
                   [](const Tensor& a, const Tensor& b) { return a.data != b.data ? a.data < b.data : a.bytes < b.bytes; });
  const unsigned char* next = payload;
  for (const Tensor& tensor : tensors_) {
    if (tensor.data != next) fail(tensor.name, tensor.data < next ? "data_offsets: overlap" : "data_offsets: a gap before it");
    next += tensor.bytes;
  }
  if (next != data_ + bytes_) fail("data", fmt::format("{} trailing bytes", data_ + bytes_ - next));
}

void SafetensorsFile::parse() {
  const unsigned char* payload = check_header();
  HeaderRules rules;
  const bool is_json = Json::sax_parse(data_ + kLengthBytes, payload, &rules);
  if (!rules.problem().empty()) fail(rules.field(), rules.problem());
  if (!is_json) fail("header", "is not a JSON object");
  const Json header = Json::parse(data_ + kLengthBytes, payload);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      check_metadata(entry);
    } else {
      tensors_.push_back(parse_entry(name, entry, payload));
    }
  }
  sort_and_check_layout(payload);
}

const Tensor& SafetensorsFile::tensor(std::string_view name) const {
  std::vector<std::string_view> names;
  for (const Tensor& tensor : tensors_) {
    if (tensor.name == name) return tensor;
    names.push_back(tensor.name);
  }
  throw ToolError(kExitUsage, fmt::format("{}: no tensor '{}'; there are: {}", name_, name, fmt::join(names, ", ")));
}

const Tensor& SafetensorsFile::row_tensor(std::string_view name, const Tensor& matrix) const {
  const Tensor& tensor = this->tensor(name);
  const std::vector<int64_t> leading(matrix.shape.begin(), matrix.shape.end() - 1);
  const std::vector<int64_t> flat = {matrix.elements() / matrix.shape.back()};
  if (tensor.shape == leading || tensor.shape == flat) return tensor;
  const auto text = [](const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); };
  fail(tensor.name, fmt::format("expected {}{}, as {} is {}, got {}", text(leading), leading == flat ? "" : " or " + text(flat),
                                matrix.name, text(matrix.shape), text(tensor.shape)));
}

void write_safetensors(const std::filesystem::path& path, const std::vector<Tensor>& tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  int64_t offset = 0;
  for (const Tensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.bytes}}};
    offset += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the format pads with spaces, so that the data is aligned
  const uint64_t length = text.size();
  const std::filesystem::path beside = path.string() + ".tmp";
  std::ofstream out(beside, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << text;
  for (const Tensor& tensor : tensors) out.write(static_cast<const char*>(tensor.data), tensor.bytes);
  out.close();
  std::error_code error;
  if (out) std::filesystem::rename(beside, path, error);
  if (!out || error) throw ToolError(kExitEnvironment, fmt::format("{}: cannot be written", path.string()));
}

}  // namespace tileloss::tools
