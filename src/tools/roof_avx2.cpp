#include <immintrin.h>

#include "tools/roof_loops.h"

namespace tileloss::tools {
namespace {

struct Avx2 {
  using Vec = __m256i;
  using Floats = __m256;
  static constexpr int64_t kBytes = 32;
  static constexpr int64_t kFloats = 8;
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
  static Floats set(float x) { return _mm256_set1_ps(x); }
  static Floats zero_floats() { return _mm256_setzero_ps(); }
  static Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Floats add_exponent(Floats p, Floats shifted) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
  }
  static float fold_floats(Floats v) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
  }
};

constexpr RoofExpVariant kExps[] = {{"shift", sum_exp<Avx2, exp_shift<Avx2>>}};

}  // namespace

RoofLoops roof_loops_avx2() { return {"avx2", kRoofVariants<Avx2>, 6, kExps, 1}; }

}  // namespace tileloss::tools
