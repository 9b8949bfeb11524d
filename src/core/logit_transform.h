// z = softcap(logit_scale * x) / T for one logit, and dz/dx. The sweeps have the same in vectors.
#ifndef TILELOSS_CORE_LOGIT_TRANSFORM_H_
#define TILELOSS_CORE_LOGIT_TRANSFORM_H_

#include <cmath>

namespace tileloss {

struct LogitTransform {
  float scale = 1;    // without softcap: logit_scale / T, the one factor
  float softcap = 0;  // with softcap c: z = (c/T) tanh((logit_scale/c) x)
  float inner = 0;    // logit_scale / c
  float outer = 0;    // c / T

  static LogitTransform make(double logit_scale, double softcap, double temperature) {
    LogitTransform t;
    t.scale = static_cast<float>(logit_scale / temperature);
    t.softcap = static_cast<float>(softcap);
    if (softcap > 0) {
      t.inner = static_cast<float>(logit_scale / softcap);
      t.outer = static_cast<float>(softcap / temperature);
    }
    return t;
  }

  bool is_identity() const { return softcap == 0 && scale == 1; }

  // Compiled into every instruction set's kernels: inlined always, so that the linker cannot pick one set's copy for all.
  [[gnu::always_inline]] float value(float x) const {
    return softcap > 0 ? outer * static_cast<float>(__builtin_tanh(static_cast<double>(inner) * x)) : scale * x;
  }

  double derivative(float x) const {
    if (!(softcap > 0)) return scale;
    const double c = std::cosh(static_cast<double>(inner) * x);
    return scale / (c * c);
  }
};

}  // namespace tileloss

#endif  // TILELOSS_CORE_LOGIT_TRANSFORM_H_
