#include "tests/shared/configs.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

namespace tileloss::tools {
namespace {

ConfigNode node_of(const Json& value, const std::string& key, const std::string& origin) {
  ConfigNode node;
  node.key = key;
  node.origin = origin;
  if (value.is_string()) {
    node.text = value.get<std::string>();
    node.kind = node.text.empty() ? ConfigNode::Kind::kEmpty : ConfigNode::Kind::kScalar;
    return node;
  }
  node.kind = value.is_array() ? ConfigNode::Kind::kList : ConfigNode::Kind::kMap;
  for (const auto& [name, child] : value.items()) node.children.push_back(node_of(child, value.is_array() ? "" : name, origin));
  return node;
}

Json list_of(std::string text) {
  std::erase(text, ' ');
  Json list = Json::array();
  std::istringstream items(text.substr(1, text.size() - 2));
  for (std::string item; std::getline(items, item, ',');) list.push_back(item);
  return list;
}

void apply(const std::string& set, ConfigNode& root) {
  const size_t equals = set.find('=');
  const std::string value = set.substr(equals + 1);
  ConfigNode* node = &root;
  std::istringstream path(set.substr(0, equals));
  for (std::string key; std::getline(path, key, '.');) {
    auto child = std::ranges::find(node->children, key, &ConfigNode::key);
    if (child == node->children.end()) {
      node->children.push_back(node_of(Json::object(), key, set));
      child = std::prev(node->children.end());
    }
    node = &*child;
  }
  *node = node_of(value.starts_with('[') ? list_of(value) : Json(value), node->key, set);
}

// "a=1 b=[x, y]" in two.
Sets words(const std::string& text) {
  Sets words;
  std::istringstream in(text);
  for (std::string word; in >> word;) {
    if (!words.empty() && words.back().find('[') != std::string::npos && words.back().back() != ']') {
      words.back() += word;
    } else {
      words.push_back(word);
    }
  }
  return words;
}

// From where the build has put them, beside the program: the kit's programs name no path of the machine that made them.
const Json& repository_configs() {
  static const Json all = [] {
    std::ifstream in(std::filesystem::read_symlink("/proc/self/exe").parent_path() / "tests/shared/configs.json");
    return Json::parse(in);
  }();
  return all;
}

}  // namespace

Sets joined(Sets sets, const Sets& more) {
  sets.insert(sets.end(), more.begin(), more.end());
  return sets;
}

ConfigNode config_tree(const std::string& config, const Sets& sets) {
  const bool is_file = config.ends_with(".yaml");
  ConfigNode root = node_of(is_file ? repository_configs().at(config) : Json::object(), "", is_file ? config : "a test");
  for (const std::string& set : is_file ? sets : joined(words(config), sets)) apply(set, root);
  return root;
}

GradcheckConfig config_of(const std::string& config, const Sets& sets, std::vector<TensorFile> files) {
  GradcheckConfig read = read_gradcheck_config(config_tree(config, sets), config);
  read.files = std::move(files);
  for (const std::string& path : {read.source.path.string(), read.teacher.path.string()}) {
    if (!path.empty() && std::ranges::find(read.files, path, &TensorFile::name) == read.files.end())
      read.files.push_back(read_tensors(path));
  }
  return read;
}

Sets config_names() {
  Sets names;
  for (const auto& [name, config] : repository_configs().items()) {
    if (!name.ends_with("_model.yaml")) names.push_back(name);
  }
  return names;
}

TensorFile read_tensors(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  const auto bytes = std::make_shared<const std::string>(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  uint64_t header = 0;
  std::memcpy(&header, bytes->data(), sizeof header);
  const char* data = bytes->data() + sizeof header + header;
  const Json entries = Json::parse(bytes->substr(sizeof header, header));
  std::vector<StoredTensor> tensors;
  for (const auto& [name, entry] : entries.items()) {
    if (name == "__metadata__") continue;
    const auto begin = entry["data_offsets"][0].get<int64_t>(), end = entry["data_offsets"][1].get<int64_t>();
    tensors.push_back({name, entry["dtype"], entry["shape"], end - begin, data + begin});
  }
  return {path.string(), std::move(tensors), bytes};
}

}  // namespace tileloss::tools
