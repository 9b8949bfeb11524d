// REINFORCE (GPG): l = -A logp. Source: Williams 1992; GPG 2025.
#pragma once

#include "losses/policy/token.h"

namespace tileloss::impl::policy {

TILELOSS_HOST_DEVICE inline TokenLoss reinforce(const Token& t, const Numbers&) {
  return {.loss = -t.advantage * t.logp, .dratio = 0, .dlogp = -t.advantage};
}

}  // namespace tileloss::impl::policy
