#include "support/cpu_model.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "support/format.h"

namespace tileloss::tools {
namespace {

struct Core {
  uint32_t implementer, part;
  const char* name;
};

// As their makers number them: servers, and boards that people train or serve on.
constexpr Core kCores[] = {
    {0x41, 0xd03, "Cortex-A53"},  {0x41, 0xd05, "Cortex-A55"},  {0x41, 0xd08, "Cortex-A72"},  {0x41, 0xd0b, "Cortex-A76"},
    {0x41, 0xd0c, "Neoverse N1"}, {0x41, 0xd40, "Neoverse V1"}, {0x41, 0xd41, "Cortex-A78"},  {0x41, 0xd42, "Cortex-A78AE"},
    {0x41, 0xd49, "Neoverse N2"}, {0x41, 0xd4f, "Neoverse V2"}, {0x41, 0xd80, "Cortex-A520"}, {0x41, 0xd81, "Cortex-A720"},
    {0x41, 0xd83, "Neoverse V3"}, {0x41, 0xd84, "Neoverse V3"}, {0x41, 0xd85, "Cortex-X925"}, {0x41, 0xd87, "Cortex-A725"},
    {0x41, 0xd8e, "Neoverse N3"}, {0x46, 0x001, "A64FX"},       {0x48, 0xd01, "Kunpeng 920"}, {0x6d, 0xd49, "Azure Cobalt 100"},
    {0xc0, 0xac3, "AmpereOne"},   {0xc0, 0xac4, "AmpereOne"},
};

constexpr std::pair<std::string_view, const char*> kFeatures[] = {
    {"asimd", "NEON"}, {"asimdhp", "float16 arithmetic"}, {"bf16", "BF16"}, {"sve", "SVE"}, {"sve2", "SVE2"}, {"sme", "SME"}};

std::string core_name(std::map<std::string, uint32_t>& number) {
  const uint32_t implementer = number["CPU implementer"], part = number["CPU part"];
  for (const Core& core : kCores) {
    if (core.implementer == implementer && core.part == part) return core.name;
  }
  constexpr uint32_t kApple = 0x61, kArchitecture = 0xf;
  // The register that a processor names itself with.
  const uint32_t midr =
      implementer << 24 | number["CPU variant"] << 20 | kArchitecture << 16 | part << 4 | number["CPU revision"];
  return formatted("{}MIDR 0x{:08x}", implementer == kApple ? "Apple, " : "", midr);
}

std::string in_words(const std::string& features) {
  std::vector<const char*> words;
  for (const auto& [feature, word] : kFeatures) {
    if ((" " + features + " ").find(formatted(" {} ", feature)) != std::string::npos) words.push_back(word);
  }
  return formatted("{}", fmt::join(words, ", "));
}

}  // namespace

CpuModel cpu_model(std::istream& cpuinfo) {
  CpuModel model;
  std::vector<std::string> names;
  std::map<std::string, uint32_t> number;  // of the core that is being read
  for (std::string line; std::getline(cpuinfo, line);) {
    const std::string key = line.substr(0, line.find_first_of("\t:"));
    const size_t colon = line.find(": ");
    const std::string value = colon == std::string::npos ? "" : line.substr(colon + 2);
    if (key == "model name") model.name = value;
    if (key == "Features") model.features = in_words(value);
    if (key.starts_with("CPU ")) number[key] = static_cast<uint32_t>(std::strtoul(value.c_str(), nullptr, 0));
    if (key != "CPU revision") continue;  // a core's last line
    const std::string name = core_name(number);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  if (!names.empty()) model.name = formatted("{}", fmt::join(names, ", "));
  return model;
}

}  // namespace tileloss::tools
