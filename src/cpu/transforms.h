// The logit transform in vectors: from a pair of stored logits to the numbers u that their exponents are a multiple of (see
// LogitTransform::exponent_scale), and to dz/dx as far as it differs from column to column. One type per shape of transform, so that the plain one costs nothing.
#ifndef TILELOSS_CPU_TRANSFORMS_H_
#define TILELOSS_CPU_TRANSFORMS_H_

#include "core/logit_transform.h"

namespace tileloss::cpu {

// z = scale x. dz/dx is one constant: the coefficients hold it.
template <class Simd>
struct Linear {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr bool kHasSlope = false;
  explicit Linear(const LogitTransform&) {}
  [[gnu::always_inline]] Pair operands(Pair x, Pair&) const { return x; }
};

// z = outer tanh(u), u = inner x; dz/dx = scale sech^2(u), of which `scale` is in the coefficients and sech^2 is the slope.
// Where both vectors have |u| <= 3/4 (logits below 0.75 of the cap: nearly all of a model's), an odd polynomial of degree 11,
// relative error 3e-8: 11 operations more than Linear. Elsewhere, with q = e^(-2|u|) and em = q - 1: tanh |u| = -em / (2 + em)
// and sech^2 u = 4 q / (2 + em)^2: no cancellation at either end, as q and em both come from one polynomial.
template <class Simd>
struct Softcap {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr bool kHasSlope = true;
  F inner;
  typename Simd::Scale twice_inner;  // e^(-2|u|) = 2^(-|x| twice_inner)
  explicit Softcap(const LogitTransform& t)
      : inner(Simd::set(t.inner)), twice_inner(2 * LogitTransform::kLog2E * t.inner, 2 * LogitTransform::kExactLog2E * t.inner) {}

  [[gnu::always_inline]] Pair operands(Pair x, Pair& slope) const {
    const Pair u = {Simd::mul(x.a, inner), Simd::mul(x.b, inner)};
    Pair t;
    if (Simd::all_abs_at_most(u, 0.75f)) {
      t = {small_tanh(u.a), small_tanh(u.b)};
      slope = {Simd::negative_fma(t.a, t.a, Simd::set(1)), Simd::negative_fma(t.b, t.b, Simd::set(1))};
    } else {
      t = any_tanh(x, slope);
    }
    return t;
  }

 private:
  // Minimax for tanh(u)/u in u^2 with constant 1.
  [[gnu::always_inline]] static F small_tanh(F u) {
    const F w = Simd::mul(u, u);
    F p = Simd::set(-0x1.3892c4p-8f);
    p = Simd::fma(p, w, Simd::set(0x1.4230ap-6f));
    p = Simd::fma(p, w, Simd::set(-0x1.b55f7cp-5f));
    p = Simd::fma(p, w, Simd::set(0x1.10ed5ap-3f));
    p = Simd::fma(p, w, Simd::set(-0x1.5554a4p-2f));
    return Simd::fma(Simd::mul(p, w), u, u);
  }
  // Out of line: inlined, its constants push the loop's own out of the registers (131 ms for a step against 62).
  [[gnu::noinline, gnu::cold]] Pair any_tanh(Pair x, Pair& slope) const { return {any_tanh(x.a, slope.a), any_tanh(x.b, slope.b)}; }
  F any_tanh(F x, F& slope) const {
    F q, em;
    Simd::exp2_and_minus_1(Simd::negate(Simd::abs(x)), twice_inner, &q, &em);
    const F inverse = Simd::reciprocal(Simd::add(em, Simd::set(2)));
    slope = Simd::mul(Simd::mul(q, Simd::set(4)), Simd::mul(inverse, inverse));
    return Simd::flip_sign(Simd::mul(em, inverse), Simd::negate(x));
  }
};

}  // namespace tileloss::cpu

#endif  // TILELOSS_CPU_TRANSFORMS_H_
