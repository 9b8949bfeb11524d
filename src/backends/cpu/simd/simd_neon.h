// Four float lanes of 64-bit ARM's NEON, fused multiply-add and conversions of float16 included, all of which every such machine
// has: backends/cpu/simd/portable_lanes.h where the compiler finds the instruction, by name where it does not. A twin of
// backends/cpu/simd/simd_avx512.h: same members, same meaning.
//
// Cost model, Neoverse V2: four vector pipes, of which two do shifts and two convert; three loads a cycle. An fma overwrites its
// summand, so that one with a constant to be added costs a copy of it. Sixteen elements of a forward:
// docs/measurements/arm-model.md.
#pragma once

#include <arm_neon.h>

#include "backends/cpu/simd/fma_exponents.h"
#include "backends/cpu/simd/portable_lanes.h"

namespace tileloss::impl::cpu::neon {

struct Vectors {
  using F = float32x4_t;
  using I = int32x4_t;
  using U = uint32x4_t;
  using H = int16x8_t;
  using W = uint16x4_t;
};

// Two vectors to bfloat16, the first into the even elements: with integers, where there is no instruction for it.
struct IntegerRounding {
  static uint32x4_t round(float32x4_t even, float32x4_t odd) { return vsriq_n_u32(add_half(odd), add_half(even), 16); }
  // The upper 16 bits are x as bfloat16: half a unit added, ties to even. A NaN that comes here has nothing in its lower bits,
  // and stays one.
  static uint32x4_t add_half(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    return vsraq_n_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), vshlq_n_u32(bits, 15), 31);
  }
};

template <class Rounding>
struct BasicLanes : PortableLanes<BasicLanes<Rounding>, Vectors> {
  using Base = PortableLanes<BasicLanes<Rounding>, Vectors>;
  using F = typename Base::F;
  using U = typename Base::U;
  using H = typename Base::H;
  using Pair = typename Base::Pair;

  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F negative_fma(F a, F b, F c) { return vfmsq_f32(c, a, b); }
  template <int lane>
  static F fma_by_lane(F a, F b, F c) {  // a[lane] b + c
    return vfmaq_laneq_f32(c, b, a, lane);
  }
  static F multiply_subtract(F a, F b, F c) { return vfmaq_f32(vnegq_f32(c), a, b); }
  static F select_abs_at_most(F x, float limit, F small, F other) {
    return vbslq_f32(vcaleq_f32(x, Base::set(limit)), small, other);
  }
  static bool all_abs_at_most(Pair x, float limit) {
    const F most = Base::set(limit);
    return vminvq_u32(vandq_u32(vcaleq_f32(x.a, most), vcaleq_f32(x.b, most))) != 0;
  }

  // max, as everywhere, returns its second argument for NaN; vmaxnmq returns the number.
  using Base::max_raw;
  static F max_raw(F best, Pair raw) { return vmaxnmq_f32(raw.b, vmaxnmq_f32(raw.a, best)); }
  static H max_raw(H best, H raw) { return vmaxq_s16(best, raw); }
  static F abs_max_raw(F best, Pair raw) { return vmaxnmq_f32(vabsq_f32(raw.b), vmaxnmq_f32(vabsq_f32(raw.a), best)); }
  static H abs_max_raw(H best, H raw) { return vmaxq_s16(best, vandq_s16(raw, vdupq_n_s16(0x7fff))); }

  using Base::pack;
  using Base::to_float;
  using Base::unpack;
  static Pair unpack(H raw, const Float16*) {
    const float16x8_t halves = vreinterpretq_f16_s16(raw);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  static float16x8_t pack(Pair v, const Float16*) { return vcvt_high_f16_f32(vcvt_f16_f32(v.a), v.b); }
  static U pack(Pair v, const Bfloat16*) { return Rounding::round(v.a, v.b); }
  static float to_float(Float16 x) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x.bits))), 0); }
};

template <class Rounding>
struct BasicSimd : BasicLanes<Rounding>, FmaExponents<BasicLanes<Rounding>> {
  using Lanes = BasicLanes<Rounding>;
  using F = typename Lanes::F;
  using Scale = typename FmaExponents<Lanes>::Scale;
  static constexpr bool kHasTable = false;             // of 32 floats: eight registers, looked up by bytes
  static constexpr bool kFmaOverwritesSummand = true;  // see exp2_by_sums

  // A constant that an fma is to overwrite, out of memory each time: a copy of a register would take one of the vector pipes.
  using Constant = float[4];
  [[gnu::always_inline]] static F copy(const Constant& constant) {
    F x;
    asm volatile("ldr %q0, %1" : "=w"(x) : "m"(constant));
    return x;
  }

  // n is kept as 1.5 * 2^23 + 127 + n, whose lowest bits are the exponent's of 2^n. What is below -127 (also -inf, but not NaN)
  // counts as -127, whose power of two is 0 here.
  static F round(F t) { return at_least_minus_127(t) + magic(); }
  static F remainder(F t, F n) { return at_least_minus_127(t) - integer(n); }
  static F power_of_two(F n) { return Lanes::as_float(Lanes::as_bits(n) << 23); }
  static F scale_by_power_of_two(F p, F n) { return p * power_of_two(n); }
  // As FmaExponents has it, but for the order of the signs. Where n is -127 for far less, the rest stays here: it must not become
  // an infinity.
  static F fine_remainder(F x, const Scale& s, F offset, F t, F n) {
    const F difference = vfmaq_f32(-offset - integer(n), x, s.scale);
    return vmaxq_f32(Lanes::set(-1), vfmaq_f32(difference, at_least_minus_127(t), s.correction));
  }

 private:
  static F magic() { return Lanes::set(0x1.8p23f + 127); }
  static F integer(F n) { return n - magic(); }
  static F at_least_minus_127(F t) { return vmaxq_f32(Lanes::set(-127), t); }  // NaN where t is
};

using Simd = BasicSimd<IntegerRounding>;

}  // namespace tileloss::impl::cpu::neon
