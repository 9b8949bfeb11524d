// The exp of the sweeps, from a reduced argument on, for every instruction set. A Simd brings three operations of its own:
//
//   round(t)                     n, the integer next to t, in the form in which the other two want it
//   remainder(t, n)              t - n
//   scale_by_power_of_two(p, n)  p 2^n; 0 below 2^-126 (the task's control word flushes what is less), also where t was -inf
#ifndef TILELOSS_BACKENDS_CPU_SIMD_EXP2_H_
#define TILELOSS_BACKENDS_CPU_SIMD_EXP2_H_

namespace tileloss::impl::cpu {

// 2^r on [-1/2, 1/2]: minimax with constant 1. Degree 5: relative error 9.1e-8 (0.8 ULP), enough under 16-bit storage; degree
// 6, kFine: 2e-9.
template <class Simd, bool kFine>
[[gnu::always_inline]] inline typename Simd::Pair exp2_polynomial(typename Simd::Pair r) {
  constexpr float kDegree5[] = {0x1.5bba14p-10f, 0x1.3cea88p-7f, 0x1.c6b752p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f, 1};
  constexpr float kDegree6[] = {
      0x1.41fbbcp-13f, 0x1.5f3e54p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f, 0x1.ebfbdcp-3f, 0x1.62e43p-1f, 1};
  const float* c = kFine ? kDegree6 : kDegree5;
  typename Simd::Pair p = {Simd::set(c[0]), Simd::set(c[0])};
  for (int j = 1; j <= (kFine ? 6 : 5); ++j) p = {Simd::fma(p.a, r.a, Simd::set(c[j])), Simd::fma(p.b, r.b, Simd::set(c[j]))};
  return p;
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
  return Simd::scale_by_power_of_two(exp2_polynomial<Simd, true>({r, r}).a, n);
}

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SIMD_EXP2_H_
