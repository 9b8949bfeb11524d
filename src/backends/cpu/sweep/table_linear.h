// Plain logits of 16-bit storage: 2^(x scale - offset) by TableExp. Of a block with a logit that this cannot take (-inf, a mask
// of -1e30, NaN) the sum turns NaN, and the block is done again the general way.
//
// k, the multiple of 1/32, counts from 0 and not from the offset, which is an integer and in the table: y = x scale - n is
// rounded once, at its own size, and t is not needed: an entropy takes x - center. 16 elements cost, of Zen 4's two 512-bit
// operations a cycle: m, y, y^2 + d and the product, a multiplication each; n and the sum; the table and 2^floor(n), 3; unpacking
// and the maximum 1.5: 10.5 where exp2_polynomial makes it 12.5, and a chain half as long. Timed, with what else was tried:
// docs/measurements/amd-zen4-2-cores.md.
#pragma once

#include "backends/cpu/simd/table_exp.h"
#include "core/logit_transform.h"

namespace tileloss::impl::cpu {

template <class Simd>
struct TableLinear {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr bool kHasSlope = false;
  static constexpr bool kIsFastPath = true;
  static constexpr bool kNeedsLowest = false;
  static constexpr float kMaxOffset = 120;  // the table holds 2^-offset
  TableExp<Simd> exp{0};
  F scale, offset, center, magic;
  float rounded_scale;
  double center_exponent = 0;

  explicit TableLinear(const LogitTransform& t)
      : scale(Simd::set(t.exponent_scale)),
        offset(Simd::set(0)),
        center(Simd::set(0)),
        magic(Simd::set(TableExp<Simd>::kMagic)),
        rounded_scale(t.exponent_scale) {}
  static double slope_unit(const LogitTransform&) { return 1; }

  // False if it cannot.
  bool set_offset(float x) {
    offset = Simd::set(x);
    const float logit = x / rounded_scale;
    center = Simd::set(logit);
    center_exponent = static_cast<double>(rounded_scale) * logit - x;
    exp = TableExp<Simd>(-x);
    return __builtin_fabsf(x) <= kMaxOffset && __builtin_isfinite(logit);
  }
  // Whether it may be used for logits up to this magnitude; not if it is NaN.
  bool is_small(float magnitude) const { return magnitude * rounded_scale < 0x1p86f; }
  // Whether that was so, from what the loop found.
  bool was_right(float, float, double sum) const { return sum == sum; }

  [[gnu::always_inline]] Pair exponents(Pair x) const { return minus(x, {offset, offset}); }

  // The sum of t 2^t from that of the moments and of 2^t.
  double entropy(double moment, double sum) const { return static_cast<double>(rounded_scale) * moment + center_exponent * sum; }

  // A pair on its way through the software pipeline.
  struct Started {
    Pair x, m;
  };
  [[gnu::always_inline]] Started start(Pair x) const { return {x, {Simd::fma(x.a, scale, magic), Simd::fma(x.b, scale, magic)}}; }
  // 2^t, and what its moment is taken of: x - center, a subtraction, as the multipliers have enough to do.
  [[gnu::always_inline]] Pair finish(const Started& s, Pair& t, Pair&) const {
    t = {Simd::sub(s.x.a, center), Simd::sub(s.x.b, center)};
    const Pair n = {exp.centered(s.m.a), exp.centered(s.m.b)}, y = minus(s.x, n);
    return {exp.factors(s.m.a, n.a, y.a).product(), exp.factors(s.m.b, n.b, y.b).product()};
  }

 private:
  // x scale - by
  [[gnu::always_inline]] Pair minus(Pair x, Pair by) const {
    return {Simd::multiply_subtract(x.a, scale, by.a), Simd::multiply_subtract(x.b, scale, by.b)};
  }
};

}  // namespace tileloss::impl::cpu
