// Eight float lanes of AVX2 with FMA and F16C (x86-64-v3): backends/cpu/simd/portable_lanes.h where the compiler finds the
// instruction, by name where it does not. A twin of backends/cpu/simd/simd_avx512.h: same members, same meaning.
#pragma once

#include <immintrin.h>

#include "backends/cpu/simd/fma_exponents.h"
#include "backends/cpu/simd/portable_lanes.h"

namespace tileloss::impl::cpu::avx2 {

struct Vectors {
  using F = float __attribute__((vector_size(32)));
  using I = std::int32_t __attribute__((vector_size(32)));
  using U = std::uint32_t __attribute__((vector_size(32)));
  using H = std::int16_t __attribute__((vector_size(32)));
  using W = std::uint16_t __attribute__((vector_size(16)));
};

struct Lanes : PortableLanes<Lanes, Vectors> {
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F negative_fma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  static F multiply_subtract(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }  // b where either is NaN

  using PortableLanes::pack;
  using PortableLanes::to_float;
  using PortableLanes::unpack;
  static Pair unpack(H raw, const Float16*) {
    const auto words = reinterpret_cast<__m256i>(raw);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)), _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
  }
  static __m256i pack(Pair v, const Float16*) {
    return _mm256_set_m128i(_mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
  }
  static __m256i pack(Pair v, const Bfloat16*) {
    const auto even = reinterpret_cast<__m256i>(round16(v.a) >> 16), odd = reinterpret_cast<__m256i>(round16(v.b));
    return _mm256_blend_epi16(even, odd, 0xaa);
  }
  static void stream_pair(float* p, Pair v) {
    _mm256_stream_ps(p, v.a);
    _mm256_stream_ps(p + kLanes, v.b);
  }
  template <class T>
  static void stream_pair(T* p, Pair v) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), pack(v, p));
  }
  static void fence() { _mm_sfence(); }
  static float to_float(Float16 x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits))); }
};

struct Simd : Lanes, FmaExponents<Lanes> {
  using F = Lanes::F;
  static constexpr bool kHasTable = false;  // 16 registers are too few

  // What is below -127 (also -inf, but not NaN) counts as -127, whose power of two is 0 below: there is no vscalefps to see to
  // it.
  static F round(F t) { return _mm256_round_ps(at_least_minus_127(t), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F remainder(F t, F n) { return at_least_minus_127(t) - n; }
  // 1.5 * 2^23 + 127 + n ends in the exponent's bits of 2^n: cheaper than a conversion to integers.
  static F scale_by_power_of_two(F p, F n) { return p * as_float(as_bits(n + set(0x1.8p23f + 127)) << 23); }
  // Where n is -127 for far less, the rest stays here: it must not become an infinity.
  static F fine_remainder(F x, const Scale& s, F offset, F t, F n) {
    return max(set(-1), corrected_remainder(x, s, offset, at_least_minus_127(t), n));
  }

 private:
  static F at_least_minus_127(F t) { return max(set(-127), t); }
};

}  // namespace tileloss::impl::cpu::avx2
