// PPO's and GRPO's clipped objective, with delta (an upper bound of rho) and the dual clip c > 1:
//   l = -min(min(rho, delta) A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A);  where A < 0: at most -c A
//   dl/drho = -A where the smaller of the two branches follows rho, bounds included, and 0 where a bound rules.
// Sources: Schulman et al. 2017 (PPO); Ye et al. 2020 (dual clip); delta as in TRL. Ties are ours: the full gradient on a bound.
#pragma once

#include "losses/policy/token.h"

namespace tileloss::impl::policy {

TILELOSS_HOST_DEVICE inline TokenLoss clip(const Token& t, const Numbers& n) {
  const double a = t.advantage;
  const bool is_below_delta = !(t.ratio > n.delta);  // delta is NaN when it is off
  const double plain = (is_below_delta ? t.ratio : n.delta) * a;
  const double clipped = clamp(t.ratio, n.low, n.high) * a;
  TokenLoss l;
  if (plain <= clipped) {
    l.loss = -plain;
    l.dratio = is_below_delta ? -a : 0;
  } else {
    l.loss = -clipped;
    l.dratio = t.ratio >= n.low && t.ratio <= n.high ? -a : 0;
  }
  if (a < 0 && l.loss > -n.dual_clip * a) {  // false when it is off
    l.loss = -n.dual_clip * a;
    l.dratio = 0;
  }
  return l;
}

}  // namespace tileloss::impl::policy
