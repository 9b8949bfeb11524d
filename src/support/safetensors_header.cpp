#include "support/safetensors_header.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/signals.h"

namespace tileloss::tools {
namespace {

using Json = nlohmann::json;

// Of values that nobody asks for. The parser would follow 100 MB of brackets.
constexpr int kMaxDepth = 16;
// More than any framework has; 100 MB of dimensions would become a list of 400 MB.
constexpr size_t kMaxDimensions = 64;
constexpr uint64_t kMaxCount = uint64_t{1} << 62;

// Of a text or a number. The parser's message about a bad one quotes it, and takes nine times its length to do so; what a trainer
// puts into the metadata has some 100 KB.
constexpr size_t kMaxTokenBytes = 8'000'000;

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

constexpr const char* kMetadataName = "__metadata__";

// Takes the parser's events. What nlohmann lets pass is refused here: two equal names, of which it would keep the last, and
// nesting as deep as the text has it.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  HeaderReader(const std::string& file, int64_t data_begin, int64_t data_end)
      : file_(file), data_begin_(data_begin), data_end_(data_end) {}

  std::vector<FileTensor> take() && { return std::move(tensors_); }

  bool null() override { return other_value("null"); }
  bool boolean(bool value) override { return other_value(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return other_value(fmt::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { return other_value(text); }
  bool binary(binary_t&) override { return other_value("binary"); }
  bool number_unsigned(number_unsigned_t value) override;
  bool string(string_t& text) override;
  bool key(string_t& text) override;
  bool start_object(std::size_t) override;
  bool end_object() override;
  bool start_array(std::size_t) override;
  bool end_array() override;
  bool parse_error(std::size_t, const std::string&, const Json::exception&) override { fail("header", "is not a JSON object"); }

 private:
  enum class In { kNothing, kHeader, kMetadata, kEntry, kShape, kOffsets, kIgnored };
  enum Field { kDtype, kShape, kOffsets, kFields, kUnknown = kFields };
  static constexpr const char* kFieldNames[] = {"dtype", "shape", "data_offsets"};

  [[noreturn]] void fail(const std::string& field, const std::string& problem) const {
    refuse_safetensors(file_, field, problem);
  }
  bool other_value(std::string_view given);
  bool start_ignored();
  bool end_ignored();
  void finish_entry();
  void finish_metadata();

  const std::string& file_;
  int64_t data_begin_, data_end_;
  std::vector<FileTensor> tensors_;
  In in_ = In::kNothing;
  std::string name_;  // of the entry, or the key in the metadata
  bool has_metadata_ = false;
  std::vector<size_t> metadata_keys_;  // their hashes: the keys themselves would take many times their text
  Field field_ = kUnknown;
  std::array<bool, kFields> has_{};
  FileTensor tensor_;
  std::array<uint64_t, 2> offsets_{};
  size_t offset_count_ = 0;
  int ignored_depth_ = 0;
};

// A value where another kind was expected, unless nobody asks for it.
bool HeaderReader::other_value(std::string_view given) {
  check_stop();
  switch (in_) {
    case In::kNothing: fail("header", "is not a JSON object");
    case In::kHeader: fail(name_, "is not an object");
    case In::kMetadata: fail(kMetadataName, shown(name_) + ": expected text");
    case In::kShape: fail(name_, formatted("shape: expected counts, got {}", shown(given)));
    case In::kOffsets: fail(name_, "data_offsets: expected two counts");
    case In::kIgnored: return true;
    case In::kEntry: break;
  }
  switch (field_) {
    case kDtype: fail(name_, "dtype: expected text");
    case kShape: fail(name_, "shape: expected a list");
    case kOffsets: fail(name_, "data_offsets: expected two counts");
    case kUnknown: break;
  }
  return true;
}

bool HeaderReader::number_unsigned(number_unsigned_t value) {
  const bool is_shape = in_ == In::kShape;
  if ((!is_shape && in_ != In::kOffsets) || value > kMaxCount) return other_value(fmt::to_string(value));
  if (is_shape) {
    if (tensor_.shape.size() == kMaxDimensions) fail(name_, formatted("shape: more than {} dimensions", kMaxDimensions));
    tensor_.shape.push_back(static_cast<int64_t>(value));
  } else {
    if (offset_count_ == offsets_.size()) return other_value("");
    offsets_[offset_count_++] = value;
  }
  return true;
}

bool HeaderReader::string(string_t& text) {
  if (in_ == In::kMetadata) return true;
  if (in_ != In::kEntry || field_ != kDtype) return other_value("text");
  const auto* found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeSize& dtype) { return dtype.name == text; });
  if (found == kDtypes.end()) fail(name_, formatted("dtype: '{}' is unknown", shown(text)));
  tensor_.dtype = found->name;
  return true;
}

bool HeaderReader::key(string_t& text) {
  check_stop();
  switch (in_) {
    case In::kEntry:
      field_ = static_cast<Field>(std::find(std::begin(kFieldNames), std::end(kFieldNames), text) - std::begin(kFieldNames));
      if (field_ == kUnknown) return true;
      if (std::exchange(has_[field_], true)) fail(name_, std::string(kFieldNames[field_]) + ": duplicate entry");
      return true;
    case In::kHeader:
    case In::kMetadata:
      name_ = std::move(text);
      if (in_ == In::kMetadata) metadata_keys_.push_back(std::hash<std::string>()(name_));
      return true;
    default: return true;
  }
}

bool HeaderReader::start_object(std::size_t) {
  if (in_ == In::kNothing) {
    in_ = In::kHeader;
  } else if (in_ != In::kHeader) {
    return start_ignored();
  } else if (name_ == kMetadataName) {
    if (std::exchange(has_metadata_, true)) fail(kMetadataName, "duplicate entry");
    in_ = In::kMetadata;
  } else {
    in_ = In::kEntry;
    has_.fill(false);
    tensor_ = {};
    offset_count_ = 0;
  }
  return true;
}

bool HeaderReader::start_array(std::size_t) {
  if (in_ != In::kEntry || field_ == kDtype || field_ == kUnknown) return start_ignored();
  in_ = field_ == kShape ? In::kShape : In::kOffsets;
  return true;
}

bool HeaderReader::start_ignored() {
  other_value("a list or an object");
  in_ = In::kIgnored;
  if (++ignored_depth_ > kMaxDepth) fail("header", "nested too deeply");
  return true;
}

bool HeaderReader::end_ignored() {
  if (--ignored_depth_ == 0) in_ = In::kEntry;
  return true;
}

bool HeaderReader::end_array() {
  if (in_ == In::kIgnored) return end_ignored();
  if (in_ == In::kOffsets && offset_count_ != offsets_.size()) other_value("");
  in_ = In::kEntry;
  return true;
}

bool HeaderReader::end_object() {
  if (in_ == In::kIgnored) return end_ignored();
  if (in_ == In::kEntry) finish_entry();
  if (in_ == In::kMetadata) finish_metadata();
  in_ = in_ == In::kHeader ? In::kNothing : In::kHeader;
  return true;
}

void HeaderReader::finish_entry() {
  for (int field = 0; field < kFields; ++field) {
    if (!has_[static_cast<size_t>(field)]) fail(name_, std::string(kFieldNames[field]) + " is missing");
  }
  int64_t elements = 1;
  for (const int64_t dimension : tensor_.shape) {
    // A 0 after an overflow would hide it, so zeros are left out of this product.
    if (__builtin_mul_overflow(elements, std::max<int64_t>(dimension, 1), &elements)) {
      fail(name_, "shape: the number of elements overflows");
    }
  }
  int64_t size = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& d) { return d.name == tensor_.dtype; })->bytes;
  if (__builtin_mul_overflow(size, tensor_.elements(), &size)) fail(name_, "shape: the number of bytes overflows");
  const auto first = static_cast<int64_t>(offsets_[0]), last = static_cast<int64_t>(offsets_[1]);
  if (first > last || last > data_end_ - data_begin_) {
    fail(name_, formatted("data_offsets: [{}, {}] is outside the {} bytes of data", first, last, data_end_ - data_begin_));
  }
  if (last - first != size) {
    fail(name_, formatted("data_offsets: {} bytes, but the shape and dtype make {}", last - first, size));
  }
  tensor_.name = std::move(name_);
  tensor_.offset = data_begin_ + first;
  tensor_.bytes = size;
  tensors_.push_back(std::move(tensor_));
}

