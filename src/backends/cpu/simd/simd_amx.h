// The vectors of a processor with AMX: those of avx512_bf16, and what is done in them beside products in tile registers
// (backends/cpu/amx/tile_softmax.h, backends/cpu/amx/tile_gradient.h).
#pragma once

#include "backends/cpu/simd/simd_avx512_bf16.h"

namespace tileloss::impl::cpu::amx {

// So that nothing inline here is shared with objects of another instruction set.
struct Rounding : avx512_bf16::ConvertRounding {};

struct Simd : avx512::BasicSimd<Rounding> {
  // Two vectors as store_words has them, side by side: around the caches where p is on a line's boundary.
  [[gnu::always_inline]] static void stream_words(std::uint16_t* p, Pair v) {
    const __m512i low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_cvttps_epi32(v.a)));
    const __m512i words = _mm512_inserti64x4(low, _mm512_cvtepi32_epi16(_mm512_cvttps_epi32(v.b)), 1);
    if (reinterpret_cast<std::uintptr_t>(p) % 64 == 0) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), words);
    } else {
      _mm512_storeu_si512(p, words);
    }
  }
  // a b where x is not 0, else 0, whatever a b is.
  static F product_where_not_zero(F x, F a, F b) { return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, set(0), _CMP_NEQ_UQ), a, b); }
  // Two vectors that hold the first and the second half of 32 numbers as 32 bfloat16, in their order.
  static F to_bfloat16(Pair halves) { return reinterpret_cast<F>(_mm512_cvtne2ps_pbh(halves.b, halves.a)); }
  // 16-bit words of a and of b by turns, in each quarter of a vector: of the quarters' lower halves, of their upper ones.
  static F interleave_low(F a, F b) {
    return _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  static F interleave_high(F a, F b) {
    return _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  [[gnu::always_inline]] static void prefetch_to_l1(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
};

}  // namespace tileloss::impl::cpu::amx
