// A config is a tree in which every value knows where it stands, and each key is asked for by name, type and range: what nobody
// asked for is unknown. Every error names the key and the line (or the --set).
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "support/json.h"

namespace tileloss::tools {

struct ConfigNode {
  enum class Kind { kEmpty, kScalar, kList, kMap };
  Kind kind = Kind::kMap;
  std::string key;                  // within its map
  std::string text;                 // of a scalar
  bool quoted = false;              // a quoted scalar is text, never a number or a boolean
  std::string origin;               // "file.yaml:12" or "--set a.b=1"
  std::filesystem::path directory;  // relative paths start here
  std::vector<ConfigNode> children;
  std::vector<std::string> others;  // keys of this map that its giver reads, and has left out: for "did you mean"
};

// A tree as the command hands it over, in JSON: of each node its members by their names here, `kind` as scalar, list, map or
// empty.
ConfigNode config_node(const Json& json);

struct NumberRange {
  double minimum = -std::numeric_limits<double>::max();
  double maximum = std::numeric_limits<double>::max();
  bool exclusive_minimum = false;
  std::optional<double> also = std::nullopt;  // accepted though outside the range
};

// Reads one map. Without a fallback a key is required.
class ConfigReader {
 public:
  explicit ConfigReader(const ConfigNode& map, std::string path = "");

  bool has(std::string_view key) const { return find(key) != nullptr; }

  std::string text(const std::string& key, std::optional<std::string> fallback = std::nullopt);
  int64_t integer(const std::string& key, std::optional<int64_t> fallback, int64_t minimum, int64_t maximum,
                  std::optional<int64_t> also = std::nullopt);
  double number(const std::string& key, std::optional<double> fallback, const NumberRange& range);
  bool boolean(const std::string& key, std::optional<bool> fallback);
  std::string choice(const std::string& key, std::optional<std::string> fallback, const std::vector<std::string>& choices);
  std::vector<std::string> list(const std::string& key, const std::vector<std::string>& fallback,
                                const std::vector<std::string>& choices);
  std::filesystem::path path(const std::string& key, std::optional<std::filesystem::path> fallback = std::nullopt);
  // An absent section reads as an empty one.
  ConfigReader section(const std::string& key);

  // Throws for a key that was never asked for.
  void finish() const;
  // Throws a usage error about `key`.
  [[noreturn]] void fail(const std::string& key, const std::string& problem) const;

 private:
  const ConfigNode* find(std::string_view key) const;
  const ConfigNode* ask(const std::string& key, bool required);
  const ConfigNode* ask_scalar(const std::string& key, bool required, const char* expected);

  const ConfigNode* map_;
  std::string path_;  // "kernel." for the section kernel
  std::set<std::string> known_;
};

}  // namespace tileloss::tools
