// SAPO: a smooth gate in place of the clip. l = -(4 / tau) s A, s = sigmoid(tau (rho - 1)), tau by the sign of A;
// dl/drho = -4 s (1 - s) A. Source: "Soft Adaptive Policy Optimization" (2025), defaults as in TRL.
#pragma once

#include "losses/policy/token.h"

namespace tileloss::impl::policy {

TILELOSS_HOST_DEVICE inline TokenLoss sapo(const Token& t, const Numbers& n) {
  const double tau = t.advantage > 0 ? n.tau_pos : n.tau_neg;
  const double x = tau * (t.ratio - 1);
  const double e = std::exp(-std::fabs(x));  // s and 1 - s from e <= 1: neither overflows, neither cancels
  const double gate = (x >= 0 ? 1 : e) / (1 + e);
  const double slope = e / ((1 + e) * (1 + e));
  return {.loss = -(4 / tau) * gate * t.advantage, .dratio = -4 * slope * t.advantage, .dlogp = 0};
}

}  // namespace tileloss::impl::policy
