// NEON with BF16: rounding and products of quads of bfloat16 are instructions.
#pragma once

#include "backends/cpu/simd/simd_neon.h"

namespace tileloss::impl::cpu::neon_bf16 {

// To nearest even, as the task's control word says: the same bits as IntegerRounding's.
struct ConvertRounding {
  static uint32x4_t round(float32x4_t even, float32x4_t odd) {
    const uint16x8_t low = words(even), high = words(odd);
    return vreinterpretq_u32_u16(vzip1q_u16(low, high));
  }

 private:
  static uint16x8_t words(float32x4_t x) { return vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(x)); }
};

struct Simd : neon::BasicSimd<ConvertRounding> {
  // A vector of bfloat16 is two rows of four: sum, two rows of two, plus the products of the rows of a and those of b.
  static F add_quad_products(F a, F b, F sum) { return vbfmmlaq_f32(sum, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b)); }
  static F lower_halves(F a, F b) { return reinterpret_cast<F>(vzip1q_u64(vreinterpretq_u64_f32(a), vreinterpretq_u64_f32(b))); }
  static F upper_halves(F a, F b) { return reinterpret_cast<F>(vzip2q_u64(vreinterpretq_u64_f32(a), vreinterpretq_u64_f32(b))); }
};

}  // namespace tileloss::impl::cpu::neon_bf16