void HeaderReader::finish_metadata() {
  std::sort(metadata_keys_.begin(), metadata_keys_.end());
  if (std::adjacent_find(metadata_keys_.begin(), metadata_keys_.end()) != metadata_keys_.end()) {
    fail(kMetadataName, "a key stands there twice");
  }
  metadata_keys_ = {};
}

// Before the parser sees them.
void check_tokens(const std::string& file, std::string_view text) {
  size_t start = 0;
  bool is_text = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') {
      is_text = !is_text;
    } else if (is_text) {
      i += text[i] == '\\' ? 1 : 0;
    } else if (text[i] == ',' || text[i] == ':' || text[i] == '{' || text[i] == '[') {
      start = i;
    }
    if (i - start > kMaxTokenBytes) {
      refuse_safetensors(file, "header",
                         formatted("a text or number of more than {} MB: {}", kMaxTokenBytes / 1'000'000,
                                   shown(text.substr(start + 1, kShownBytes))));
    }
  }
}

}  // namespace

int64_t FileTensor::elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

void refuse_safetensors(const std::string& file, const std::string& field, const std::string& problem) {
  throw ToolError(kExitUsage, formatted("{}: {}: {}", file, shown(field), problem));
}

std::vector<FileTensor> parse_safetensors_header(const std::string& file, std::string_view text, int64_t data_begin,
                                                   int64_t data_end) {
  check_tokens(file, text);
  HeaderReader reader(file, data_begin, data_end);
  Json::sax_parse(text.begin(), text.end(), &reader);
  std::vector<FileTensor> tensors = std::move(reader).take();
  std::unordered_set<std::string_view> names(tensors.size());
  for (const FileTensor& tensor : tensors) {
    check_stop();
    if (!names.insert(tensor.name).second) refuse_safetensors(file, tensor.name, "duplicate entry");
  }
  names = {};
  std::stable_sort(tensors.begin(), tensors.end(), [](const FileTensor& a, const FileTensor& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes;
  });
  // No gap, no overlap, nothing behind the last.
  int64_t next = data_begin;
  for (const FileTensor& tensor : tensors) {
    if (tensor.offset != next) {
      refuse_safetensors(file, tensor.name, tensor.offset < next ? "data_offsets: overlap" : "data_offsets: a gap before it");
    }
    next += tensor.bytes;
  }
  if (next != data_end) refuse_safetensors(file, "data", formatted("{} trailing bytes", data_end - next));
  return tensors;
}

}  // namespace tileloss::tools
