#include <emmintrin.h>

#include "roofs/roof_loops.h"

namespace tileloss::tools {
namespace {

struct Sse2 {
  using Vec = __m128i;
  static constexpr int64_t kBytes = 16;
  static Vec load(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static void store(char* p, Vec v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }
  static void stream(char* p, Vec v) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), v); }
  static void fence() { _mm_sfence(); }
  static Vec zero() { return _mm_setzero_si128(); }
  static Vec mix(Vec a, Vec b) { return _mm_xor_si128(a, b); }
  static uint64_t fold(Vec v) { return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_xor_si128(v, _mm_srli_si128(v, 8)))); }
  // Hides from the compiler that what is stored is what was loaded.
  static Vec keep(Vec v) {
    asm volatile("" : "+x"(v));
    return v;
  }
};

}  // namespace

RoofLoops roof_loops_baseline() { return {"baseline", kRoofVariants<Sse2>, 6}; }

}  // namespace tileloss::tools
