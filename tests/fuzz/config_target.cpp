// The YAML reader with the keys of gradcheck. A NUL ends the file; behind it come --set options, a NUL between two of them.
#include <string>
#include <vector>

#include "check/gradcheck_config.h"
#include "tests/fuzz/target.h"

namespace tileloss::test {

bool accepts(const std::uint8_t* data, std::size_t size) {
  const std::string all(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> parts = {""};
  for (const char c : all) {
    if (c == '\0') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  const MemoryFile file(parts[0].data(), parts[0].size());
  const std::vector<std::string> overrides(parts.begin() + 1, parts.end());
  return ends_well([&] {
    const tools::GradcheckConfig config = tools::read_gradcheck_config(file.path(), overrides);
    require(config.source.is_file || (config.batch_size > 0 && config.seq_len > 0 && config.vocab_size > 0 && config.dtype),
            "what is accepted has a shape and a type");
    require(config.ignore_prob >= 0 && config.ignore_prob <= 1, "what is accepted is in range");
  });
}

}  // namespace tileloss::test
