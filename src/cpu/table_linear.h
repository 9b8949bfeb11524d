// Plain logits of 16-bit storage: 2^(x scale - offset) by TableExp. Of a block with a logit that this cannot take (-inf, a mask
// of -1e30, NaN) the sum turns NaN, and the block is done again the general way.
//
// 16 elements cost, of Zen 4's two 512-bit operations a cycle: the exponent, m, y^2 + d and the sum, an fma each; n and y; the
// table and 2^floor(n), 3; unpacking and the maximum 1.5: 10.5 where exp2_polynomial makes it 12.5, and a chain half as long.
// From L2, in cycles for 16 elements: forward 6.2 against 7.1, a step from the stash 8.4 against 8.9. m as t + 1.5 * 2^18 saves
// an fma and takes 0.2 longer.
#ifndef TILELOSS_CPU_TABLE_LINEAR_H_
#define TILELOSS_CPU_TABLE_LINEAR_H_

#include "core/logit_transform.h"
#include "cpu/table_exp.h"

namespace tileloss::cpu {

template <class Simd>
struct TableLinear {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr bool kHasSlope = false;
  static constexpr bool kIsQuick = true;
  static constexpr bool kNeedsLowest = false;
  static constexpr float kMaxOffset = 0x1p17f;  // the sum of it and the magic number must be exact
  TableExp<Simd> exp{0};
  F scale, offset, magic;
  float rounded_scale;

  explicit TableLinear(const LogitTransform& t) : scale(Simd::set(t.exponent_scale)), rounded_scale(t.exponent_scale) {
    set_offset(0);
  }
  static double slope_unit(const LogitTransform&) { return 1; }

  // False if it cannot.
  bool set_offset(float x) {
    offset = Simd::set(x);
    magic = Simd::set(TableExp<Simd>::kMagic - x);
    return __builtin_fabsf(x) <= kMaxOffset;
  }
  // Whether it may be used for logits up to this magnitude; not if it is NaN.
  bool is_small(float magnitude) const { return magnitude * rounded_scale < 0x1p86f; }
  // Whether that was so, from what the loop found.
  bool was_right(float, float, double sum) const { return sum == sum; }

  [[gnu::always_inline]] Pair exponents(Pair x) const {
    return {Simd::multiply_subtract(x.a, scale, offset), Simd::multiply_subtract(x.b, scale, offset)};
  }

  // A pair on its way through the software pipeline.
  struct Started {
    Pair t, m;
  };
  [[gnu::always_inline]] Started start(Pair x) const {
    return {exponents(x), {Simd::fma(x.a, scale, magic), Simd::fma(x.b, scale, magic)}};
  }
  // 2^t, and t.
  [[gnu::always_inline]] typename TableExp<Simd>::Factors finish(const Started& s, Pair& t, Pair&) const {
    t = s.t;
    return exp.factors(s.t, s.m);
  }
};

}  // namespace tileloss::cpu

#endif  // TILELOSS_CPU_TABLE_LINEAR_H_
