// The exp of the sweeps, from a reduced argument on, for every instruction set. A Simd brings three operations of its own:
//
//   round(t)                     n, the integer next to t, in the form in which the other two want it
//   remainder(t, n)              t - n
//   scale_by_power_of_two(p, n)  p 2^n; 0 below 2^-126 (the task's control word flushes what is less), also where t was -inf
//
// and says whether a fused multiply-add of its overwrites the summand (kFmaOverwritesSummand); power_of_two(n) then, 2^n or 0.
#pragma once

namespace tileloss::impl::cpu {

// 2^r on [-1/2, 1/2]: minimax with constant 1. Degree 5: relative error 9.1e-8 (0.8 ULP), enough under 16-bit storage; degree
// 6, kFine: 2e-9. The highest power's coefficient first.
template <bool kFine>
[[gnu::always_inline]] constexpr float exp2_coefficient(int j) {
  constexpr float kDegree5[] = {0x1.5bba14p-10f, 0x1.3cea88p-7f, 0x1.c6b752p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f, 1};
  constexpr float kDegree6[] = {
      0x1.41fbbcp-13f, 0x1.5f3e54p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f, 0x1.ebfbdcp-3f, 0x1.62e43p-1f, 1};
  return kFine ? kDegree6[j] : kDegree5[j];
}
template <class Simd, bool kFine>
[[gnu::always_inline]] inline typename Simd::Pair exp2_polynomial(typename Simd::Pair r) {
  const typename Simd::F first = Simd::set(exp2_coefficient<kFine>(0));
  typename Simd::Pair p = {first, first};
  for (int j = 1; j <= (kFine ? 6 : 5); ++j) {
    const typename Simd::F c = Simd::set(exp2_coefficient<kFine>(j));
    p = {Simd::fma(p.a, r.a, c), Simd::fma(p.b, r.b, c)};
  }
  return p;
}

// 2^r 2^n, the same polynomial, for an fma that overwrites its summand: each that adds a coefficient costs a copy of it. Two do,
// and the constant 1 comes in as 2^n + 2^n (2^r - 1).
template <class Simd, bool kFine>
[[gnu::always_inline]] inline typename Simd::F exp2_by_sums(typename Simd::F r, typename Simd::F n) {
  using F = typename Simd::F;
  constexpr int kDegree = kFine ? 6 : 5;
  constexpr float kFour = exp2_coefficient<kFine>(kDegree - 4), kTwo = exp2_coefficient<kFine>(kDegree - 2);
  static constexpr typename Simd::Constant kSummands[] = {{kFour, kFour, kFour, kFour}, {kTwo, kTwo, kTwo, kTwo}};
  const auto c = [](int power) { return Simd::set(exp2_coefficient<kFine>(kDegree - power)); };
  const F square = Simd::mul(r, r);
  F high = Simd::fma(c(5), r, Simd::copy(kSummands[0]));
  if constexpr (kFine) high = Simd::fma(c(6), square, high);
  const F low = Simd::fma(high, square, Simd::fma(c(3), r, Simd::copy(kSummands[1])));
  const F rest = Simd::fma(low, square, Simd::mul(c(1), r)), power = Simd::power_of_two(n);
  return Simd::fma(power, rest, power);
}

// 2^r 2^n of a pair.
template <class Simd, bool kFine>
[[gnu::always_inline]] inline typename Simd::Pair exp2_scaled(typename Simd::Pair r, typename Simd::Pair n) {
  if constexpr (Simd::kFmaOverwritesSummand) {
    return {exp2_by_sums<Simd, kFine>(r.a, n.a), exp2_by_sums<Simd, kFine>(r.b, n.b)};
  } else {
    const typename Simd::Pair p = exp2_polynomial<Simd, kFine>(r);
    return {Simd::scale_by_power_of_two(p.a, n.a), Simd::scale_by_power_of_two(p.b, n.b)};
  }
}

// The same of degree 4: relative error 4e-6, a 200th of what logits kept in words (backends/cpu/head/kept_logits.h) cost.
template <class Simd>
[[gnu::always_inline]] inline typename Simd::F exp2_polynomial_of_words(typename Simd::F r) {
  constexpr float c[] = {0x1.3d6a4ep-7f, 0x1.c7b13ep-5f, 0x1.ebf8d8p-3f, 0x1.62e428p-1f, 1};
  typename Simd::F p = Simd::set(c[0]);
  for (int j = 1; j <= 4; ++j) p = Simd::fma(p, r, Simd::set(c[j]));
  return p;
}

// 2^(x scale) for x <= 0, to 1 ULP.
template <class Simd>
inline typename Simd::F exp2_fine(typename Simd::F x, const typename Simd::Scale& scale) {
  const typename Simd::F t = Simd::scale_minus(x, scale, Simd::set(0)), n = Simd::round(t);
  const typename Simd::F r = Simd::fine_remainder(x, scale, Simd::set(0), t, n);
  return exp2_scaled<Simd, true>({r, r}, {n, n}).a;
}

}  // namespace tileloss::impl::cpu
