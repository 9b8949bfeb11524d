// Forward-mode differentiation in double: a value and its derivatives with respect to what a token's loss depends on. It writes
// the policy losses as their definitions read, so that no gradient formula is typed in.
//
// 0 times infinity is 0 among derivatives: the branch of a min or clamp that was not taken, and a sigmoid that is saturated, have
// no part in the gradient, also where a ratio is infinite. NaN values have NaN derivatives.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

namespace tileloss::oracle {

enum Variable : std::size_t {
  kLogRatio,  // log rho, of the token or of its sequence
  kLogp,      // logp directly, not through rho
  kEntropy,
  kVariables
};

struct Dual {
  double value = 0.0;
  std::array<double, kVariables> slopes{};
};

inline Dual variable(double value, Variable which) {
  Dual x{value, {}};
  x.slopes[which] = 1.0;
  return x;
}

inline double times(double factor, double slope) {
  if (slope == 0.0 || (factor == 0.0 && std::isinf(slope))) return 0.0;
  return factor * slope;
}

// f(x), given f and f' at x.value.
inline Dual chain(const Dual& x, double value, double derivative) {
  Dual y{value, {}};
  for (std::size_t k = 0; k < kVariables; ++k) y.slopes[k] = times(derivative, x.slopes[k]);
  return y;
}

inline Dual operator*(double factor, const Dual& x) { return chain(x, factor * x.value, factor); }
inline Dual operator-(const Dual& x) { return -1.0 * x; }
inline Dual operator+(const Dual& x, double constant) { return chain(x, x.value + constant, 1.0); }

inline Dual operator+(const Dual& x, const Dual& y) {
  Dual sum{x.value + y.value, {}};
  for (std::size_t k = 0; k < kVariables; ++k) sum.slopes[k] = x.slopes[k] + y.slopes[k];
  return sum;
}
inline Dual operator-(const Dual& x, const Dual& y) { return x + -y; }

inline Dual operator*(const Dual& x, const Dual& y) {
  Dual product{x.value * y.value, {}};
  for (std::size_t k = 0; k < kVariables; ++k) product.slopes[k] = times(x.value, y.slopes[k]) + times(y.value, x.slopes[k]);
  return product;
}

inline Dual exp(const Dual& x) {
  const double e = std::exp(x.value);
  return chain(x, e, e);
}

inline Dual expm1(const Dual& x) { return chain(x, std::expm1(x.value), std::exp(x.value)); }

inline Dual sigmoid(const Dual& x) {
  const double e = std::exp(-std::fabs(x.value));
  return chain(x, x.value >= 0.0 ? 1.0 / (1.0 + e) : e / (1.0 + e), e / ((1.0 + e) * (1.0 + e)));
}

// x where both are equal.
inline Dual min(const Dual& x, const Dual& y) {
  if (std::isnan(x.value) || std::isnan(y.value)) return std::numeric_limits<double>::quiet_NaN() * (x + y);
  return x.value <= y.value ? x : y;
}

// The bounds belong to the inside; a bound of NaN is none.
inline Dual clamp(const Dual& x, double low, double high) {
  if (x.value < low) return {low, {}};
  if (x.value > high) return {high, {}};
  return x;
}

}  // namespace tileloss::oracle
