#include "tests/cuda_on_host/ptx_program.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

namespace cuda_on_host {
namespace {

using Words = std::vector<std::string>;

std::string trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\n"), end = text.find_last_not_of(" \t\n");
  return begin == std::string_view::npos ? std::string() : std::string(text.substr(begin, end - begin + 1));
}
// At separators that no bracket holds.
Words split(std::string_view text, char separator) {
  Words words;
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size() && (text[i] == '{' || text[i] == '[')) ++depth;
    if (i < text.size() && (text[i] == '}' || text[i] == ']')) --depth;
    if (i < text.size() && (text[i] != separator || depth > 0)) continue;
    if (std::string word = trimmed(text.substr(begin, i - begin)); !word.empty()) words.push_back(std::move(word));
    begin = i + 1;
  }
  return words;
}
// Of a type's name, "f32": 0 where it is none.
std::size_t bytes_of(const std::string& type) {
  if (type == "pred") return 1;
  if (type.size() < 2 || std::string_view("busf").find(type[0]) == std::string_view::npos) return 0;
  return static_cast<std::size_t>(std::atoi(type.c_str() + 1)) / 8;
}
std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

// A variable's or a parameter's: ".shared .align 8 .b8 name[256]".
struct Declaration {
  std::string name;
  std::size_t bytes = 0, alignment = 1;

  explicit Declaration(const std::string& text) {
    std::istringstream words(text);
    for (std::string word; words >> word;) {
      if (word == ".align") {
        words >> alignment;
      } else if (word[0] != '.') {
        name = word;
      } else if (const std::size_t size = bytes_of(word.substr(1)); size > 0) {
        bytes = size, alignment = std::max(alignment, size);
      }
    }
    if (const auto bracket = name.find('['); bracket != std::string::npos) {
      bytes *= static_cast<std::size_t>(std::atoll(name.c_str() + bracket + 1));
      name.resize(bracket);
    }
  }
};

// What is in a file's unnamed namespace has a name of the file's in PTX, "_GLOBAL__N__..." behind the digits of its length.
std::string host_name(std::string name) {
  for (auto at = name.find("_GLOBAL__N__"); at != std::string::npos; at = name.find("_GLOBAL__N__")) {
    auto begin = at;
    while (begin > 0 && std::isdigit(static_cast<unsigned char>(name[begin - 1])) != 0) --begin;
    name.replace(begin, at - begin + static_cast<std::size_t>(std::atoll(name.c_str() + begin)), "12_GLOBAL__N_1");
  }
  return name;
}

[[noreturn]] void refuse(const std::string& file, const std::string& what) {
  std::fprintf(stderr, "cuda_on_host: %s: not known here: %s\n", file.c_str(), what.c_str());
  std::abort();
}

}  // namespace

class PtxParser {
 public:
  PtxParser(const PtxFiles::File& file, PtxKernel& kernel) : file_(file), kernel_(kernel) {
    kernel.registers.assign(PtxKernel::kSpecials, 0);
    static constexpr const char* kNames[] = {"%tid.x",           "%ntid.x",           "%ctaid.x", "%nctaid.x",
                                             "%cluster_ctarank", "%cluster_nctaid.x", "%laneid"};
    for (std::uint32_t i = 0; i < PtxKernel::kLocal; ++i) registers_[kNames[i]] = i;
  }
  // From behind ".entry".
  void parse(std::size_t at);

 private:
  std::uint32_t fresh(std::uint64_t value) {
    kernel_.registers.push_back(value);
    return static_cast<std::uint32_t>(kernel_.registers.size() - 1);
  }
  std::uint32_t place(const std::string& operand);
  std::uint64_t constant(const std::string& operand);
  void address(const std::string& operand, PtxInstruction& i, int from);
  void places(const std::string& operand, PtxInstruction& i, std::uint32_t (&all)[4]);
  void declare(const std::string& text);
  void statement(const std::string& text);
  void instruction(const std::string& text, const std::string& name, const Words& operands, PtxInstruction& i);
  void move_memory(const std::string& name, const Words& operands, PtxInstruction& i);

