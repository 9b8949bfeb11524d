#include "cpu/isa.h"

#ifdef TILELOSS_HAVE_X86_64
#include <cpuid.h>
#endif

#include <cstdlib>
#include <string_view>

#include "cpu/kernels.h"

namespace tileloss::cpu {
namespace {

struct Isa {
  tileloss_isa id;
  const char* name;
  const KernelTable* kernels;
  bool (*is_present)();
};

#ifdef TILELOSS_HAVE_X86_64
// The bit of the processor alone, as clang 14's __builtin_cpu_supports does not know it.
bool has_f16c() {
  // Asked once: in a virtual machine cpuid leaves it, which takes 8 us.
  static const bool is_present = [] {
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  }();
  return is_present;
}

// __builtin_cpu_supports also asks the operating system whether it saves the registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && has_avx2();
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

// Best first.
const Isa kIsas[] = {
#ifdef TILELOSS_HAVE_X86_64
    {TILELOSS_ISA_AVX512_BF16, "avx512_bf16", &kAvx512Bf16Kernels, &has_avx512_bf16},
    {TILELOSS_ISA_AVX512, "avx512", &kAvx512Kernels, &has_avx512},
    {TILELOSS_ISA_AVX2, "avx2", &kAvx2Kernels, &has_avx2},
#endif
    {TILELOSS_ISA_BASELINE, "baseline", &kBaselineKernels, [] { return true; }},
};

const Isa* find(tileloss_isa isa) {
  for (const Isa& candidate : kIsas) {
    if (candidate.id == isa) return &candidate;
  }
  return nullptr;
}

std::string supported_names() {
  std::string names;
  for (const Isa& candidate : kIsas) {
    if (candidate.is_present()) names += (names.empty() ? "" : ", ") + std::string(candidate.name);
  }
  return names;
}

}  // namespace

const char* isa_name(tileloss_isa isa) {
  switch (isa) {
    case TILELOSS_ISA_AUTO: return "auto";
    case TILELOSS_ISA_BASELINE: return "baseline";
    case TILELOSS_ISA_AVX2: return "avx2";
    case TILELOSS_ISA_AVX512: return "avx512";
    case TILELOSS_ISA_AVX512_BF16: return "avx512_bf16";
    default: return "unknown";
  }
}

bool isa_supported(tileloss_isa isa) {
  const Isa* found = find(isa);
  return found != nullptr && found->is_present();
}

const KernelTable& kernels(tileloss_isa isa) { return *find(isa)->kernels; }

tileloss_isa best_isa() {
  for (const Isa& candidate : kIsas) {
    if (candidate.is_present()) return candidate.id;
  }
  return TILELOSS_ISA_BASELINE;
}

IsaChoice choose_isa(tileloss_isa wanted) {
  if (wanted != TILELOSS_ISA_AUTO) {
    if (isa_supported(wanted)) return {wanted, ""};
    return {TILELOSS_ISA_AUTO, std::string("isa: expected one that this build and machine have (") + supported_names() +
                                   "), got " + isa_name(wanted)};
  }
  const char* forced = std::getenv("TILELOSS_ISA");
  for (const Isa& candidate : kIsas) {
    const bool is_wanted = forced == nullptr || *forced == '\0' || std::string_view(forced) == candidate.name;
    if (is_wanted && candidate.is_present()) return {candidate.id, ""};
  }
  return {TILELOSS_ISA_AUTO, std::string("TILELOSS_ISA: expected one that this build and machine have (") + supported_names() +
                                 "), got \"" + forced + "\""};
}

}  // namespace tileloss::cpu
