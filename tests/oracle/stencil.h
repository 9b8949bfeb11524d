// Derivatives of a function in double, to check gradients that were written down.
#pragma once

#include <functional>

namespace tileloss::oracle {

// The five-point stencil: its own error is h^4/30 of the fifth derivative plus about 2^-52/h of the function: 1e-12 here.
inline double derivative(const std::function<double()>& function, double& variable) {
  constexpr double kStep = 1e-3;
  const double at = variable;
  const auto value = [&](double offset) {
    variable = at + offset * kStep;
    return function();
  };
  const double result = (8.0 * (value(1.0) - value(-1.0)) - (value(2.0) - value(-2.0))) / (12.0 * kStep);
  variable = at;
  return result;
}

}  // namespace tileloss::oracle