  const PtxFiles::File& file_;
  PtxKernel& kernel_;
  std::map<std::string, std::uint32_t> registers_;  // by name, constants too
  std::map<std::string, std::uint32_t> labels_;
  std::vector<std::pair<std::size_t, std::string>> branches_;
  std::map<std::string, Declaration> shared_;
  std::vector<std::uint32_t> dynamic_;
  std::set<std::uint32_t> pairs_;
};

std::uint32_t PtxParser::place(const std::string& operand) {
  if (const auto found = registers_.find(operand); found != registers_.end()) return found->second;
  const std::uint32_t number = fresh(constant(operand));
  for (const auto& parameter : kernel_.parameters) {
    if (parameter.name == operand) kernel_.parameter_registers.push_back(number);
  }
  registers_[operand] = number;
  return number;
}

// What is in an operand's register at first.
std::uint64_t PtxParser::constant(const std::string& operand) {
  constexpr std::uint64_t kNobodySet = 0xfff8deadffc0beef;
  if (std::isdigit(static_cast<unsigned char>(operand[0])) != 0 || operand[0] == '-') {
    if (operand[1] == 'f' || operand[1] == 'd') return std::strtoull(operand.c_str() + 2, nullptr, 16);
    return operand[0] == '-' ? static_cast<std::uint64_t>(std::strtoll(operand.c_str(), nullptr, 0))
                             : std::strtoull(operand.c_str(), nullptr, 0);
  }
  for (const auto& parameter : kernel_.parameters) {
    if (parameter.name == operand) return parameter.offset;
  }
  std::size_t bytes = 0, alignment = 0;
  if (const auto own = shared_.find(operand); own != shared_.end()) {
    bytes = own->second.bytes, alignment = own->second.alignment;
  } else if (const auto files = file_.shared.find(operand); files != file_.shared.end()) {
    bytes = files->second.bytes, alignment = files->second.alignment;
    if (bytes == 0) dynamic_.push_back(static_cast<std::uint32_t>(kernel_.registers.size()));
  } else if (operand.starts_with("%SP") || (operand[0] == '%' && std::isdigit(static_cast<unsigned char>(operand.back())) != 0)) {
    return kNobodySet;
  } else {
    refuse(file_.name, operand);
  }
  const std::size_t at = round_up(kernel_.shared_bytes, alignment);
  kernel_.shared_bytes = at + bytes;
  return at;
}

// "[register+8]"
void PtxParser::address(const std::string& operand, PtxInstruction& i, int from) {
  const auto plus = operand.find('+');
  i.from[from] = place(trimmed(operand.substr(1, std::min(plus, operand.size() - 1) - 1)));
  if (plus != std::string::npos) i.offset = std::atoll(operand.c_str() + plus + 1);
}

// "{a, b}", or one.
void PtxParser::places(const std::string& operand, PtxInstruction& i, std::uint32_t (&all)[4]) {
  const Words words = operand[0] == '{' ? split(operand.substr(1, operand.size() - 2), ',') : Words{operand};
  i.count = static_cast<std::uint8_t>(words.size());
  for (std::size_t k = 0; k < words.size() && k < 4; ++k) all[k] = place(words[k]);
}

void PtxParser::declare(const std::string& text) {
  const Declaration declared(text);
  if (text.starts_with(".pragma")) return;
  if (text.starts_with(".reg")) {  // "%f<5>", or in inline assembly "l, h"
    for (const std::string& name : split(text.substr(text.find_first_of(" \t", text.find(' ') + 1)), ',')) {
      if (name.find('<') == std::string::npos) registers_.try_emplace(name, fresh(0));
    }
  } else if (text.starts_with(".shared")) {
    shared_.emplace(declared.name, declared);
  } else if (text.starts_with(".local") && kernel_.local_bytes == 0) {
    registers_[declared.name] = PtxKernel::kLocal;
    kernel_.local_bytes = declared.bytes;
  } else {
    refuse(file_.name, text);
  }
}

void PtxParser::statement(const std::string& text) {
  if (text[0] == '.') return declare(text);
  PtxInstruction i;
  i.statement = static_cast<std::uint32_t>(kernel_.statements.size());
  std::string rest = text;
  if (rest[0] == '@') {
    const auto end = rest.find_first_of(" \t");
    i.has_predicate = true, i.is_negated = rest[1] == '!';
    i.predicate = place(rest.substr(i.is_negated ? 2 : 1, end - (i.is_negated ? 2 : 1)));
    rest = trimmed(rest.substr(end));
  }
  const auto end = std::min(rest.find_first_of(" \t"), rest.size());
  instruction(text, rest.substr(0, end), split(rest.substr(end), ','), i);
  kernel_.code.push_back(i);
  kernel_.statements.push_back(text);
}

