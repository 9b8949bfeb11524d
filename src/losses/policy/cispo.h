// CISPO: the clipped ratio weighs logp and is not differentiated: l = -stop(clip(rho, cap_low, cap)) A logp, dl/dlogp =
// -clip(rho) A. Source: MiniMax-M1 (2025); the raw cap as in TRL, 1 + epsilon_high and cap_low as in verl.
#pragma once

#include "losses/policy/token.h"

namespace tileloss::impl::policy {

TILELOSS_HOST_DEVICE inline TokenLoss cispo(const Token& t, const Numbers& n) {
  const double weight = -clamp(t.ratio, n.cap_low, n.cap) * t.advantage;
  return {.loss = weight * t.logp, .dratio = 0, .dlogp = weight};
}

}  // namespace tileloss::impl::policy
