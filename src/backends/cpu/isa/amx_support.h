// Whether AMX's tile registers can be used: the processor has them, the operating system saves them, and the kernel let this
// process use them. The registers are 8 KB a thread, so Linux wants to be asked, once a process, and may refuse: an old kernel
// does, one that was told to, and any if a thread has an alternate signal stack too small for them.
#pragma once

#include <cstdint>

namespace tileloss::impl::cpu {

enum class AmxSupport { kReady, kNotInThisBuild, kNotOnThisCpu, kNotEnabledBySystem, kPermissionRefused };

// What the machine answers.
struct AmxMachine {
  std::uint32_t cpuid_7_edx = 0;           // bit 22: AMX-BF16, bit 24: AMX-TILE
  bool has_xgetbv = false;                 // cpuid says that the system uses XSAVE
  std::uint64_t xcr0 = 0;                  // bits 17 and 18: the system saves tile configuration and tiles
  bool (*request_permission)() = nullptr;  // called only if all of the above is there
};

AmxSupport find_amx_support(const AmxMachine& machine);

// Of this machine. The first call asks the kernel for permission, which later calls do not repeat.
AmxSupport amx_support();

const char* amx_note(AmxSupport support);  // "AMX: permission refused", ...; "" if it is ready

}  // namespace tileloss::impl::cpu
