// From logits to exponents where there is a fused multiply-add: what AVX-512 and AVX2 share. Lanes: the vector F, set, add, fma,
// and multiply_subtract (a b - c, rounded once).
#pragma once

namespace tileloss::impl::cpu {

template <class Lanes>
struct FmaExponents {
  using F = typename Lanes::F;

  // What turns a logit into an exponent; correction makes up for rounding the scale.
  struct Scale {
    F scale, correction;
    Scale(float rounded, double exact)
        : scale(Lanes::set(rounded)), correction(Lanes::set(static_cast<float>(exact / rounded - 1))) {}
  };

  // A factor in two parts, for product_error.
  struct Factor {
    F value, low;
    explicit Factor(double exact)
        : value(Lanes::set(static_cast<float>(exact))), low(Lanes::set(static_cast<float>(exact - static_cast<float>(exact)))) {}
  };
  // What rounding lost in product = x * factor.
  static F product_error(F x, const Factor& factor, F product) {
    return Lanes::fma(x, factor.low, Lanes::multiply_subtract(x, factor.value, product));
  }

  // a b - c, rounded once.
  static F product_minus(F a, F b, F c) { return Lanes::multiply_subtract(a, b, c); }

  // x * scale - offset, rounded once: a common offset of the logits costs nothing. offset_for gives an offset near the wanted
  // one, effective_offset what it really subtracts.
  static F scale_minus(F x, const Scale& s, F offset) { return Lanes::multiply_subtract(x, s.scale, offset); }
  static float offset_for(double wanted, float) { return static_cast<float>(__builtin_rint(wanted)); }
  static double effective_offset(float offset, float) { return offset; }
  // (x * scale - offset) * (1 + correction) - n, for t = x * scale - offset: nothing is rounded at t's size, as offset + n is
  // exact.
  static F corrected_remainder(F x, const Scale& s, F offset, F t, F n) {
    return Lanes::fma(t, s.correction, Lanes::multiply_subtract(x, s.scale, Lanes::add(offset, n)));
  }
};

}  // namespace tileloss::impl::cpu
