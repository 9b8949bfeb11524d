// Sixteen float lanes of AVX-512 (F, BW, DQ, VL). The policy that backends/cpu/sweep/sweeps.h is written against;
// backends/cpu/simd/simd_baseline.h is its twin. A "pair" is two vectors that hold 2 * kLanes consecutive elements in the order
// in which the storage type unpacks most cheaply: bfloat16 gives the even elements and the odd ones, the others the first half
// and the second.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "backends/cpu/simd/fma_exponents.h"
#include "core/number_formats.h"

namespace tileloss::impl::cpu::avx512 {

// Two vectors to bfloat16, the first into the even elements: with integers, where there is no instruction for it. Adds half a
// unit of the upper 16 bits, ties to even. A NaN that comes here has nothing in its lower bits, and stays one.
struct IntegerRounding {
  static __m512i round(__m512 even, __m512 odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(add_half(even), 16), add_half(odd));
  }
  static __m512i add_half(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
  }
};

struct Lanes {
  using F = __m512;
  static F set(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F multiply_subtract(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
};

template <class Rounding>
struct BasicSimd : Lanes, FmaExponents<Lanes> {
  static constexpr int kLanes = 16;
  static constexpr int kPair = 2 * kLanes;
  using F = __m512;
  static constexpr bool kHasTable = true;  // see SmallSoftcap
  static constexpr bool kFmaOverwritesSummand = false;
  struct Pair {
    F a, b;
  };

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  // Numbers from 0 to 65535 as words; what is stored is cut to whole ones.
  static void store_words(std::uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvttps_epi32(x)));
  }
  static F load_words(const std::uint16_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
  static void stream(float* p, F x) { _mm512_stream_ps(p, x); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F negative_fma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  // a * b, 0 where a is 0 whatever b is.
  static F multiply_where_nonzero(F a, F b) { return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(a, set(0), _CMP_NEQ_UQ), a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F negate(F a) { return _mm512_xor_ps(a, set(-0.0f)); }
  // -a where `sign` is negative, a elsewhere.
  static F flip_sign(F a, F sign) { return _mm512_xor_ps(a, _mm512_and_ps(sign, set(-0.0f))); }
  // max returns b where either is NaN: put what must survive second.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static float first(F a) { return _mm512_cvtss_f32(a); }
  static float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
  // A fixed tree: lanes 8 apart, 4, 2, 1.
  static float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
  // 14 bits refined once: 0.6 ULP. vdivps takes 6 cycles.
  static F reciprocal(F a) {
    const F y = _mm512_rcp14_ps(a);
    return fma(y, negative_fma(a, y, set(1)), y);
  }
  // `yes` where x < y, `no` elsewhere and where either is NaN.
  static F select_less(F x, F y, F yes, F no) { return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), yes); }
  // `small` where |x| <= limit, `other` elsewhere and where x is NaN.
  static F select_abs_at_most(F x, float limit, F small, F other) {
    return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(abs(x), set(limit), _CMP_LE_OQ), small);
  }
  // False if any is NaN.
  static bool all_abs_at_most(Pair x, float limit) {
    return (_mm512_cmp_ps_mask(abs(x.a), set(limit), _CMP_LE_OQ) & _mm512_cmp_ps_mask(abs(x.b), set(limit), _CMP_LE_OQ)) ==
           0xffff;
  }

