// Natural logarithm of positive normal numbers, for every instruction set: exactly 0 at 1, elsewhere to 1.3 ULP near 1 and to
// an ULP of the result's exponent part beyond.
#ifndef TILELOSS_BACKENDS_CPU_SIMD_LOG_H_
#define TILELOSS_BACKENDS_CPU_SIMD_LOG_H_

namespace tileloss::impl::cpu {

// x = (1 + f) 2^e with 1 + f in [3/4, 3/2); log(1 + f) = f - f^2/2 + f^3 P(f), P minimax: relative error 5e-9.
template <class Simd>
[[gnu::always_inline]] inline typename Simd::F log(typename Simd::F x) {
  using F = typename Simd::F;
  constexpr float kP[] = {-0x1.7140cap-5f, 0x1.ac90c8p-4f, -0x1.0d8a9p-3f, 0x1.28847cp-3f,
                          -0x1.54efdcp-3f, 0x1.9969bp-3f,  -0x1.00004p-2f, 0x1.5555a4p-2f};
  F exponent;
  const F f = Simd::sub(Simd::split(x, exponent), Simd::set(1));
  F p = Simd::set(kP[0]);
  for (int j = 1; j < 8; ++j) p = Simd::fma(p, f, Simd::set(kP[j]));
  const F square = Simd::mul(f, f);
  const F rest = Simd::fma(Simd::mul(square, f), p, Simd::mul(square, Simd::set(-0.5f)));
  // log 2 in two parts: a multiple of the first is exact.
  const F low = Simd::fma(exponent, Simd::set(-0x1.bd0106p-13f), rest);
  return Simd::fma(exponent, Simd::set(0x1.63p-1f), Simd::add(f, low));
}

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SIMD_LOG_H_
