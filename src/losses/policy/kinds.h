// The kinds of policy loss. A kind is a header, a case here and a value of policy_kind in src/schema/table.toml.
#ifndef TILELOSS_LOSSES_POLICY_KINDS_H_
#define TILELOSS_LOSSES_POLICY_KINDS_H_

#include <limits>

#include "losses/policy/cispo.h"
#include "losses/policy/clip.h"
#include "losses/policy/reinforce.h"
#include "losses/policy/sapo.h"
#include "losses/policy/vespo.h"

namespace tileloss::impl::policy {

TILELOSS_HOST_DEVICE inline bool uses_ratio(tileloss_policy_kind kind) {
  return kind == TILELOSS_POLICY_CLIP || kind == TILELOSS_POLICY_CISPO || kind == TILELOSS_POLICY_SAPO;
}

// A token without advantage has neither loss nor gradient, at whatever ratio; NaN is passed on by every kind.
TILELOSS_HOST_DEVICE inline TokenLoss token_loss(tileloss_policy_kind kind, const Token& t, const Numbers& numbers) {
  if (std::isnan(t.logp) || (uses_ratio(kind) && std::isnan(t.ratio))) {
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    return {kNan, kNan, kNan};
  }
  if (t.advantage == 0) return {};
  switch (kind) {
    case TILELOSS_POLICY_CLIP: return clip(t, numbers);
    case TILELOSS_POLICY_CISPO: return cispo(t, numbers);
    case TILELOSS_POLICY_SAPO: return sapo(t, numbers);
    case TILELOSS_POLICY_VESPO: return vespo(t, numbers);
    default: return reinforce(t, numbers);
  }
}

}  // namespace tileloss::impl::policy

#endif  // TILELOSS_LOSSES_POLICY_KINDS_H_
