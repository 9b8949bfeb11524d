// The header of a safetensors file: JSON that names each tensor's type, shape and place.
#ifndef TILELOSS_SUPPORT_SAFETENSORS_HEADER_H_
#define TILELOSS_SUPPORT_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tileloss::tools {

// A tensor of a file that is read.
struct FileTensor {
  std::string name;
  std::string_view dtype;  // the file's word, for ever valid: F32, BF16, F16, I64, ...
  std::vector<int64_t> shape;
  int64_t offset = 0;  // of its first byte, from the file's beginning
  int64_t bytes = 0;

  int64_t elements() const;
};

// The tensors in the order of their data, which starts at byte `data_begin` of the file and ends at `data_end`. `file`: its name
// in messages. Throws ToolError (usage) naming the field for all that SafetensorsFile refuses in a header, and Stopped. Takes a
// small multiple of the text's size: the text is not made into a tree.
std::vector<FileTensor> parse_safetensors_header(const std::string& file, std::string_view text, int64_t data_begin,
                                                   int64_t data_end);

[[noreturn]] void refuse_safetensors(const std::string& file, const std::string& field, const std::string& problem);

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_SAFETENSORS_HEADER_H_
