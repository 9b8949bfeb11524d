// How a logit becomes an exponent of 2.
#pragma once

#include "backends/cuda/sweep_job.h"

namespace tileloss::impl::cuda {

// kIsPlain: without softcap, which spares the code for it.
template <bool kIsPlain>
__device__ __forceinline__ LogitTransform transform_of(const SweepJob& job) {
  LogitTransform t = *job.transform;
  if constexpr (kIsPlain) t.softcap = 0;
  return t;
}

// How a logit becomes an exponent: 2^t, t = scale (u - top), u = the logit or its tanh. Subtracted before it is scaled: then t is
// exactly 0 at the top, and no offset that all columns share costs a digit. Capped logits are compared in double, as float32
// would leave nothing of their differences near the cap.
template <class T, bool kIsPlain>
struct Exponents {
  struct Top {
    float logit = 0;
    double capped = -1;
  };
  struct Power {
    float t, e;  // e = 2^t
  };
  float scale, scale_rest;
  double inner;
  bool has_softcap;

  __device__ __forceinline__ explicit Exponents(const LogitTransform& t)
      : scale(t.exponent_scale),
        scale_rest(static_cast<float>(t.exact_exponent_scale - t.exponent_scale)),
        inner(t.exact_inner),
        has_softcap(!kIsPlain && t.softcap > 0) {}

  __device__ __forceinline__ double capped(float x) const {
    const double less = std::expm1(-2 * std::fabs(inner * x));
    return std::copysign(less / (2 + less), static_cast<double>(x));
  }
  // Of a maximum; finite where that is -inf, so that nothing becomes -inf - -inf.
  __device__ __forceinline__ Top top(float max) const {
    if (has_softcap) return {0, capped(max)};
    return {max == -kInfinity ? 0 : max, 0};
  }
  __device__ __forceinline__ float shifted(float x, const Top& top) const {
    if constexpr (!kIsPlain) {
      if (has_softcap) return static_cast<float>(capped(x) - top.capped);
    }
    return x - top.logit;
  }
  __device__ __forceinline__ Power power(float x, const Top& top) const { return power(shifted(x, top)); }
  // A gradient in float32 has to be right to some last places, in 16 bits to those that are kept.
  __device__ __forceinline__ Power power(float shifted) const {
    const float t = shifted * scale;
    if constexpr (sizeof(T) == 4) {
      return {t, exp2_fine(t, std::fma(shifted, scale, -t) + shifted * scale_rest)};
    } else {
      return {t, exp2_approx(t)};
    }
  }
  __device__ __forceinline__ Power power(const Top& from, const Top& to) const {
    return power(has_softcap ? static_cast<float>(from.capped - to.capped) : from.logit - to.logit);
  }
};

// dz/dx of a capped column over that of a small logit: 1 - tanh^2.
__device__ __forceinline__ float capped_slope(double inner, float x) {
  const double q = std::exp(-2 * std::fabs(inner * x));
  return static_cast<float>(4 * q / ((1 + q) * (1 + q)));
}

}  // namespace tileloss::impl::cuda