  // ------------------------------------------------------------------------------------------------------------ exponents
  static F round(F t) { return _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F remainder(F t, F n) { return sub(t, n); }
  static F scale_by_power_of_two(F p, F n) { return _mm512_scalef_ps(p, n); }  // 2^floor(n)
  // 32 numbers, each times 2^shift; looked up by the last 5 bits of x.
  struct Table {
    F low, high;
  };
  static Table make_table(const float* values, float shift) {
    return {_mm512_scalef_ps(load(values), set(shift)), _mm512_scalef_ps(load(values + kLanes), set(shift))};
  }
  static F look_up(const Table& table, F x) { return _mm512_permutex2var_ps(table.low, _mm512_castps_si512(x), table.high); }
  // Cut to [-1, 1] (1 for NaN, whose n is NaN or -inf): far below 0, rounding t alone is off by more than exp2 can stand.
  static F fine_remainder(F x, const Scale& s, F offset, F t, F n) {
    constexpr int kSmallerMagnitude = 2;
    return _mm512_range_ps(corrected_remainder(x, s, offset, t, n), set(1), kSmallerMagnitude);
  }

  // ------------------------------------------------------------------------------------------------------ storage, in pairs
  // A pair as it lies in memory.
  static Pair load_raw(const float* p) { return {load(p), load(p + kLanes)}; }
  template <class T>
  static __m512i load_raw(const T* p) {
    return _mm512_loadu_si512(p);
  }
  static Pair unpack(Pair raw, const float*) { return raw; }
  static Pair unpack(__m512i words, const Bfloat16*) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static Pair unpack(__m512i words, const Float16*) {
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(words)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1))};
  }

  // A running maximum over raw pairs. The 16-bit formats compare as signed integers, one instruction for 32 elements, as long
  // as one element is positive: max_value returns a negative number or NaN if that failed.
  static F max_start(const float*) { return set(-__builtin_inff()); }
  template <class T>
  static __m512i max_start(const T*) {
    return _mm512_set1_epi16(INT16_MIN);
  }
  static F max_raw(F max, Pair raw) { return _mm512_max_ps(raw.b, _mm512_max_ps(raw.a, max)); }
  static __m512i max_raw(__m512i max, __m512i raw) { return _mm512_max_epi16(max, raw); }
  // The same among the negative ones only, with the sign bit: as unsigned words they are the largest, in order of magnitude.
  static __m512i lowest_raw(__m512i lowest, __m512i raw) { return _mm512_max_epu16(lowest, raw); }
  template <class T>
  static float lowest_magnitude(__m512i lowest, const T* type) {
    return max_value(_mm512_and_si512(lowest, _mm512_set1_epi16(0x7fff)), type);
  }
  // The same for magnitudes, where the sign bit is gone.
  static F abs_max_start(const float*) { return set(0); }
  template <class T>
  static __m512i abs_max_start(const T*) {
    return _mm512_setzero_si512();
  }
  static F abs_max_raw(F max, Pair raw) { return _mm512_max_ps(abs(raw.b), _mm512_max_ps(abs(raw.a), max)); }
  static __m512i abs_max_raw(__m512i max, __m512i raw) {
    return _mm512_max_epi16(max, _mm512_and_si512(raw, _mm512_set1_epi16(0x7fff)));
  }
  static float max_value(F max, const float*) { return reduce_max(max); }
  template <class T>
  static float max_value(__m512i max, const T*) {
    const __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(max), _mm512_extracti64x4_epi64(max, 1));
    const __m128i quarter = _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    // phminposuw finds the least unsigned word: that is the greatest signed one with these bits flipped.
    const __m128i flip = _mm_set1_epi16(0x7fff);
    const int best = _mm_cvtsi128_si32(_mm_xor_si128(_mm_minpos_epu16(_mm_xor_si128(quarter, flip)), flip));
    return to_float(T{static_cast<std::uint16_t>(best)});
  }

  // The first n < kPair elements, `fill` (0 or -inf) elsewhere. Reads nothing beyond.
  static Pair load_raw_partial(const float* p, int n, float fill) {
    return {_mm512_mask_loadu_ps(set(fill), low_mask16(n), p),
            _mm512_mask_loadu_ps(set(fill), low_mask16(n - kLanes), p + kLanes)};
  }
  template <class T>
  static __m512i load_raw_partial(const T* p, int n, float fill) {
    const T bits = fill == 0 ? T{0} : minus_infinity(T{});
    return _mm512_mask_loadu_epi16(_mm512_set1_epi16(static_cast<short>(bits.bits)), low_mask32(n), p);
  }

  static __m512i pack(Pair v, const Bfloat16*) { return Rounding::round(v.a, v.b); }
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
    const Pair v = n < kPair ? load_raw_partial(p, n, 0) : load_raw(p);
    return to_order_of(v, static_cast<const T*>(nullptr));
  }
  // 0 in the elements from n on and in element `excluded` (if there is one of that number).
  template <class T>
  static Pair keep(Pair v, int n, int excluded, const T*) {
    const F lanes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const Pair index = to_order_of(Pair{lanes, add(lanes, set(kLanes))}, static_cast<const T*>(nullptr));
    const F limit = set(static_cast<float>(n)), out = set(static_cast<float>(excluded));
    const auto kept = [&](F i) { return _mm512_cmp_ps_mask(i, limit, _CMP_LT_OQ) & _mm512_cmp_ps_mask(i, out, _CMP_NEQ_OQ); };
    return {_mm512_maskz_mov_ps(static_cast<__mmask16>(kept(index.a)), v.a),
            _mm512_maskz_mov_ps(static_cast<__mmask16>(kept(index.b)), v.b)};
  }

  static float to_float(float x) { return x; }
  static float to_float(Bfloat16 x) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(x.bits << 16))); }
  static float to_float(Float16 x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits))); }
  static float minus_infinity(float) { return -__builtin_inff(); }
  static Bfloat16 minus_infinity(Bfloat16) { return {0xff80}; }
  static Float16 minus_infinity(Float16) { return {0xfc00}; }

  // Inlined by force: GCC takes a function that only prefetches for one without effect and drops the call.
  [[gnu::always_inline]] static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
  static void fence() { _mm_sfence(); }

 private:
  static Pair to_order_of(Pair v, const float*) { return v; }
  static Pair to_order_of(Pair v, const Float16*) { return v; }
  static Pair to_order_of(Pair v, const Bfloat16*) {  // even elements, odd elements
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return {_mm512_permutex2var_ps(v.a, even, v.b),
            _mm512_permutex2var_ps(v.a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), v.b)};
  }

  static __mmask16 low_mask16(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1); }
  static __mmask32 low_mask32(int n) { return static_cast<__mmask32>((1ull << n) - 1); }
};

using Simd = BasicSimd<IntegerRounding>;

}  // namespace tileloss::impl::cpu::avx512
