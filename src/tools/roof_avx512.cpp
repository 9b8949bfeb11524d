#include <immintrin.h>

#include "tools/roof_loops.h"

namespace tileloss::tools {
namespace {

struct Avx512 {
  using Vec = __m512i;
  using Floats = __m512;
  static constexpr int64_t kBytes = 64;
  static constexpr int64_t kFloats = 16;
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
  static Floats set(float x) { return _mm512_set1_ps(x); }
  static Floats zero_floats() { return _mm512_setzero_ps(); }
  static Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats add_exponent(Floats p, Floats shifted) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
  }
  static float fold_floats(Floats v) { return _mm512_reduce_add_ps(v); }
};

// exp by vreduceps and vscalefps: 1 multiplication, 1 reduction, 5 FMA, 1 scale; no overflow handling needed.
__m512 exp_scale(__m512 x) {
  const __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(kLog2E));
  const __m512 r = _mm512_reduce_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp2[i]));
  return _mm512_scalef_ps(p, _mm512_sub_ps(y, r));
}

constexpr RoofExpVariant kExps[] = {{"shift", sum_exp<Avx512, exp_shift<Avx512>>}, {"scalef", sum_exp<Avx512, exp_scale>}};

}  // namespace

RoofLoops roof_loops_avx512() { return {"avx512", kRoofVariants<Avx512>, 6, kExps, 2}; }

}  // namespace tileloss::tools
