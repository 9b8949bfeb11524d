#include <emmintrin.h>

#include "tools/roof_loops.h"

namespace tileloss::tools {
namespace {

struct Sse2 {
  using Vec = __m128i;
  using Floats = __m128;
  static constexpr int64_t kBytes = 16;
  static constexpr int64_t kFloats = 4;
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
  static Floats set(float x) { return _mm_set1_ps(x); }
  static Floats zero_floats() { return _mm_setzero_ps(); }
  static Floats load_floats(const float* p) { return _mm_loadu_ps(p); }
  static Floats add(Floats a, Floats b) { return _mm_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm_sub_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
  static Floats add_exponent(Floats p, Floats shifted) {
    return _mm_castsi128_ps(_mm_add_epi32(_mm_castps_si128(p), _mm_slli_epi32(_mm_castps_si128(shifted), 23)));
  }
  static float fold_floats(Floats v) {
    const Floats high = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(high, _mm_shuffle_ps(high, high, 1)));
  }
};

constexpr RoofExpVariant kExps[] = {{"shift", sum_exp<Sse2, exp_shift<Sse2>>}};

}  // namespace

RoofLoops roof_loops_baseline() { return {"baseline", kRoofVariants<Sse2>, 6, kExps, 1}; }

}  // namespace tileloss::tools
