#include <fcntl.h>
#include <poll.h>
#include <unistd.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <optional>
#include <sstream>

#include "support/config.h"
#include "support/descriptor.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/signals.h"

namespace tileloss::tools {
namespace {

[[noreturn]] void usage_error(const std::string& message) { throw ToolError(kExitUsage, message); }

// Limits that no honest config meets; they stop recursive aliases.
constexpr int kMaxDepth = 16;
constexpr int64_t kMaxNodes = 10000;
constexpr size_t kMaxFileBytes = 1 << 20;

struct Source {
  std::string name;        // of the file, or the whole --set
  bool has_lines = false;  // a --set has none
  std::filesystem::path directory;
  int64_t nodes = 0;

  std::string origin(const YAML::Mark& mark) const { return has_lines ? formatted("{}:{}", name, mark.line + 1) : name; }
};

ConfigNode convert(const YAML::Node& yaml, Source& source, const std::string& path, int depth) {
  ConfigNode node;
  node.origin = source.origin(yaml.Mark());
  node.directory = source.directory;
  if (depth > kMaxDepth || ++source.nodes > kMaxNodes)
    usage_error(formatted("{}: {}: nested too deeply", node.origin, shown(path)));
  if (yaml.IsScalar()) {
    node.kind = ConfigNode::Kind::kScalar;
    node.text = yaml.Scalar();
    node.quoted = yaml.Tag() == "!";
  } else if (yaml.IsSequence()) {
    node.kind = ConfigNode::Kind::kList;
    for (const auto& item : yaml) node.children.push_back(convert(item, source, path, depth + 1));
  } else if (yaml.IsMap()) {
    node.kind = ConfigNode::Kind::kMap;
    for (const auto& entry : yaml) {
      const std::string where = source.origin(entry.first.Mark());
      if (!entry.first.IsScalar())
        usage_error(formatted("{}: {}: a key must be a word", where, path.empty() ? "config" : shown(path)));
      const std::string key = entry.first.Scalar();
      const std::string full = path.empty() ? key : path + "." + key;
      const auto same = std::find_if(node.children.begin(), node.children.end(), [&](const auto& c) { return c.key == key; });
      if (same != node.children.end())
        usage_error(formatted("{}: {}: duplicate key (first at {})", where, shown(full), same->origin));
      ConfigNode child = convert(entry.second, source, full, depth + 1);
      child.key = key;
      child.origin = where;
      node.children.push_back(std::move(child));
    }
  } else {
    node.kind = ConfigNode::Kind::kEmpty;
  }
  return node;
}

// Takes events and keeps nothing.
class Ignore : public YAML::EventHandler {
  using Mark = YAML::Mark;
  using Text = std::string;
  void OnDocumentStart(const Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const Mark&, YAML::anchor_t) override {}
  void OnAlias(const Mark&, YAML::anchor_t) override {}
  void OnScalar(const Mark&, const Text&, YAML::anchor_t, const Text&) override {}
  void OnSequenceStart(const Mark&, const Text&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const Mark&, const Text&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

// The document, or nothing if there is none. Not by YAML::LoadAll, which yaml-cpp 0.7 never leaves when a document begins with a
// comma: each further one is empty, and stands at the same place. The parser sees the text without the white space at its end:
// before that, yaml-cpp takes a quoted value which is never closed.
std::optional<YAML::Node> parse_yaml(const std::string& text, const Source& source) {
  try {
    std::istringstream stream(text.substr(0, text.find_last_not_of(" \t\r\n") + 1));
    YAML::Parser parser(stream);
    Ignore ignore;
    if (!parser.HandleNextDocument(ignore)) return std::nullopt;
    if (parser.HandleNextDocument(ignore)) usage_error(formatted("{}: expected one YAML document, got 2 or more", source.name));
    return YAML::Load(text);
  } catch (const YAML::Exception& error) {
    usage_error(formatted("{}: not YAML: {}", source.origin(error.mark), error.msg));
  }
}

// Of a file, a pipe or a device, whose writer may take its time, or never come: a stop ends the wait.
std::string read_text(const std::filesystem::path& file) {
  const auto fail = [&](const std::string& problem) {
    throw ToolError(kExitEnvironment, formatted("{}: {}", shown(file.string()), problem));
  };
  std::error_code error;
  const std::filesystem::file_type type = std::filesystem::status(file, error).type();
  if (type == std::filesystem::file_type::not_found) fail("no such config file");
  if (type == std::filesystem::file_type::directory) fail("a folder, not a config file");
  const Descriptor in(open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (in.get() < 0) fail(formatted("cannot be read: {}", std::strerror(errno)));
  std::string text(kMaxFileBytes + 1, '\0');
  size_t size = 0;
  while (size < text.size()) {
    if (!wait_for(in.get(), POLLIN)) check_stop();
    const ssize_t count = read(in.get(), text.data() + size, text.size() - size);
    if (count == 0) break;
    if (count > 0) size += static_cast<size_t>(count);
    if (count < 0 && errno != EAGAIN && errno != EINTR) fail(formatted("cannot be read: {}", std::strerror(errno)));
  }
  if (size == text.size()) usage_error(formatted("{}: larger than 1 MB", shown(file.string())));
  text.resize(size);
  return text;
}

void apply_override(ConfigNode& root, const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) usage_error(formatted("--set {}: expected key=value", shown(text)));
  const std::string path = text.substr(0, equals);
  Source source{"--set " + shown(text), false, std::filesystem::current_path(), 0};
  const std::optional<YAML::Node> value = parse_yaml(text.substr(equals + 1), source);

  ConfigNode* node = &root;
  for (size_t start = 0; start <= path.size();) {
    const size_t dot = std::min(path.find('.', start), path.size());
    const std::string key = path.substr(start, dot - start);
    if (key.empty()) usage_error(formatted("{}: empty part in the key", source.name));
    if (node->kind != ConfigNode::Kind::kMap) {
      usage_error(formatted("{}: {} is not a section (at {})", source.name, shown(node->key), node->origin));
    }
    auto found = std::find_if(node->children.begin(), node->children.end(), [&](const auto& c) { return c.key == key; });
    if (found == node->children.end()) {
      ConfigNode child;
      child.key = key;
      child.origin = source.name;
      node->children.push_back(std::move(child));
      found = std::prev(node->children.end());
    }
    node = &*found;
    start = dot + 1;
  }
  std::string key = node->key;
  *node = convert(value ? *value : YAML::Node(), source, path, 0);
  node->key = std::move(key);
}

const char* kind_name(ConfigNode::Kind kind) {
  switch (kind) {
    case ConfigNode::Kind::kEmpty: return "nothing";
    case ConfigNode::Kind::kScalar: return "a value";
    case ConfigNode::Kind::kList: return "a list";
    case ConfigNode::Kind::kMap: return "a section";
  }
  return "";
}

void leave_out(ConfigNode& map, const std::string& path) {
  const size_t dot = path.find('.');
  const std::string key = path.substr(0, dot);
  if (dot == std::string::npos) {
    std::erase_if(map.children, [&](const ConfigNode& child) { return child.key == key; });
    return;
  }
  for (ConfigNode& child : map.children) {
    if (child.key == key) leave_out(child, path.substr(dot + 1));
  }
}

}  // namespace

ConfigNode load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides,
                       const std::vector<std::string>& skipped) {
  const std::string text = read_text(file);
  // What `<(...)` gives has no folder of its own.
  const bool is_file = std::filesystem::is_regular_file(file);
  Source source{shown(file.string()), true,
                is_file ? std::filesystem::absolute(file).parent_path() : std::filesystem::current_path(), 0};
  const std::optional<YAML::Node> document = parse_yaml(text, source);
  if (!document) usage_error(formatted("{}: expected one YAML document, got none", source.name));
  ConfigNode root = convert(*document, source, "", 0);
  if (root.kind != ConfigNode::Kind::kMap) {
    usage_error(formatted("{}: expected keys and values, got {}", root.origin, kind_name(root.kind)));
  }
  for (const std::string& text_override : overrides) apply_override(root, text_override);
  for (const std::string& path : skipped) leave_out(root, path);
  return root;
}

ConfigNode parse_overrides(const std::vector<std::string>& overrides) {
  ConfigNode root;
  root.origin = "command line";
  for (const std::string& text : overrides) apply_override(root, text);
  return root;
}

}  // namespace tileloss::tools
