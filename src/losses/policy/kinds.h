// The kinds of policy loss. A kind is a header, two cases here and a value of policy_kind in src/schema/table.toml.
#pragma once

#include <limits>

#include "losses/policy/cispo.h"
#include "losses/policy/clip.h"
#include "losses/policy/reinforce.h"
#include "losses/policy/sapo.h"
#include "losses/policy/vespo.h"

namespace tileloss::impl::policy {

// As an enum class, of which the compiler knows when a switch forgets one.
// generated: enums policy_kind
enum class PolicyKind { kClip, kCispo, kSapo, kVespo, kReinforce };
// end of generated

TILELOSS_HOST_DEVICE inline bool uses_ratio(tileloss_policy_kind kind) {
  switch (static_cast<PolicyKind>(kind)) {
    case PolicyKind::kClip:
    case PolicyKind::kCispo:
    case PolicyKind::kSapo: return true;
    case PolicyKind::kVespo:
    case PolicyKind::kReinforce: break;
  }
  return false;
}

// A token without advantage has neither loss nor gradient, at whatever ratio; NaN is passed on by every kind.
TILELOSS_HOST_DEVICE inline TokenLoss token_loss(tileloss_policy_kind kind, const Token& t, const Numbers& numbers) {
  if (std::isnan(t.logp) || (uses_ratio(kind) && std::isnan(t.ratio))) {
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    return {kNan, kNan, kNan};
  }
  if (t.advantage == 0) return {};
  switch (static_cast<PolicyKind>(kind)) {
    case PolicyKind::kClip: return clip(t, numbers);
    case PolicyKind::kCispo: return cispo(t, numbers);
    case PolicyKind::kSapo: return sapo(t, numbers);
    case PolicyKind::kVespo: return vespo(t, numbers);
    case PolicyKind::kReinforce: break;
  }
  return reinforce(t, numbers);
}

}  // namespace tileloss::impl::policy
