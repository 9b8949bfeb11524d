#include "support/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <utility>

#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/suggestion.h"

namespace tileloss::tools {
namespace {

[[noreturn]] void usage_error(const std::string& message) { throw ToolError(kExitUsage, message); }

const char* kind_name(ConfigNode::Kind kind) {
  switch (kind) {
    case ConfigNode::Kind::kEmpty: return "nothing";
    case ConfigNode::Kind::kScalar: return "a value";
    case ConfigNode::Kind::kList: return "a list";
    case ConfigNode::Kind::kMap: return "a section";
  }
  return "";
}

}  // namespace

ConfigNode config_node(const Json& json) {
  ConfigNode node;
  node.key = json.value("key", "");
  node.text = json.value("text", "");
  node.quoted = json.value("quoted", false);
  node.origin = json.value("origin", "");
  node.directory = json.value("directory", "");
  node.others = json.value("others", std::vector<std::string>());
  const auto kind = json.value("kind", "map");
  node.kind = kind == "scalar" ? ConfigNode::Kind::kScalar
              : kind == "list" ? ConfigNode::Kind::kList
              : kind == "map"  ? ConfigNode::Kind::kMap
                               : ConfigNode::Kind::kEmpty;
  if (!json.contains("children")) return node;
  for (const Json& child : json["children"]) node.children.push_back(config_node(child));
  return node;
}

ConfigReader::ConfigReader(const ConfigNode& map, std::string path) : map_(&map), path_(std::move(path)) {}

const ConfigNode* ConfigReader::find(std::string_view key) const {
  for (const ConfigNode& child : map_->children) {
    if (child.key == key) return &child;
  }
  return nullptr;
}

void ConfigReader::fail(const std::string& key, const std::string& problem) const {
  const ConfigNode* node = find(key);
  const std::string& place = node != nullptr ? node->origin : map_->origin;
  usage_error(formatted("{}{}{}: {}", place, place.empty() ? "" : ": ", shown(path_ + key), problem));
}

const ConfigNode* ConfigReader::ask(const std::string& key, bool required) {
  known_.insert(key);
  const ConfigNode* node = find(key);
  if (node == nullptr && required) fail(key, "required, but missing");
  if (node != nullptr && node->kind == ConfigNode::Kind::kEmpty) fail(key, "has no value");
  return node;
}

const ConfigNode* ConfigReader::ask_scalar(const std::string& key, bool required, const char* expected) {
  const ConfigNode* node = ask(key, required);
  if (node != nullptr && node->kind != ConfigNode::Kind::kScalar) {
    fail(key, formatted("expected {}, got {}", expected, kind_name(node->kind)));
  }
  return node;
}

std::string ConfigReader::text(const std::string& key, std::optional<std::string> fallback) {
  const ConfigNode* node = ask_scalar(key, !fallback, "text");
  return node == nullptr ? *fallback : node->text;
}

int64_t ConfigReader::integer(const std::string& key, std::optional<int64_t> fallback, int64_t minimum, int64_t maximum,
                              std::optional<int64_t> also) {
  const ConfigNode* node = ask_scalar(key, !fallback, "an integer");
  if (node == nullptr) return *fallback;
  const std::string& text = node->text;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = end == text.data() + text.size() && !text.empty();
  if (node->quoted || !whole || error == std::errc::invalid_argument) {
    fail(key, formatted("expected an integer, got '{}'", shown(text)));
  }
  const bool in_range = error == std::errc() && value >= minimum && value <= maximum;
  if (!in_range && !(error == std::errc() && also && value == *also)) {
    fail(key, formatted("{} is out of range: expected {} to {}{}", shown(text), minimum, maximum,
                        also ? formatted(", or {}", *also) : ""));
  }
  return value;
}

double ConfigReader::number(const std::string& key, std::optional<double> fallback, const NumberRange& range) {
  const ConfigNode* node = ask_scalar(key, !fallback, "a number");
  if (node == nullptr) return *fallback;
  // from_chars knows neither YAML's leading "+" nor its ".inf" and ".nan".
  std::string text = node->text;
  if (text.starts_with('+')) text.erase(0, 1);
  const std::string bare = text.starts_with('-') ? text.substr(1) : text;
  if (!node->quoted &&
      (bare == ".inf" || bare == ".Inf" || bare == ".INF" || bare == ".nan" || bare == ".NaN" || bare == ".NAN")) {
    fail(key, formatted("expected a finite number, got '{}'", shown(node->text)));
  }
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = end == text.data() + text.size() && !text.empty();
  if (node->quoted || !whole || error == std::errc::invalid_argument) {
    fail(key, formatted("expected a number, got '{}'", shown(node->text)));
  }
  if (error == std::errc::result_out_of_range && std::strtod(text.c_str(), nullptr) == 0) {
    fail(key, formatted("expected 0 or a number of 4.9e-324 or more, with either sign, got '{}'", shown(node->text)));
  }
  if (error == std::errc::result_out_of_range || !std::isfinite(value)) {
    fail(key, formatted("expected a finite number, got '{}'", shown(node->text)));
  }
  const bool too_small = range.exclusive_minimum ? value <= range.minimum : value < range.minimum;
  if ((too_small || value > range.maximum) && !(range.also && value == *range.also)) {
    fail(key, formatted("{} is out of range: expected {} {:g} and <= {:g}{}", shown(node->text),
                        range.exclusive_minimum ? ">" : ">=", range.minimum, range.maximum,
                        range.also ? formatted(", or {:g}", *range.also) : ""));
  }
  return value;
}

bool ConfigReader::boolean(const std::string& key, std::optional<bool> fallback) {
  const ConfigNode* node = ask_scalar(key, !fallback, "true or false");
  if (node == nullptr) return *fallback;
  if (node->quoted || (node->text != "true" && node->text != "false")) {
    fail(key, formatted("expected true or false, got '{}'", shown(node->text)));
  }
  return node->text == "true";
}

std::string ConfigReader::choice(const std::string& key, std::optional<std::string> fallback,
                                 const std::vector<std::string>& choices) {
  const ConfigNode* node = ask_scalar(key, !fallback, "a word");
  if (node == nullptr) return *fallback;
  if (std::find(choices.begin(), choices.end(), node->text) == choices.end()) {
    fail(key, formatted("'{}' is none of {}", shown(node->text), fmt::join(choices, ", ")));
  }
  return node->text;
}

std::vector<std::string> ConfigReader::list(const std::string& key, const std::vector<std::string>& fallback,
                                            const std::vector<std::string>& choices) {
  const ConfigNode* node = ask(key, false);
  if (node == nullptr) return fallback;
  if (node->kind != ConfigNode::Kind::kList) fail(key, formatted("expected a list, got {}", kind_name(node->kind)));
  std::vector<std::string> values;
  for (const ConfigNode& item : node->children) {
    if (std::find(choices.begin(), choices.end(), item.text) == choices.end()) {
      fail(key, formatted("'{}' is none of {}", shown(item.text), fmt::join(choices, ", ")));
    }
    if (std::find(values.begin(), values.end(), item.text) != values.end()) fail(key, formatted("'{}' twice", shown(item.text)));
    values.push_back(item.text);
  }
  return values;
}

std::filesystem::path ConfigReader::path(const std::string& key, std::optional<std::filesystem::path> fallback) {
  const ConfigNode* node = ask_scalar(key, !fallback, "a path");
  if (node == nullptr) return *fallback;
  if (node->text.empty()) fail(key, "has no value");
  return node->directory / node->text;  // as it stands: behind a link, ".." is not what the text before it says
}

ConfigReader ConfigReader::section(const std::string& key) {
  static const ConfigNode kEmpty;
  const ConfigNode* node = ask(key, false);
  if (node != nullptr && node->kind != ConfigNode::Kind::kMap) {
    fail(key, formatted("expected a section, got {}", kind_name(node->kind)));
  }
  return ConfigReader(node != nullptr ? *node : kEmpty, path_ + key + ".");
}

void ConfigReader::finish() const {
  for (const ConfigNode& child : map_->children) {
    if (known_.contains(child.key)) continue;
    std::vector<std::string> words(known_.begin(), known_.end());
    words.insert(words.end(), map_->others.begin(), map_->others.end());
    std::erase(words, child.key);
    fail(child.key, formatted("unknown key{}; known here: {}", did_you_mean(child.key, words), fmt::join(known_, ", ")));
  }
}

}  // namespace tileloss::tools
