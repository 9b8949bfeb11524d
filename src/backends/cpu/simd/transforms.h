// The logit transform in vectors: from a pair of stored logits to the numbers u that their exponents are a multiple of (see
// LogitTransform::exponent_scale), and to dz/dx as far as it differs from column to column. One type per shape of transform, so
// that the plain one costs nothing.
//
// A fast path (kIsFastPath) goes from logits to 2^exponent by a way of its own that not every block can take:
// backends/cpu/sweep/table_linear.h and backends/cpu/sweep/small_softcap.h.
#pragma once

#include "backends/cpu/simd/exp2.h"
#include "core/logit_transform.h"

namespace tileloss::impl::cpu {

// z = scale x. dz/dx is one constant: the coefficients hold it.
template <class Simd>
struct Linear {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr bool kHasSlope = false;
  static constexpr bool kIsFastPath = false;
  static constexpr bool kIsCentered = false;
  static double slope_unit(const LogitTransform&) { return 1; }
  explicit Linear(const LogitTransform&) {}
  [[gnu::always_inline]] Pair operands(Pair x) const { return x; }
};

// z = scale x as well, for rows whose exponents would overflow: the center, the row's maximum, is subtracted first.
template <class Simd>
struct Centered {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr bool kHasSlope = false;
  static constexpr bool kIsFastPath = false;
  static constexpr bool kIsCentered = true;
  F center;
  static double slope_unit(const LogitTransform&) { return 1; }
  explicit Centered(const LogitTransform&) : center(Simd::set(0)) {}
  [[gnu::always_inline]] Pair operands(Pair x) const { return {Simd::sub(x.a, center), Simd::sub(x.b, center)}; }
};

// z = outer tanh(u), u = inner x; dz/dx = scale sech^2(u), of which scale / slope_unit is in the coefficients and slope_unit
// sech^2 is the slope. Where both vectors have |u| <= 3/4 (logits below 0.75 of the cap: nearly all of a model's), an odd
// polynomial and 1 - tanh^2. Elsewhere, with q = e^(-2|u|): tanh |u| = 1 - 2 q / (1 + q), or the polynomial again where |u| is
// small, and sech^2 u = 4 q / (1 + q)^2, which keeps its digits when tanh is near 1. kFine (float32 storage, held to a few ULP):
// one more coefficient, tanh takes in what rounding the product inner * x lost, and hands on what rounding itself loses: an
// exponent of 30 tanh(u) would show it.
//
// kAllSmall: for blocks of which the caller knows that |u| <= kSmall throughout; 16-bit storage then saves a coefficient. Where
// SmallSoftcap stands in for that, slope_unit is such that slopes are scale^2 - exponent^2.
template <class Simd, bool kFine, bool kAllSmall = false>
struct Softcap {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr bool kHasSlope = true;
  static constexpr bool kIsFastPath = false;
  static constexpr bool kIsCentered = false;
  static constexpr bool kHasSlopeUnit = !kFine && Simd::kHasTable;
  static constexpr float kSmall = kAllSmall && !kFine ? 0.5625f : 0.75f;
  static constexpr bool kSlopeFromOperand = kAllSmall;
  typename Simd::Factor inner;
  typename Simd::Scale twice_inner;  // e^(-2|u|) = 2^(-|x| twice_inner)
  F unit;                            // slopes are multiplied by it
  explicit Softcap(const LogitTransform& t)
      : inner(t.exact_inner), twice_inner(exponent_of(t)), unit(Simd::set(static_cast<float>(slope_unit(t)))) {}
  static double slope_unit(const LogitTransform& t) {
    return has_slope_unit(t) ? t.exact_exponent_scale * t.exact_exponent_scale : 1;
  }
  // Not for an extreme cap: neither its square nor a coefficient divided by that may leave float's range.
  static bool has_slope_unit(const LogitTransform& t) {
    return kHasSlopeUnit && t.exact_exponent_scale > 0x1p-10 && t.exact_exponent_scale < 0x1p10;
  }

  // Operands and slopes of two pairs; with kFine also what the operands' rounding lost.
  [[gnu::always_inline]] void operands(const Pair* x, Pair* t, Pair* lost, Pair* slope) const {
    const Pair u[2] = {times_inner(x[0]), times_inner(x[1])};
    if (kAllSmall || (Simd::all_abs_at_most(u[0], kSmall) && Simd::all_abs_at_most(u[1], kSmall))) {
      for (int k = 0; k < 2; ++k) t[k] = {small_tanh(x[k].a, u[k].a, lost[k].a), small_tanh(x[k].b, u[k].b, lost[k].b)};
      for (int k = 0; k < 2; ++k) slope[k] = {small_slope(t[k].a), small_slope(t[k].b)};
    } else {
      for (int k = 0; k < 2; ++k) {
        t[k] = {any_tanh(x[k].a, u[k].a, lost[k].a, slope[k].a), any_tanh(x[k].b, u[k].b, lost[k].b, slope[k].b)};
      }
    }
  }

