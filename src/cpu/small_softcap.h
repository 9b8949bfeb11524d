// Softcap of 16-bit logits in a block whose |u| = |inner x| stay below kSmall (nearly all of a model's): tanh and exp in one
// loop.
//
// E, the exponent without its offset, is an odd polynomial in x that has the exponent's scale in its coefficients; the slope is
// scale^2 - E^2 (Softcap's slope_unit). 2^E comes from a table of 32 powers that fits two registers and a square:
//
//   m = E + 1.5 * 2^18       its last 5 bits are the 32nds of k, the multiple of 1/32 next to E
//   n = m - (1.5 * 2^18 + c)  k - c, exact; c = 46/32
//   y = E - n                E - k + c
//   2^E = table[32nds of k] * 2^floor(n) * (y^2 + d)
//
// as 2^y is nearly a multiple of y^2 + d around c: relative error 1.3e-7 for |E - k| <= 1/64 (with c = 1 / log 2 it would be
// 0.6e-7, but n must be exact).
//
// 16 elements cost 11 multiplications and fma (x^2, tanh 4, E, the slope, y^2 + d, 2^E, two for stash and gradient), where tanh
// in a loop of its own and exp2_polynomial cost 14 and a detour through L1: 13.7 cycles a step against 15.8, from L2.
#ifndef TILELOSS_CPU_SMALL_SOFTCAP_H_
#define TILELOSS_CPU_SMALL_SOFTCAP_H_

#include "core/logit_transform.h"
#include "cpu/transforms.h"

namespace tileloss::cpu {

template <class Simd>
struct SmallSoftcap {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  using General = Softcap<Simd, false>;
  static constexpr bool kHasSlope = true;
  static constexpr bool kFused = true;
  static constexpr float kSmall = 0.5625f;
  static constexpr double kMaxOffset = 120;  // the table holds 2^-offset
  F coefficients[5];                         // of x, x^3, ..., x^9
  F unit, magic, magic_and_center, square_term;
  typename Simd::Table table;
  float inner;
  bool is_possible;  // all of them are in float's range

  // Minimax for tanh(u)/u in u^2 with constant 1: relative error 4.6e-8.
  explicit SmallSoftcap(const LogitTransform& t)
      : unit(Simd::set(static_cast<float>(General::slope_unit(t)))),
        magic(Simd::set(kMagic)),
        magic_and_center(Simd::set(kMagic + 1.4375f)),
        square_term(Simd::set(0x1.0a66bap+1f)),
        inner(t.inner),
        is_possible(General::has_slope_unit(t)) {
    constexpr float kTanh[] = {1, -0x1.555422p-2f, 0x1.10c676p-3f, -0x1.ae9d0cp-5f, 0x1.09f5ccp-6f};
    double power = t.exact_exponent_scale * t.exact_inner;
    for (int k = 0; k < 5; ++k, power *= t.exact_inner * t.exact_inner) {
      coefficients[k] = Simd::set(static_cast<float>(power * kTanh[k]));
      is_possible = is_possible && power > 0x1p-100 && power < 0x1p100;
    }
  }
  static double slope_unit(const LogitTransform& t) { return General::slope_unit(t); }

  // What finish() subtracts from E. False if it cannot.
  bool set_offset(float offset) {
    // 2^(i/32 - floor(i/32 - c)) / (c^2 + d) for i = 0, 1, ..., 31, which spreads the error evenly.
    alignas(64) static constexpr float kPowers[] = {
        0x1.edc588p-1f, 0x1.f89574p-1f, 0x1.01d0fep+0f, 0x1.07763ap+0f, 0x1.0d3b1ap+0f, 0x1.132054p+0f, 0x1.192698p+0f,
        0x1.1f4ea2p+0f, 0x1.25992ep+0f, 0x1.2c06fep+0f, 0x1.3298dap+0f, 0x1.394f88p+0f, 0x1.402bd8p+0f, 0x1.472eap+0f,
        0x1.4e58b2p-1f, 0x1.55aaeep-1f, 0x1.5d2636p-1f, 0x1.64cb6cp-1f, 0x1.6c9b8p-1f,  0x1.74975ep-1f, 0x1.7cbffep-1f,
        0x1.85165ap-1f, 0x1.8d9b72p-1f, 0x1.96504cp-1f, 0x1.9f35f6p-1f, 0x1.a84d7ep-1f, 0x1.b197fep-1f, 0x1.bb1694p-1f,
        0x1.c4ca62p-1f, 0x1.ceb494p-1f, 0x1.d8d65ap-1f, 0x1.e330ecp-1f};
    table = Simd::make_table(kPowers, -offset);
    return is_possible && __builtin_fabsf(offset) <= kMaxOffset;
  }
  // Whether it may be used for logits up to this magnitude; not if it is NaN.
  bool is_small(float magnitude) const { return magnitude * inner <= kSmall; }

  // E.
  [[gnu::always_inline]] Pair operands(Pair x) const { return finish_tanh(start(x)); }

  // A pair on its way through the software pipeline, cut in the middle of the polynomial; cut at the slope it takes 7 % longer.
  struct Started {
    Pair x, square, p;
  };
  [[gnu::always_inline]] Started start(Pair x) const {
    Started s;
    s.x = x;
    s.square = {Simd::mul(x.a, x.a), Simd::mul(x.b, x.b)};
    s.p = {Simd::fma(coefficients[4], s.square.a, coefficients[3]), Simd::fma(coefficients[4], s.square.b, coefficients[3])};
    s.p = step(s, coefficients[2]);
    return s;
  }
  // 2^(E - offset), E itself and the slope.
  [[gnu::always_inline]] Pair finish(const Started& s, Pair& e, Pair& slope) const {
    e = finish_tanh(s);
    slope = {Simd::negative_fma(e.a, e.a, unit), Simd::negative_fma(e.b, e.b, unit)};
    return {power(e.a), power(e.b)};
  }

 private:
  static constexpr float kMagic = 0x1.8p18f;
  [[gnu::always_inline]] static Pair step(const Started& s, F c) {
    return {Simd::fma(s.p.a, s.square.a, c), Simd::fma(s.p.b, s.square.b, c)};
  }
  [[gnu::always_inline]] Pair finish_tanh(Started s) const {
    s.p = step(s, coefficients[1]);
    s.p = step(s, coefficients[0]);
    return {Simd::mul(s.p.a, s.x.a), Simd::mul(s.p.b, s.x.b)};
  }
  [[gnu::always_inline]] F power(F e) const {
    const F m = Simd::add(e, magic), n = Simd::sub(m, magic_and_center), y = Simd::sub(e, n);
    return Simd::mul(Simd::scale_by_power_of_two(Simd::look_up(table, m), n), Simd::fma(y, y, square_term));
  }
};

}  // namespace tileloss::cpu

#endif  // TILELOSS_CPU_SMALL_SOFTCAP_H_