void PtxParser::instruction(const std::string& text, const std::string& name, const Words& operands, PtxInstruction& i) {
  const auto begins = [&name](const char* with) { return name.starts_with(with); };
  i.bytes = static_cast<std::uint8_t>(bytes_of(name.substr(name.rfind('.') + 1)));
  if (begins("ld.") || begins("st.") || begins("atom.") || begins("cp.async.cg.")) return move_memory(name, operands, i);
  if (begins("mov.") && operands[0][0] == '{') {
    i.kind = PtxKind::kSplit;
    i.from[0] = place(operands[1]);
    return places(operands[0], i, i.to);
  }
  if (begins("mov.") && operands[1][0] == '{') {
    i.kind = PtxKind::kJoin;
    i.to[0] = place(operands[0]);
    return places(operands[1], i, i.from);
  }
  if (begins("bra")) {
    i.kind = PtxKind::kBranch;
    branches_.emplace_back(kernel_.code.size(), operands[0]);
    return;
  }
  static const std::map<std::string, PtxKind> kinds = {{"bar.sync", PtxKind::kBarrier},
                                                       {"barrier.cluster.arrive.aligned", PtxKind::kArrive},
                                                       {"barrier.cluster.wait.aligned", PtxKind::kWait},
                                                       {"ret", PtxKind::kReturn},
                                                       {"membar.gl", PtxKind::kNothing},
                                                       {"membar.sys", PtxKind::kNothing},
                                                       {"prefetch.global.L2", PtxKind::kNothing},
                                                       {"griddepcontrol.wait", PtxKind::kNothing},
                                                       {"griddepcontrol.launch_dependents", PtxKind::kNothing},
                                                       {"cp.async.commit_group", PtxKind::kNothing},
                                                       {"cp.async.wait_group", PtxKind::kNothing}};
  if (const auto found = kinds.find(name); found != kinds.end()) {
    i.kind = found->second;
    if (i.kind == PtxKind::kBarrier && operands != Words{"0"}) refuse(file_.name, text);
    return;
  }
  static const std::map<std::string, PtxKind> moves = {
      {"shfl.sync.bfly.b32", PtxKind::kShuffle}, {"mapa.u64", PtxKind::kPeer}, {"cvta.shared.u64", PtxKind::kGeneric}};
  if (const auto found = moves.find(name); found != moves.end()) {
    i.kind = found->second;
  } else if (i.function = ptx_function(name); i.function != nullptr) {
    i.kind = PtxKind::kCompute;
  } else {
    refuse(file_.name, text);
  }
  i.to[0] = place(operands[0].substr(0, operands[0].find('|')));
  if (name.starts_with("cvt.rn.") && name.ends_with("16x2.f32")) pairs_.insert(i.to[0]);
  // of a shuffle the predicate, whose lanes are all there
  for (std::size_t k = 1; k < operands.size() && k <= 4; ++k) i.from[k - 1] = place(operands[k]);
}

void PtxParser::move_memory(const std::string& name, const Words& operands, PtxInstruction& i) {
  const Words parts = split(name, '.');
  i.is_shared = std::find(parts.begin(), parts.end(), "shared") != parts.end();
  i.is_signed = parts.back()[0] == 's', i.is_real = parts.back()[0] == 'f';
  if (parts[0] == "ld") {
    i.kind = PtxKind::kLoad;
    places(operands[0], i, i.to);
    address(operands[1], i, 0);
  } else if (parts[0] == "st") {
    i.kind = PtxKind::kStore;
    address(operands[0], i, 0);
    places(operands[1], i, i.to);
    i.is_pair = pairs_.contains(i.to[0]);
  } else if (parts[0] == "atom") {
    i.kind = PtxKind::kAtomic;
    i.to[0] = place(operands[0]);
    address(operands[1], i, 0);
    for (std::size_t k = 2; k < operands.size() && k < 4; ++k) i.from[k - 1] = place(operands[k]);
    i.function = ptx_function("atom." + parts[parts.size() - 2] + "." + parts.back());
    if (i.function == nullptr) refuse(file_.name, name);
  } else {
    i.kind = PtxKind::kCopy;
    i.bytes = 16;
    address(operands[0], i, 1);
    if (i.offset != 0 || operands[2] != "16") refuse(file_.name, name);
    address(operands[1], i, 0);
  }
}

