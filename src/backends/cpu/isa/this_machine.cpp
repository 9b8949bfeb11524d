// This machine's answers, in a file of their own: the suite that runs AMX code where there is none links others in their place.
#include "backends/cpu/isa/amx_support.h"
#include "backends/cpu/isa/processor.h"

#if defined(TILELOSS_HAVE_X86_64) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#endif

namespace tileloss::impl::cpu {

#if defined(TILELOSS_HAVE_X86_64) && defined(__linux__)
namespace {

bool request_permission() {
  constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

AmxMachine this_machine() {
  AmxMachine machine;
  machine.request_permission = &request_permission;
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) machine.cpuid_7_edx = edx;
  machine.has_xgetbv = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_OSXSAVE) != 0;
  if (machine.has_xgetbv) {
    std::uint32_t low = 0, high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    machine.xcr0 = (std::uint64_t{high} << 32) | low;
  }
  return machine;
}

Processor ask_processor() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  Processor processor;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return processor;
  char vendor[12];
  std::memcpy(vendor, &ebx, 4);
  std::memcpy(vendor + 4, &edx, 4);
  std::memcpy(vendor + 8, &ecx, 4);
  processor.vendor.assign(vendor, sizeof vendor);
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return processor;
  processor.family = (eax >> 8 & 0xf) + (eax >> 20 & 0xff);
  processor.model = (eax >> 4 & 0xf) | (eax >> 12 & 0xf0);
  return processor;
}

}  // namespace

AmxSupport amx_support() {
  static const AmxSupport support = find_amx_support(this_machine());
  return support;
}

const Processor& this_processor() {
  static const Processor processor = ask_processor();
  return processor;
}
#else
const Processor& this_processor() {
  static const Processor unknown;
  return unknown;
}
AmxSupport amx_support() { return AmxSupport::kNotInThisBuild; }
#endif

}  // namespace tileloss::impl::cpu
