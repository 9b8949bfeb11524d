#include "backends/cpu/isa/amx_support.h"

namespace tileloss::impl::cpu {

AmxSupport find_amx_support(const AmxMachine& machine) {
  constexpr std::uint32_t kBfloat16AndTiles = (1U << 22) | (1U << 24);
  constexpr std::uint64_t kSavedTiles = (1U << 17) | (1U << 18);
  if ((machine.cpuid_7_edx & kBfloat16AndTiles) != kBfloat16AndTiles) return AmxSupport::kNotOnThisCpu;
  if (!machine.has_xgetbv || (machine.xcr0 & kSavedTiles) != kSavedTiles) return AmxSupport::kNotEnabledBySystem;
  return machine.request_permission() ? AmxSupport::kReady : AmxSupport::kPermissionRefused;
}

const char* amx_note(AmxSupport support) {
  switch (support) {
    case AmxSupport::kReady: return "";
    case AmxSupport::kNotInThisBuild: return "AMX: not in this build";
    case AmxSupport::kNotOnThisCpu: return "AMX: not on this CPU";
    case AmxSupport::kNotEnabledBySystem: return "AMX: not enabled by the system";
    case AmxSupport::kPermissionRefused: return "AMX: permission refused";
  }
  return "";
}

}  // namespace tileloss::impl::cpu
