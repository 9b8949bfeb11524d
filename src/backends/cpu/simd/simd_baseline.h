// Four float lanes in GCC's portable vectors: SSE2 on x86-64, NEON on AArch64, whatever the target's minimum has elsewhere. The
// twin of backends/cpu/simd/simd_avx512.h: same members, same meaning.
#pragma once

#include <cstdint>

#include "backends/cpu/simd/portable_lanes.h"

namespace tileloss::impl::cpu::baseline {

struct Vectors {
  using F = float __attribute__((vector_size(16)));
  using I = std::int32_t __attribute__((vector_size(16)));
  using U = std::uint32_t __attribute__((vector_size(16)));
  using H = std::int16_t __attribute__((vector_size(16)));
  using W = std::uint16_t __attribute__((vector_size(8)));
};

struct Simd : PortableLanes<Simd, Vectors> {
  // What turns a logit into an exponent, and its inverse: its upper 12 bits, and the rest.
  struct Scale {
    F scale, inverse_high, inverse_low;
    Scale(float rounded, double exact) : scale(set(rounded)) {
      const float high = upper_bits(set(static_cast<float>(1 / exact)))[0];
      inverse_high = set(high);
      inverse_low = set(static_cast<float>(1 / exact - high));
    }
  };

  // A factor: rounded, its upper 12 bits, and what those lack.
  struct Factor {
    F value, high, low;
    explicit Factor(double exact) : value(set(static_cast<float>(exact))) {
      high = upper_bits(value);
      low = set(static_cast<float>(exact - high[0]));
    }
  };
  // What rounding lost in product = x * factor (Dekker: products of two halves are exact).
  static F product_error(F x, const Factor& f, F product) {
    const F x_high = upper_bits(x);
    return ((x_high * f.high - product) + x_high * f.low) + (x - x_high) * f.value;
  }

  // a b - c, where that is small as good as rounded once.
  static F product_minus(F a, F b, F c) {
    const F a_high = upper_bits(a), b_high = upper_bits(b), product = a * b;
    const F lost = ((a_high * b_high - product) + a_high * (b - b_high) + (a - a_high) * b_high) + (a - a_high) * (b - b_high);
    return (product - c) + lost;
  }

  static F fma(F a, F b, F c) { return a * b + c; }  // two roundings
  static F negative_fma(F a, F b, F c) { return c - a * b; }

  // Without a fused multiply-add: (x - offset) * scale, so that a common offset of the logits costs nothing.
  static F scale_minus(F x, const Scale& s, F offset) { return (x - offset) * s.scale; }
  static constexpr bool kHasTable = false;  // its offsets are no exponents
  static float offset_for(double wanted, float scale) { return static_cast<float>(wanted / scale); }
  static double effective_offset(float offset, float scale) { return static_cast<double>(offset) * scale; }

  // Nearest integer by adding 1.5 * 2^23. Beyond +-2^22, also for -inf, scale_by_power_of_two gives 0 all the same.
  static F round(F t) { return (max(set(-1000), t) + set(0x1.8p23f)) - set(0x1.8p23f); }
  static F remainder(F t, F n) { return t - n; }
  // Cody and Waite: n * inverse_high is exact. So is d + lost = x - offset where |x| <= |offset|: with a softcap, d alone would
  // be off by c/T times 2^-24.
  static F fine_remainder(F x, const Scale& s, F offset, F, F n) {
    const F d = max(set(-1000) * s.inverse_high, x - offset), lost = x - (d + offset);
    return (((d - n * s.inverse_high) - n * s.inverse_low) + lost) * s.scale;
  }
  static F scale_by_power_of_two(F x, F n) {
    const I is_tiny = n < set(-126);
    const U e = as_bits(x * power_of_two(max(set(-126), n)));
    return as_float(e & ~reinterpret(is_tiny));
  }

  using PortableLanes::pack;
  using PortableLanes::to_float;
  using PortableLanes::unpack;
  static Pair unpack(H raw, const Float16*) {
    const auto half = [&](int i) { return static_cast<std::uint32_t>(static_cast<std::uint16_t>(raw[i])); };
    return {from_half(U{half(0), half(1), half(2), half(3)}), from_half(U{half(4), half(5), half(6), half(7)})};
  }
  static H pack(Pair v, const Float16*) {
    const U a = to_half(v.a), b = to_half(v.b);
    const auto word = [](std::uint32_t half) { return static_cast<std::int16_t>(half); };
    return H{word(a[0]), word(a[1]), word(a[2]), word(a[3]), word(b[0]), word(b[1]), word(b[2]), word(b[3])};
  }
  static float to_float(Float16 x) { return from_half(splat(x.bits))[0]; }

 private:
  static F upper_bits(F x) { return as_float(as_bits(x) & splat(0xfffff000u)); }
  static F power_of_two(F n) {
    const I i = __builtin_convertvector(n, I);
    return as_float(reinterpret(i + 127) << 23);
  }
  static F from_half(U h) {
    const U magnitude = (h & splat(0x7fff)) << 13;
    const U biased = magnitude + splat(0x38000000u);  // see to_float(Float16)
    const U scaled = magnitude < splat(0x00800000u) ? as_bits(as_float(biased + splat(0x00800000u)) - set(0x1p-14f)) : biased;
    const U special = reinterpret(magnitude >= splat(0x0f800000u)) & splat(0x7f800000u);
    return as_float(scaled | special | ((h & splat(0x8000)) << 16));
  }
  // See from_float<Float16>: the same three cases, all computed, one chosen.
  static U to_half(F x) {
    const U bits = as_bits(x), sign = (bits >> 16) & splat(0x8000), magnitude = bits & splat(0x7fffffff);
    const U normal = (magnitude - splat(0x38000000) + splat(0xfff) + ((magnitude >> 13) & splat(1))) >> 13;
    const U subnormal = as_bits(as_float(magnitude) + set(0.5f)) - splat(0x3f000000);
    U half = magnitude < splat(0x38800000) ? subnormal : normal;
    half = magnitude >= splat(0x47800000) ? splat(0x7c00) : half;
    half = magnitude > splat(0x7f800000) ? splat(0x7e00) : half;
    return half | sign;
  }
};

}  // namespace tileloss::impl::cpu::baseline
