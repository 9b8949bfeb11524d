// What is said of this machine's instruction sets.
#include "backends/cpu/isa/isa.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "backends/cpu/isa/amx_support.h"
#include "backends/cpu/isa/processor.h"

namespace tileloss::test {
namespace {

using impl::cpu::AmxSupport;

bool kernel_lists(const std::string& flag) {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("flags")) return (line + " ").find(" " + flag + " ") != std::string::npos;
  }
  return false;
}

// Linux lists what it enabled; whether this process may use it is another question.
TEST(ThisMachine, HasAmxWhereLinuxListsIt) {
  const AmxSupport support = impl::cpu::amx_support();
  const bool may_ask = support == AmxSupport::kReady || support == AmxSupport::kPermissionRefused;
  EXPECT_EQ(may_ask, kernel_lists("amx_tile") && kernel_lists("amx_bf16"));
  EXPECT_EQ(impl::cpu::amx_support(), support);
}

TEST(ThisMachine, SaysWhyItGoesWithoutAmx) {
  const std::string note = impl::cpu::why_without_amx();
#ifdef __x86_64__
  EXPECT_EQ(note.empty(), impl::cpu::isa_supported(TILELOSS_ISA_AVX512_AMX));
#else
  EXPECT_EQ(note, "");
#endif
  EXPECT_TRUE(note.empty() || note.starts_with("AMX: ")) << note;
  EXPECT_EQ(impl::cpu::isa_supported(TILELOSS_ISA_AVX512_AMX), impl::cpu::best_isa() == TILELOSS_ISA_AVX512_AMX);
}

TEST(Processor, MultipliesPairsOfBfloat16FasterOrSlowerThanFloats) {
  const struct {
    const char* vendor;
    unsigned int family, model;
    bool is_fast;
  } kKnown[] = {
      {"AuthenticAMD", 0x19, 0x11, true},  // Zen 4: Genoa
      {"AuthenticAMD", 0x1a, 0x02, true},  // Zen 5: Turin
      {"GenuineIntel", 6, 85, true},       // Cooper Lake, by its stepping also Skylake and Cascade Lake
      {"GenuineIntel", 6, 143, false},     // Sapphire Rapids
      {"GenuineIntel", 6, 207, false},     // Emerald Rapids
      {"GenuineIntel", 6, 173, false},     // Granite Rapids
      {"GenuineIntel", 19, 1, false},      // Diamond Rapids
      {"", 0, 0, true},
  };
  for (const auto& p : kKnown) {
    EXPECT_EQ(impl::cpu::has_fast_pair_products({p.vendor, p.family, p.model}), p.is_fast) << p.vendor << " " << p.model;
  }
}

// The choice, and that either can be asked for.
TEST(ThisMachine, TakesAvx512WhereProductsOfPairsAreSlow) {
  if (!impl::cpu::isa_supported(TILELOSS_ISA_AVX512_BF16)) GTEST_SKIP() << "no AVX-512 BF16";
  const bool is_fast = has_fast_pair_products(impl::cpu::this_processor());
  if (!impl::cpu::isa_supported(TILELOSS_ISA_AVX512_AMX)) {
    EXPECT_EQ(impl::cpu::best_isa(), is_fast ? TILELOSS_ISA_AVX512_BF16 : TILELOSS_ISA_AVX512);
  }
  for (const tileloss_isa isa : {TILELOSS_ISA_AVX512_BF16, TILELOSS_ISA_AVX512}) {
    EXPECT_EQ(impl::cpu::choose_isa(isa).isa, isa);
    EXPECT_EQ(impl::cpu::choose_isa(isa).note, "");
  }
}

}  // namespace
}  // namespace tileloss::test
