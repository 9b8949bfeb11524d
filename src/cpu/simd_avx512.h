// Sixteen float lanes of AVX-512 (F, BW, DQ, VL). The policy that cpu/sweeps.h is written against; cpu/simd_baseline.h is its
// twin. A "pair" is two vectors that hold 2 * kLanes consecutive elements in the order in which the storage type unpacks most
// cheaply: bfloat16 gives the even elements and the odd ones, the others the first half and the second.
#ifndef TILELOSS_CPU_SIMD_AVX512_H_
#define TILELOSS_CPU_SIMD_AVX512_H_

#include <immintrin.h>

#include <cstdint>

#include "core/number_formats.h"

namespace tileloss::cpu::avx512 {

struct Simd {
  static constexpr int kLanes = 16;
  static constexpr int kPair = 2 * kLanes;
  using F = __m512;
  struct Pair {
    F a, b;
  };

  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  // |a| with the sign of `sign`; a must not be negative.
  static F with_sign(F a, F sign) { return _mm512_or_ps(a, _mm512_and_ps(sign, set(-0.0f))); }
  // max and min return b where either is NaN: put what must survive second.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
  // A fixed tree: lanes 8 apart, 4, 2, 1.
  static float reduce_add(F a) { return _mm512_reduce_add_ps(a); }

  static F negate(F a) { return sub(set(0), a); }
  static F fma_sub(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
  // 14 bits refined once: within 1 ULP for the arguments in (1, 2] of Softcap.
  static F reciprocal(F a) {
    const F y = _mm512_rcp14_ps(a);
    return mul(y, _mm512_fnmadd_ps(a, y, set(2)));
  }

  // e^x for x <= 88: 1.5 ULP + 0.04 |x| ULP; 0 below -104, NaN stays NaN. The reduced argument is one fma, so that only the
  // rounding of log2(e) itself grows with |x|.
  static F exp(F x) {
    const F n = round_exponent(x);
    return _mm512_scalef_ps(fma(exp2_minus_1_over(reduce(x, n)), reduce(x, n), set(1)), n);
  }
  // e^x - 1 for x <= 0, relative error as exp's also near 0.
  static F expm1_negative(F x) {
    x = max(set(-88), x);
    const F n = round_exponent(x);
    const F r = reduce(x, n);
    const F s = _mm512_scalef_ps(set(1), n);
    return fma(s, mul(exp2_minus_1_over(r), r), sub(s, set(1)));
  }

  // ------------------------------------------------------------------------------------------------------ storage, in pairs
  static Pair unpack(__m512i words) {  // bfloat16
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static Pair unpack_half(__m512i words) {
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(words)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1))};
  }
  static Pair load_pair(const float* p) { return {load(p), load(p + kLanes)}; }
  static Pair load_pair(const Bfloat16* p) { return unpack(_mm512_loadu_si512(p)); }
  static Pair load_pair(const Float16* p) { return unpack_half(_mm512_loadu_si512(p)); }

  // The first n < kPair elements, `fill` (a bit pattern of the storage type's -inf or 0) elsewhere. Reads nothing beyond.
  static Pair load_pair_partial(const float* p, int n, float fill) {
    return {_mm512_mask_loadu_ps(set(fill), low_mask16(n), p), _mm512_mask_loadu_ps(set(fill), low_mask16(n - kLanes), p + kLanes)};
  }
  static Pair load_pair_partial(const Bfloat16* p, int n, float fill) {
    const short bits = static_cast<short>(from_float_bits_bf16(fill));
    return unpack(_mm512_mask_loadu_epi16(_mm512_set1_epi16(bits), low_mask32(n), p));
  }
  static Pair load_pair_partial(const Float16* p, int n, float fill) {
    const short bits = fill == 0 ? short{0} : static_cast<short>(0xfc00);
    return unpack_half(_mm512_mask_loadu_epi16(_mm512_set1_epi16(bits), low_mask32(n), p));
  }

