// The floating-point control word of a task: round to nearest, flush results below the smallest normal to zero (an exp that
// underflows into denormals costs five times as much), whatever the host thread has set; and back again. ARM's flush-to-zero
// reads denormal operands of float32 as 0 too; x86's does not.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tileloss::impl::cpu {

class FloatingPointScope {
 public:
#if defined(__x86_64__)
  // All exceptions masked, round to nearest even, flush to zero; denormal inputs are read as they are.
  FloatingPointScope() : saved_(_mm_getcsr()) { _mm_setcsr(0x9f80); }
  ~FloatingPointScope() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  // As above; no trapped exceptions, IEEE's float16, NaNs with their payloads.
  FloatingPointScope() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{1} << 24));
  }
  ~FloatingPointScope() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
  FloatingPointScope() = default;
  ~FloatingPointScope() = default;
#endif
  FloatingPointScope(const FloatingPointScope&) = delete;
  FloatingPointScope& operator=(const FloatingPointScope&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#elif defined(__aarch64__)
  std::uint64_t saved_;
#endif
};

}  // namespace tileloss::impl::cpu
