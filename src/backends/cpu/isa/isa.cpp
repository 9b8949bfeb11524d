#include "backends/cpu/isa/isa.h"

#if defined(TILELOSS_HAVE_X86_64)
#include <cpuid.h>
#elif defined(TILELOSS_HAVE_AARCH64)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <cstdlib>
#include <string_view>

#include "backends/cpu/isa/amx_support.h"
#include "backends/cpu/isa/kernels.h"
#include "backends/cpu/isa/processor.h"
#include "core/enumerators.h"

namespace tileloss::impl::cpu {
namespace {

struct Isa {
  tileloss_isa id;
  const char* name;
  const KernelTable& (*kernels)();
  bool (*is_present)();
};

[[maybe_unused]] KernelTable with_bfloat16(KernelTable kernels, const Bfloat16Kernels& bfloat16) {
  kernels.run[kStorageBfloat16] = bfloat16.run;
  kernels.target[kStorageBfloat16] = bfloat16.target;
  kernels.matmul = bfloat16.matmul;
  return kernels;
}

#if defined(TILELOSS_HAVE_X86_64)
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
// Asks the kernel for permission, and so comes last.
bool has_avx512_amx() { return has_avx512_bf16() && amx_support() == AmxSupport::kReady; }

const KernelTable& avx512_bf16_kernels() {
  static const KernelTable table = with_bfloat16(kAvx512Kernels, kAvx512Bf16Kernels);
  return table;
}

// Products in tile registers, and the rest as without them.
const KernelTable& amx_kernels() {
  static const KernelTable table = [] {
    KernelTable kernels = avx512_bf16_kernels();
    kernels.matmul = kAmxMatmul;
    return kernels;
  }();
  return table;
}
#elif defined(TILELOSS_HAVE_AARCH64)
bool has_neon() { return (getauxval(AT_HWCAP) & HWCAP_ASIMD) != 0; }
bool has_neon_bf16() { return has_neon() && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }

const KernelTable& neon_bf16_kernels() {
  static const KernelTable table = with_bfloat16(kNeonKernels, kNeonBf16Kernels);
  return table;
}
#endif

// Has avx512_bf16, and is faster without.
bool has_slow_bf16() { return isa_supported(TILELOSS_ISA_AVX512_BF16) && !has_fast_pair_products(this_processor()); }

template <const KernelTable& table>
const KernelTable& kernels_of() {
  return table;
}

// Richest first.
const Isa kIsas[] = {
#ifdef TILELOSS_HAVE_X86_64
    {TILELOSS_ISA_AVX512_AMX, "avx512_amx", &amx_kernels, &has_avx512_amx},
    {TILELOSS_ISA_AVX512_BF16, "avx512_bf16", &avx512_bf16_kernels, &has_avx512_bf16},
    {TILELOSS_ISA_AVX512, "avx512", &kernels_of<kAvx512Kernels>, &has_avx512},
    {TILELOSS_ISA_AVX2, "avx2", &kernels_of<kAvx2Kernels>, &has_avx2},
#elif defined(TILELOSS_HAVE_AARCH64)
    {TILELOSS_ISA_NEON_BF16, "neon_bf16", &neon_bf16_kernels, &has_neon_bf16},
    {TILELOSS_ISA_NEON, "neon", &kernels_of<kNeonKernels>, &has_neon},
#endif
    {TILELOSS_ISA_BASELINE, "baseline", &kernels_of<kBaselineKernels>, [] { return true; }},
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
  switch (as_enum<TILELOSS_ISA_AUTO>(isa)) {
    case TILELOSS_ISA_AUTO: return "auto";
    case TILELOSS_ISA_BASELINE: return "baseline";
    case TILELOSS_ISA_AVX2: return "avx2";
    case TILELOSS_ISA_AVX512: return "avx512";
    case TILELOSS_ISA_AVX512_BF16: return "avx512_bf16";
    case TILELOSS_ISA_AVX512_AMX: return "avx512_amx";
    case TILELOSS_ISA_NEON: return "neon";
    case TILELOSS_ISA_NEON_BF16: return "neon_bf16";
  }
  return "unknown";
}

bool isa_supported(tileloss_isa isa) {
  const Isa* found = find(isa);
  return found != nullptr && found->is_present();
}

const KernelTable& kernels(tileloss_isa isa) { return find(isa)->kernels(); }

tileloss_isa best_isa() {
  for (const Isa& candidate : kIsas) {
    const bool is_slow = candidate.id == TILELOSS_ISA_AVX512_BF16 && has_slow_bf16();
    if (candidate.is_present() && !is_slow) return candidate.id;
  }
  return TILELOSS_ISA_BASELINE;
}

const char* why_without_amx() {
  if (find(TILELOSS_ISA_AVX512_AMX) == nullptr || isa_supported(TILELOSS_ISA_AVX512_AMX)) return "";
  const char* note = amx_note(amx_support());
  return *note != '\0' ? note : "AMX: of no use without AVX-512 BF16";
}

IsaChoice choose_isa(tileloss_isa wanted) {
  const auto refused = [](const std::string& what, const std::string& given, bool is_amx) {
    const std::string why = is_amx ? why_without_amx() : "";
    return IsaChoice{TILELOSS_ISA_AUTO,
                     what + ": expected one that this build and machine have (" + supported_names() + "), got " + given +
                         (why.empty() ? "" : " (" + why + ")"),
                     ""};
  };
  if (wanted != TILELOSS_ISA_AUTO) {
    if (isa_supported(wanted)) return {wanted, "", ""};
    return refused("isa", isa_name(wanted), wanted == TILELOSS_ISA_AVX512_AMX);
  }
  const char* variable = std::getenv("TILELOSS_ISA");
  const std::string_view forced = variable == nullptr ? "" : variable;
  if (forced.empty()) {
    const std::string note = why_without_amx();
    return {best_isa(), "", note.empty() || !has_slow_bf16() ? note : note + "; slow VDPBF16PS"};
  }
  for (const Isa& candidate : kIsas) {
    if (forced == candidate.name && candidate.is_present()) return {candidate.id, "", ""};
  }
  return refused("TILELOSS_ISA", "\"" + std::string(forced) + "\"", forced == isa_name(TILELOSS_ISA_AVX512_AMX));
}

}  // namespace tileloss::impl::cpu
