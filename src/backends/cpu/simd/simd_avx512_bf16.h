// AVX-512 with BF16: rounding and products of pairs of bfloat16 are instructions.
#pragma once

#include "backends/cpu/simd/simd_avx512.h"

namespace tileloss::impl::cpu::avx512_bf16 {

struct ConvertRounding {
  static __m512i round(__m512 even, __m512 odd) {
    // vcvtne2ps2bf16 gives the 16 values of `even` in the low half, those of `odd` in the high: vpermw interleaves them.
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i order = _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16)), 16));
    return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even)));
  }
};

struct Simd : avx512::BasicSimd<ConvertRounding> {
  static F add_pair_products(F a, F b, F sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

}  // namespace tileloss::impl::cpu::avx512_bf16
