// z = softcap(logit_scale * x) / T for one logit, and dz/dx; and the constants with which the sweeps do the same in vectors, in
// units of log 2: exp(z) = 2^(exponent_scale * u), u = x or tanh(inner * x).
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace tileloss::impl {

struct LogitTransform {
  static constexpr double kExactLog2E = 0x1.71547652b82fep+0;
  static constexpr float kLog2E = 0x1.715476p+0f;

  float scale = 1;    // without softcap: logit_scale / T, the one factor
  float softcap = 0;  // with softcap c: z = (c/T) tanh((logit_scale/c) x)
  float inner = 0;    // logit_scale / c
  float outer = 0;    // c / T
  float exponent_scale = kLog2E;
  // exponent_scale over what it should be a multiple of: log2(e) as the sweeps see it. With it, a maximum m in z becomes the
  // exponent of the very element that it came from, and rounding exponent_scale shifts no sum.
  double log2e = kLog2E;
  double exact_exponent_scale = kExactLog2E;  // what exponent_scale is rounded from
  double exact_factor = 1;                    // scale or outer, as that has it
  double exact_inner = 0;                     // what inner is rounded from

  TILELOSS_HOST_DEVICE static LogitTransform make(double logit_scale, double softcap, double temperature) {
    LogitTransform t;
    t.scale = static_cast<float>(logit_scale / temperature);
    t.softcap = static_cast<float>(softcap);
    double factor = logit_scale / temperature;
    if (softcap > 0) {
      factor = softcap / temperature;
      t.exact_inner = logit_scale / softcap;
      t.inner = static_cast<float>(t.exact_inner);
      t.outer = static_cast<float>(factor);
    }
    t.exact_exponent_scale = factor * kExactLog2E;
    t.exponent_scale = static_cast<float>(t.exact_exponent_scale);
    t.exact_factor = t.exact_exponent_scale / kExactLog2E;
    t.log2e = static_cast<double>(t.exponent_scale) / factor;
    return t;
  }

  // Compiled into every instruction set's kernels: inlined always, so that the linker cannot pick one set's copy for all.
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE float value(float x) const {
    return softcap > 0 ? outer * static_cast<float>(std::tanh(exact_inner * x)) : scale * x;
  }

  // The same in double.
  TILELOSS_HOST_DEVICE double exact_value(float x) const {
    return exact_factor * (softcap > 0 ? std::tanh(exact_inner * x) : static_cast<double>(x));
  }

  TILELOSS_HOST_DEVICE double derivative(float x) const {
    if (!(softcap > 0)) return scale;
    const double c = std::cosh(exact_inner * x);
    return scale / (c * c);
  }
};

}  // namespace tileloss::impl
