// From a row's statistics and coefficients to what the backward sweep needs of it.
#pragma once

#include "backends/cpu/sweep/row_kernel.h"
#include "core/columns.h"

namespace tileloss::impl::cpu {

struct RowGradient {
  RowStats stats;
  RowCoefficients coefficients;
};

// dL/dz of the label's column, which the sweep leaves wrong.
inline double label_gradient(const RowGradient& g, double class_weight) {
  return column_gradient(g.coefficients, g.stats, true, class_weight);
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
