// The logit transform in vectors: z - reference, and the derivative's factor. One type per shape of transform, so that the
// plain one costs nothing.
#ifndef TILELOSS_CPU_TRANSFORMS_H_
#define TILELOSS_CPU_TRANSFORMS_H_

#include "core/logit_transform.h"

namespace tileloss::cpu {

template <class Simd>
struct Identity {
  using F = typename Simd::F;
  static constexpr bool kDerivativeNeedsX = false;
  explicit Identity(const LogitTransform&) {}
  F minus(F x, F reference) const { return Simd::sub(x, reference); }
  F times_derivative(F g, F) const { return g; }
};

// z = scale x. The derivative's factor is constant: the coefficients hold it already.
template <class Simd>
struct Scaled {
  using F = typename Simd::F;
  static constexpr bool kDerivativeNeedsX = false;
  F scale;
  explicit Scaled(const LogitTransform& t) : scale(Simd::set(t.scale)) {}
  F minus(F x, F reference) const { return Simd::fma_sub(x, scale, reference); }
  F times_derivative(F g, F) const { return g; }
};

// z = outer tanh(inner x), dz/dx = scale sech^2(inner x). With em = e^(-2|u|) - 1: tanh |u| = -em / (2 + em) and
// sech^2 u = 4 (1 + em) / (2 + em)^2: no cancellation at either end, as em comes from the polynomial before 1 is added.
template <class Simd>
struct Softcap {
  using F = typename Simd::F;
  static constexpr bool kDerivativeNeedsX = true;
  F inner, outer, scale4;
  explicit Softcap(const LogitTransform& t)
      : inner(Simd::set(t.inner)), outer(Simd::set(t.outer)), scale4(Simd::set(4 * t.scale)) {}
  static F expm1_of(F u) { return Simd::expm1_negative(Simd::mul(Simd::abs(u), Simd::set(-2))); }
  F minus(F x, F reference) const {
    const F u = Simd::mul(inner, x);
    const F em = expm1_of(u);
    const F t = Simd::mul(Simd::negate(em), Simd::reciprocal(Simd::add(em, Simd::set(2))));
    return Simd::fma_sub(Simd::with_sign(t, u), outer, reference);
  }
  F times_derivative(F g, F x) const {
    const F em = expm1_of(Simd::mul(inner, x));
    const F inverse = Simd::reciprocal(Simd::add(em, Simd::set(2)));
    const F sech2 = Simd::mul(Simd::mul(Simd::add(em, Simd::set(1)), inverse), inverse);
    return Simd::mul(g, Simd::mul(sech2, scale4));
  }
};

}  // namespace tileloss::cpu

#endif  // TILELOSS_CPU_TRANSFORMS_H_
