#include "support/cpu_model.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace tileloss::tools {
namespace {

// A core as 64-bit ARM's Linux lists it.
std::string core(const std::string& features, const std::string& implementer, const std::string& variant,
                 const std::string& part) {
  return "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: " + features + "\nCPU implementer\t: " + implementer +
         "\nCPU architecture: 8\nCPU variant\t: " + variant + "\nCPU part\t: " + part + "\nCPU revision\t: 1\n\n";
}

TEST(CpuModel, IsNamedAsLinuxNamesItOrByItsMakersNumbers) {
  const std::string few = "fp asimd evtstrm aes crc32 cpuid";
  const std::string many = "fp asimd atomics fphp asimdhp asimddp sve asimdfhm sve2 svebf16 i8mm bf16 dgh";
  const std::string x86 = "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9R14\nflags\t\t: fpu avx512_bf16\n\n";
  for (const auto& [cpuinfo, name, features] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {x86 + x86, "AMD EPYC 9R14", ""},
           {core(many, "0x41", "0x0", "0xd4f"), "Neoverse V2", "NEON, float16 arithmetic, BF16, SVE, SVE2"},
           {core(few, "0x41", "0x0", "0xd08") + core(few, "0x41", "0x0", "0xd08"), "Cortex-A72", "NEON"},
           {core(few, "0x41", "0x0", "0xd87") + core(few, "0x41", "0x0", "0xd85"), "Cortex-A725, Cortex-X925", "NEON"},
           {"model name\t: ARMv8 Processor rev 1 (v8l)\n" + core(few, "0x6d", "0x0", "0xd49"), "Azure Cobalt 100", "NEON"},
           {core(few, "0x61", "0x1", "0x023"), "Apple, MIDR 0x611f0231", "NEON"},
           {core("fp asimddp svebf16", "0x48", "0x3", "0xd4f"), "MIDR 0x483fd4f1", ""},
           {"", "unknown", ""}}) {
    std::istringstream in(cpuinfo);
    const CpuModel model = cpu_model(in);
    EXPECT_EQ(model.name, name);
    EXPECT_EQ(model.features, features) << name;
  }
}

}  // namespace
}  // namespace tileloss::tools
