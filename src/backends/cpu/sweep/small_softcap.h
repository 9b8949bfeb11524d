// Softcap of 16-bit logits in a block whose |u| = |inner x| stay below kSmall (nearly all of a model's): tanh and exp in one
// loop.
//
// E, the exponent without its offset, is an odd polynomial in x that has the exponent's scale in its coefficients; the slope is
// scale^2 - E^2 (Softcap's slope_unit). 2^E is TableExp's, whose table holds 2^-offset.
//
// 16 elements cost 10 multiplications and fma (x^2, tanh 3, E, the slope, y^2 + d, 2^E, two for stash and gradient), where tanh
// in a loop of its own and exp2_polynomial cost 14 and a detour through L1. Timed: docs/measurements/amd-zen4-2-cores.md.
#pragma once

#include "backends/cpu/simd/table_exp.h"
#include "backends/cpu/simd/transforms.h"
#include "core/logit_transform.h"

namespace tileloss::impl::cpu {

template <class Simd>
struct SmallSoftcap {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  using General = Softcap<Simd, false>;
  static constexpr bool kHasSlope = true;
  static constexpr bool kIsFastPath = true;
  static constexpr bool kNeedsLowest = true;
  static constexpr float kSmall = 0.40625f;
  static constexpr double kMaxOffset = 120;  // the table holds 2^-offset
  F coefficients[4];                         // of x, x^3, x^5, x^7
  F unit, offset, magic;
  TableExp<Simd> exp{0};
  float inner;
  bool is_possible;  // all of them are in float's range

  // Minimax for tanh(u)/u in u^2 with constant 1: relative error 1.3e-7.
  explicit SmallSoftcap(const LogitTransform& t)
      : unit(Simd::set(static_cast<float>(General::slope_unit(t)))),
        offset(Simd::set(0)),
        magic(Simd::set(TableExp<Simd>::kMagic)),
        inner(t.inner),
        is_possible(General::has_slope_unit(t)) {
    constexpr float kTanh[] = {1, -0x1.55512cp-2f, 0x1.0fdb48p-3f, -0x1.86104ep-5f};
    double power = t.exact_exponent_scale * t.exact_inner;
    for (int k = 0; k < 4; ++k, power *= t.exact_inner * t.exact_inner) {
      coefficients[k] = Simd::set(static_cast<float>(power * kTanh[k]));
      is_possible = is_possible && power > 0x1p-100 && power < 0x1p100;
    }
  }
  static double slope_unit(const LogitTransform& t) { return General::slope_unit(t); }

  // What finish() subtracts from E. False if it cannot.
  bool set_offset(float x) {
    offset = Simd::set(x);
    exp = TableExp<Simd>(-x);
    return is_possible && __builtin_fabsf(x) <= kMaxOffset;
  }
  // Whether it may be used for logits up to this magnitude; not if it is NaN.
  bool is_small(float magnitude) const { return magnitude * inner <= kSmall; }

  // Whether that was so, from what the loop found.
  bool was_right(float max, float lowest, double) const { return is_small(max) && is_small(lowest); }

  // The sum of t 2^t: see TableLinear.
  double entropy(double moment, double) const { return moment; }

  [[gnu::always_inline]] Pair exponents(Pair x) const { return without_offset(finish_tanh(start(x))); }

  // A pair on its way through the software pipeline, cut in the middle of the polynomial.
  struct Started {
    Pair x, square, p;
  };
  [[gnu::always_inline]] Started start(Pair x) const {
    Started s;
    s.x = x;
    s.square = {Simd::mul(x.a, x.a), Simd::mul(x.b, x.b)};
    s.p = {Simd::fma(coefficients[3], s.square.a, coefficients[2]), Simd::fma(coefficients[3], s.square.b, coefficients[2])};
    return s;
  }
  // 2^t, t = E - offset, and the slope.
  [[gnu::always_inline]] Pair finish(const Started& s, Pair& t, Pair& slope) const {
    const Pair e = finish_tanh(s);
    slope = {Simd::negative_fma(e.a, e.a, unit), Simd::negative_fma(e.b, e.b, unit)};
    t = without_offset(e);
    const Pair m = {Simd::add(e.a, magic), Simd::add(e.b, magic)};
    const auto a = factors(e.a, m.a), b = factors(e.b, m.b);
    return {a.product(), b.product()};
  }

 private:
  [[gnu::always_inline]] typename TableExp<Simd>::Factors factors(F e, F m) const {
    const F n = exp.centered(m);
    return exp.factors(m, n, Simd::sub(e, n));
  }
  [[gnu::always_inline]] Pair without_offset(Pair e) const { return {Simd::sub(e.a, offset), Simd::sub(e.b, offset)}; }
  [[gnu::always_inline]] static Pair step(const Started& s, F c) {
    return {Simd::fma(s.p.a, s.square.a, c), Simd::fma(s.p.b, s.square.b, c)};
  }
  [[gnu::always_inline]] Pair finish_tanh(Started s) const {
    s.p = step(s, coefficients[1]);
    s.p = step(s, coefficients[0]);
    return {Simd::mul(s.p.a, s.x.a), Simd::mul(s.p.b, s.x.b)};
  }
};

}  // namespace tileloss::impl::cpu