  // Whether kAllSmall may be used for logits up to this magnitude; not if it is NaN.
  bool is_small(float magnitude) const { return magnitude * Simd::first(inner.value) <= kSmall; }
  // From operands, where tanh is not near 1.
  [[gnu::always_inline]] Pair slopes(Pair t) const { return {small_slope(t.a), small_slope(t.b)}; }

 private:
  [[gnu::always_inline]] Pair times_inner(Pair x) const { return {Simd::mul(x.a, inner.value), Simd::mul(x.b, inner.value)}; }
  static typename Simd::Scale exponent_of(const LogitTransform& t) {
    const double exact = 2 * LogitTransform::kExactLog2E * t.exact_inner;
    return {static_cast<float>(exact), exact};
  }
  [[gnu::always_inline]] F small_slope(F t) const {
    const F slope = Simd::negative_fma(t, t, Simd::set(1));
    if constexpr (kHasSlopeUnit) return Simd::mul(slope, unit);
    return slope;
  }
  // Minimax for tanh(u)/u in u^2 with constant 1: relative error 4.6e-8, 3e-8, and 2e-9 with kFine.
  [[gnu::always_inline]] F small_tanh([[maybe_unused]] F x, F u, [[maybe_unused]] F& lost) const {
    const F w = Simd::mul(u, u);
    if constexpr (kAllSmall && !kFine) {
      F p = Simd::set(0x1.09f5ccp-6f);
      p = Simd::fma(p, w, Simd::set(-0x1.ae9d0cp-5f));
      p = Simd::fma(p, w, Simd::set(0x1.10c676p-3f));
      p = Simd::fma(p, w, Simd::set(-0x1.555422p-2f));
      return Simd::fma(Simd::mul(p, w), u, u);
    } else if constexpr (!kFine) {
      F p = Simd::set(-0x1.3892c4p-8f);
      p = Simd::fma(p, w, Simd::set(0x1.4230ap-6f));
      p = Simd::fma(p, w, Simd::set(-0x1.b55f7cp-5f));
      p = Simd::fma(p, w, Simd::set(0x1.10ed5ap-3f));
      p = Simd::fma(p, w, Simd::set(-0x1.5554a4p-2f));
      return Simd::fma(Simd::mul(p, w), u, u);
    } else {
      F p = Simd::set(0x1.c753c8p-10f);
      p = Simd::fma(p, w, Simd::set(-0x1.f5d36ep-8f));
      p = Simd::fma(p, w, Simd::set(0x1.5f785ap-6f));
      p = Simd::fma(p, w, Simd::set(-0x1.b97d3cp-5f));
      p = Simd::fma(p, w, Simd::set(0x1.110db8p-3f));
      p = Simd::fma(p, w, Simd::set(-0x1.55554ap-2f));
      const F rest = Simd::fma(Simd::mul(p, w), u, Simd::product_error(x, inner, u)), t = Simd::add(u, rest);
      lost = Simd::sub(rest, Simd::sub(t, u));
      return t;
    }
  }
  // Out of line, as it is seldom needed.
  [[gnu::noinline, gnu::cold]] F any_tanh(F x, F u, [[maybe_unused]] F& lost, F& slope) const {
    const F q = exp2_fine<Simd>(Simd::negate(Simd::abs(x)), twice_inner);
    const F one = Simd::set(1), sum = Simd::add(one, q);
    const F sum_lost = Simd::sub(q, Simd::sub(sum, one));  // what rounding the sum lost: it would count twice in the slope
    const F rough = Simd::reciprocal(sum);
    const F inverse = Simd::negative_fma(rough, Simd::mul(sum_lost, rough), rough);
    const F q_inverse = Simd::mul(q, inverse);
    const F rough_large = Simd::negative_fma(Simd::set(2), q_inverse, one), large = Simd::flip_sign(rough_large, u);
    const F small = small_tanh(x, u, lost);
    F large_slope = Simd::mul(Simd::mul(q_inverse, inverse), Simd::set(4));
    if constexpr (kFine) {
      // By what q_inverse (1 + q) exceeds q.
      const F excess = Simd::fma(q_inverse, sum_lost, Simd::product_minus(q_inverse, sum, q));
      const F rest = Simd::negative_fma(Simd::set(2), q_inverse, Simd::sub(one, rough_large));
      const F correction = Simd::mul(excess, inverse), large_lost = Simd::fma(Simd::set(2), correction, rest);
      lost = Simd::select_abs_at_most(u, kSmall, lost, Simd::flip_sign(large_lost, u));
      // 4 (r - r^2) of r = q_inverse - correction. What is taken off is small: as good as rounded once.
      const F taken = Simd::fma(rough_large, correction, Simd::mul(q_inverse, q_inverse));
      large_slope = Simd::mul(Simd::set(4), Simd::sub(q_inverse, taken));
    }
    if constexpr (kHasSlopeUnit) large_slope = Simd::mul(large_slope, unit);
    slope = Simd::select_abs_at_most(u, kSmall, small_slope(small), large_slope);
    return Simd::select_abs_at_most(u, kSmall, small, large);
  }
};

}  // namespace tileloss::impl::cpu
