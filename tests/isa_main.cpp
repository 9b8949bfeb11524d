// The main of suites that run once per instruction set: TILELOSS_ISA names the one to run under.
#include <gtest/gtest.h>
#include <tileloss/tileloss.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

bool machine_has(const char* isa_name) {
  for (tileloss_isa isa = TILELOSS_ISA_BASELINE; std::strcmp(tileloss_isa_name(isa), "unknown") != 0; ++isa) {
    if (std::strcmp(tileloss_isa_name(isa), isa_name) == 0) return tileloss_isa_supported(isa) != 0;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* isa = std::getenv("TILELOSS_ISA");
  if (isa != nullptr && !testing::GTEST_FLAG(list_tests) && !machine_has(isa)) {
    std::printf("SKIPPED: this machine or build has no %s\n", isa);
    return TILELOSS_SKIP_CODE;
  }
  return RUN_ALL_TESTS();
}
