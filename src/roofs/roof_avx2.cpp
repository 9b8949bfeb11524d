#include <immintrin.h>

#include "roofs/roof_loops.h"

namespace tileloss::tools {
namespace {

struct Avx2 {
  using Vec = __m256i;
  static constexpr int64_t kBytes = 32;
  static Vec load(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store(char* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static void stream(char* p, Vec v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v); }
  static void fence() { _mm_sfence(); }
  static Vec zero() { return _mm256_setzero_si256(); }
  static Vec mix(Vec a, Vec b) { return _mm256_xor_si256(a, b); }
  static uint64_t fold(Vec v) {
    const __m128i half = _mm_xor_si128(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_xor_si128(half, _mm_srli_si128(half, 8))));
  }
  // Hides from the compiler that what is stored is what was loaded.
  static Vec keep(Vec v) {
    asm volatile("" : "+x"(v));
    return v;
  }
};

}  // namespace

RoofLoops roof_loops_avx2() { return {"avx2", kRoofVariants<Avx2>, 6}; }

}  // namespace tileloss::tools
