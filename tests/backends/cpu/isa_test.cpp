// What is said of this machine's instruction sets.
#include "backends/cpu/isa/isa.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "backends/cpu/isa/amx_support.h"

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
  EXPECT_EQ(note.empty(), impl::cpu::isa_supported(TILELOSS_ISA_AVX512_AMX));
  EXPECT_TRUE(note.empty() || note.starts_with("AMX: ")) << note;
  EXPECT_EQ(impl::cpu::isa_supported(TILELOSS_ISA_AVX512_AMX), impl::cpu::best_isa() == TILELOSS_ISA_AVX512_AMX);
}

}  // namespace
}  // namespace tileloss::test
