// A row's backward in four numbers: dL/dz_j = target [j = y] + p_j (prob + prob_logp log p_j) + uniform u_j.  (losses.md, "One
// gradient form for every loss".)
#pragma once

#include "core/host_device.h"

namespace tileloss::impl {

// Double, and prob held as its sum with target: at a confident label the sum is all that is left of the two. (With p = 1 - 1e-18
// and an entropy bonus, target + prob formed from rounded parts had no digit right.)
struct RowCoefficients {
  double target = 0;
  double prob_plus_target = 0;
  double prob_logp = 0;
  double uniform = 0;  // times 1, or times the class weight c_j

  TILELOSS_HOST_DEVICE double prob() const { return prob_plus_target - target; }
};

struct RowResult {
  double loss = 0;  // this row's share: with a reduction, what is to be summed (weights and denominators applied)
  RowCoefficients coefficients;
  // Of a target that is not labels, added to the gradient: form p_j (g_j - mean), whose g and mean are the target sweep's
  // (core/divergence.h). The coefficients here do not depend on what that finds; those above then have target alone, at the
  // temperature of the label's cross-entropy.
  double form = 0;
  bool has_divergence = false;  // false: the divergence does not count, also where it is infinite; form is 0
};

// From upstream gradients of logp, lse and the entropy H. At temperature_on = logprob the upstream of logp' is divided by T.
TILELOSS_HOST_DEVICE inline RowCoefficients coefficients_from_upstream(double g_logp, double g_lse, double g_entropy,
                                                                       double entropy) {
  RowCoefficients c;
  c.target = g_logp;
  c.prob_plus_target = g_lse - (g_entropy == 0 ? 0.0 : g_entropy * entropy);
  c.prob_logp = -g_entropy;
  return c;
}

}  // namespace tileloss::impl
