#include <immintrin.h>

#include "roofs/roof_loops.h"

namespace tileloss::tools {
namespace {

struct Avx512 {
  using Vec = __m512i;
  static constexpr int64_t kBytes = 64;
  static Vec load(const char* p) { return _mm512_loadu_si512(p); }
  static void store(char* p, Vec v) { _mm512_storeu_si512(p, v); }
  static void stream(char* p, Vec v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v); }
  static void fence() { _mm_sfence(); }
  static Vec zero() { return _mm512_setzero_si512(); }
  static Vec mix(Vec a, Vec b) { return _mm512_xor_si512(a, b); }
  static uint64_t fold(Vec v) { return static_cast<uint64_t>(_mm512_reduce_or_epi64(v)); }
  // Hides from the compiler that what is stored is what was loaded.
  static Vec keep(Vec v) {
    asm volatile("" : "+v"(v));
    return v;
  }
};

}  // namespace

RoofLoops roof_loops_avx512() { return {"avx512", kRoofVariants<Avx512>, 6}; }

}  // namespace tileloss::tools