void PtxParser::parse(std::size_t at) {
  const std::string& text = file_.text;
  const auto open = text.find('(', at), close = text.find(')', open);
  kernel_.name = trimmed(std::string_view(text).substr(at, open - at));
  for (const std::string& parameter : split(std::string_view(text).substr(open + 1, close - open - 1), ',')) {
    const Declaration declared(parameter);
    const std::size_t offset = round_up(kernel_.parameter_bytes, declared.alignment);
    kernel_.parameters.push_back({declared.name, offset, declared.bytes});
    kernel_.parameter_bytes = offset + declared.bytes;
  }
  std::string part;
  int depth = 0;
  for (std::size_t i = text.find('{', close) + 1; i < text.size(); ++i) {
    const char c = text[i];
    const bool is_first = part.empty();
    if (is_first && (c == ' ' || c == '\t' || c == '\n')) continue;
    if (is_first && c == '{') {
      ++depth;
    } else if (is_first && c == '}') {
      if (depth-- == 0) break;
    } else if (c == '/' && text[i + 1] == '/') {
      i = text.find('\n', i);
    } else if (c == ':' && part[0] == '$') {
      labels_[std::exchange(part, {})] = static_cast<std::uint32_t>(kernel_.code.size());
    } else if (c == ';') {
      statement(std::exchange(part, {}));
    } else {
      part += c;
    }
  }
  for (const auto& [place, label] : branches_) {
    if (!labels_.contains(label)) refuse(file_.name, label);
    kernel_.code[place].target = labels_[label];
  }
  kernel_.code.emplace_back().kind = PtxKind::kReturn;
  kernel_.code.back().statement = static_cast<std::uint32_t>(kernel_.statements.size());
  kernel_.statements.emplace_back("the end");
  kernel_.shared_bytes = round_up(kernel_.shared_bytes, 16);
  for (const std::uint32_t number : dynamic_) kernel_.registers[number] = kernel_.shared_bytes;
}

PtxFiles::PtxFiles(const std::string& folder) {
  for (const auto& item : std::filesystem::directory_iterator(folder)) {
    if (item.path().extension() != ".ptx") continue;
    std::ifstream in(item.path(), std::ios::binary);
    File& file = files_.emplace_back();
    file.name = item.path().filename().string();
    file.text.assign(std::istreambuf_iterator<char>(in), {});
    for (auto at = file.text.find(".entry"); at != std::string::npos; at = file.text.find(".entry", at + 1)) {
      const auto begin = at + 6;
      const std::string name = trimmed(std::string_view(file.text).substr(begin, file.text.find('(', at) - begin));
      entries_[host_name(name)] = {files_.size() - 1, begin};
    }
    // Variables of the file's, which begin a line.
    for (const char* const kind : {"\n.shared ", "\n.extern .shared "}) {
      for (auto at = file.text.find(kind); at != std::string::npos; at = file.text.find(kind, at + 1)) {
        const Declaration declared(file.text.substr(at + 1, file.text.find(';', at) - at - 1));
        file.shared[declared.name] = {declared.bytes, declared.alignment};
      }
    }
  }
}

const PtxKernel* PtxFiles::find(const std::string& symbol) {
  if (const auto known = kernels_.find(symbol); known != kernels_.end()) return &known->second;
  const auto entry = entries_.find(symbol);
  if (entry == entries_.end()) return nullptr;
  PtxKernel& kernel = kernels_[symbol];
  PtxParser(files_[entry->second.file], kernel).parse(entry->second.at);
  return &kernel;
}

std::vector<std::string> PtxFiles::names() const {
  std::vector<std::string> all;
  for (const auto& [name, entry] : entries_) all.push_back(name);
  return all;
}

}  // namespace cuda_on_host
