// From a row's statistics and coefficients to what the backward sweep needs of it.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_ROW_GRADIENT_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_ROW_GRADIENT_H_

#include "backends/cpu/sweep/row_kernel.h"
#include "core/row_coefficients.h"
#include "core/row_stats.h"

namespace tileloss::impl::cpu {

struct RowGradient {
  RowStats stats;
  RowCoefficients coefficients;
};

// The target's column, which the sweep leaves wrong: dz_y = target (R/S) + p_y (prob + target + prob_logp logp) + uniform c_y, so
// that the label's gradient keeps its digits when p is near 1.
inline double target_gradient(const RowGradient& g, double class_weight) {
  const RowCoefficients& c = g.coefficients;
  double dz = c.target * g.stats.one_minus_p + c.uniform * class_weight;
  if (g.stats.p != 0) dz += g.stats.p * (c.prob_plus_target + (c.prob_logp == 0 ? 0.0 : c.prob_logp * g.stats.logp));
  return dz;
}

// The numbers of a BackwardRow; where the row lies is the caller's.
inline BackwardRow make_backward(const RowGradient& g, const LogitTransform& transform) {
  BackwardRow row;
  row.transform = transform;
  row.max = static_cast<float>(g.stats.max);
  row.log_sum = g.stats.log_sum;
  row.prob = g.coefficients.prob() / g.stats.sum;
  row.prob_logp = g.coefficients.prob_logp / g.stats.sum;
  row.uniform = g.coefficients.uniform;
  return row;
}

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_ROW_GRADIENT_H_