  static __m512i pack(Pair v, const Bfloat16*) {
    const __m512i both = round_bf16(v);
    return both;
  }
  static __m512i pack(Pair v, const Float16*) {
    const __m256i lo = _mm512_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT);
    const __m256i hi = _mm512_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);
    return _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1);
  }
  static void store_pair(float* p, Pair v) {
    store(p, v.a);
    store(p + kLanes, v.b);
  }
  static void store_pair_partial(float* p, Pair v, int n) {
    _mm512_mask_storeu_ps(p, low_mask16(n), v.a);
    _mm512_mask_storeu_ps(p + kLanes, low_mask16(n - kLanes), v.b);
  }
  static void stream_pair(float* p, Pair v) {
    _mm512_stream_ps(p, v.a);
    _mm512_stream_ps(p + kLanes, v.b);
  }
  template <class T>
  static void store_pair(T* p, Pair v) {
    _mm512_storeu_si512(p, pack(v, p));
  }
  template <class T>
  static void store_pair_partial(T* p, Pair v, int n) {
    _mm512_mask_storeu_epi16(p, low_mask32(n), pack(v, p));
  }
  template <class T>
  static void stream_pair(T* p, Pair v) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), pack(v, p));
  }

  // Weights for 2 * kLanes elements from p on (n < kPair of them exist), in T's pair order.
  template <class T>
  static Pair load_weights(const float* p, int n, const T*) {
    const Pair v = n < kPair ? load_pair_partial(p, n, 0) : load_pair(p);
    return to_order_of(v, static_cast<const T*>(nullptr));
  }
  // 0 in the elements from n on and in element `hole` (if there is one of that number).
  template <class T>
  static Pair keep(Pair v, int n, int hole, const T*) {
    const F lanes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const Pair index = to_order_of(Pair{lanes, add(lanes, set(kLanes))}, static_cast<const T*>(nullptr));
    const F limit = set(static_cast<float>(n)), out = set(static_cast<float>(hole));
    const auto kept = [&](F i) { return _mm512_cmp_ps_mask(i, limit, _CMP_LT_OQ) & _mm512_cmp_ps_mask(i, out, _CMP_NEQ_OQ); };
    return {_mm512_maskz_mov_ps(static_cast<__mmask16>(kept(index.a)), v.a), _mm512_maskz_mov_ps(static_cast<__mmask16>(kept(index.b)), v.b)};
  }

  static float to_float(float x) { return x; }
  static float to_float(Bfloat16 x) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(x.bits << 16))); }
  static float to_float(Float16 x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits))); }
  static float minus_infinity(float) { return -__builtin_inff(); }
  static Bfloat16 minus_infinity(Bfloat16) { return {0xff80}; }
  static Float16 minus_infinity(Float16) { return {0xfc00}; }

  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
  static void fence() { _mm_sfence(); }

 private:
  static F round_exponent(F x) {
    return _mm512_roundscale_ps(mul(x, set(kLog2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F reduce(F x, F n) { return _mm512_fmsub_ps(x, set(kLog2E), n); }
  // (2^r - 1) / r on [-1/2, 1/2]: minimax for 2^r with constant 1, relative error 9.1e-8 (0.8 ULP).
  static F exp2_minus_1_over(F r) {
    F p = set(0x1.5bba14p-10f);
    p = fma(p, r, set(0x1.3cea88p-7f));
    p = fma(p, r, set(0x1.c6b752p-5f));
    p = fma(p, r, set(0x1.ebf9bcp-3f));
    return fma(p, r, set(0x1.62e42ap-1f));
  }
  static constexpr float kLog2E = 0x1.715476p+0f;

  static Pair to_order_of(Pair v, const float*) { return v; }
  static Pair to_order_of(Pair v, const Float16*) { return v; }
  static Pair to_order_of(Pair v, const Bfloat16*) {  // even elements, odd elements
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return {_mm512_permutex2var_ps(v.a, even, v.b), _mm512_permutex2var_ps(v.a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), v.b)};
  }

  static __mmask16 low_mask16(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1); }
  static __mmask32 low_mask32(int n) { return static_cast<__mmask32>((1ull << n) - 1); }
  static std::uint16_t from_float_bits_bf16(float x) { return x == 0 ? 0 : 0xff80; }

#ifdef __AVX512BF16__
  static __m512i round_bf16(Pair v) {
    // cvtne2ps gives a's 16 values in the low half, b's in the high: vpermw interleaves them.
    const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v.b, v.a));
    return _mm512_permutexvar_epi16(interleave(), halves);
  }
  static __m512i interleave() {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16)), 16));
  }
#else
  static __m512i round_bf16(Pair v) {
    const __m512i a = round16(v.a), b = round16(v.b);
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(a, 16), b);
  }
  // Adds half a unit of the upper 16 bits, ties to even: the upper half is then the rounded value. Not for NaN.
  static __m512i round16(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  }
#endif
};

}  // namespace tileloss::cpu::avx512

#endif  // TILELOSS_CPU_SIMD_AVX512_H_
