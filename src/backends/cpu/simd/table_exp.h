// 2^t from a table of 32 powers that fits two registers and a square:
//
//   m = t + 1.5 * 2^18       its last 5 bits are the 32nds of k, the multiple of 1/32 next to t
//   n = m - (1.5 * 2^18 + c)  k - c, exact; c = 46/32
//   y = t - n                t - k + c
//   2^t = table[32nds of k] * 2^floor(n) * (y^2 + d)
//
// as 2^y is nearly a multiple of y^2 + d around c: relative error 1.3e-7 for |t - k| <= 1/64 (with c = 1 / log 2 it would be
// 0.6e-7, but n must be exact), with all roundings at most 3.9e-7, 1.0e-7 in the mean square. 1 for t = 0. 0 for t < -123 (the
// factor 2^floor(n) is flushed first) down to -2^87; below that y^2 overflows and the result is NaN, as it is for -inf.
#pragma once

namespace tileloss::impl::cpu {

template <class Simd>
struct TableExp {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr float kMagic = 0x1.8p18f;

  // With every power times 2^shift.
  explicit TableExp(float shift)
      : magic_and_center(Simd::set(kMagic + 1.4375f)), square_term(Simd::set(0x1.0a66bap+1f)), table(make_table(shift)) {}

  // 2^t = power * rest; m, n and y as above. The order of a pair's steps is left to the caller: GCC schedules by it.
  struct Factors {
    F power, rest;
    [[gnu::always_inline]] F product() const { return Simd::mul(power, rest); }
  };
  [[gnu::always_inline]] F centered(F m) const { return Simd::sub(m, magic_and_center); }
  [[gnu::always_inline]] Factors factors(F m, F n, F y) const {
    return {Simd::scale_by_power_of_two(Simd::look_up(table, m), n), Simd::fma(y, y, square_term)};
  }

 private:
  static typename Simd::Table make_table(float shift) {
    // 2^(i/32 - floor(i/32 - c)) / (c^2 + d) for i = 0, 1, ..., 31, a little less to spread the error evenly; the first so that
    // 2^0 is 1.
    alignas(64) static constexpr float kPowers[] = {
        0x1.edc58cp-1f, 0x1.f89574p-1f, 0x1.01d0fep+0f, 0x1.07763ap+0f, 0x1.0d3b1ap+0f, 0x1.132054p+0f, 0x1.192698p+0f,
        0x1.1f4ea2p+0f, 0x1.25992ep+0f, 0x1.2c06fep+0f, 0x1.3298dap+0f, 0x1.394f88p+0f, 0x1.402bd8p+0f, 0x1.472eap+0f,
        0x1.4e58b2p-1f, 0x1.55aaeep-1f, 0x1.5d2636p-1f, 0x1.64cb6cp-1f, 0x1.6c9b8p-1f,  0x1.74975ep-1f, 0x1.7cbffep-1f,
        0x1.85165ap-1f, 0x1.8d9b72p-1f, 0x1.96504cp-1f, 0x1.9f35f6p-1f, 0x1.a84d7ep-1f, 0x1.b197fep-1f, 0x1.bb1694p-1f,
        0x1.c4ca62p-1f, 0x1.ceb494p-1f, 0x1.d8d65ap-1f, 0x1.e330ecp-1f};
    return Simd::make_table(kPowers, shift);
  }

  F magic_and_center, square_term;
  typename Simd::Table table;
};

}  // namespace tileloss::impl::cpu
