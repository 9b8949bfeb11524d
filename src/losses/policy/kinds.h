// The kinds of policy loss, in the order of tileloss_policy_kind, and the presets built on them. A kind is a header, a name and a
// case here.
#ifndef TILELOSS_LOSSES_POLICY_KINDS_H_
#define TILELOSS_LOSSES_POLICY_KINDS_H_

#include <limits>
#include <string_view>

#include "losses/policy/cispo.h"
#include "losses/policy/clip.h"
#include "losses/policy/reinforce.h"
#include "losses/policy/sapo.h"
#include "losses/policy/vespo.h"

namespace tileloss::impl::policy {

inline constexpr const char* kKindNames = "clip|cispo|sapo|vespo|reinforce";

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

struct Preset {
  std::string_view name;
  tileloss_policy_kind kind;
  tileloss_level ratio_level;
  tileloss_aggregation aggregation;
};

inline constexpr Preset kPresets[] = {
    {"grpo", TILELOSS_POLICY_CLIP, TILELOSS_LEVEL_TOKEN, TILELOSS_SEQ_MEAN_TOKEN_MEAN},
    {"bnpo", TILELOSS_POLICY_CLIP, TILELOSS_LEVEL_TOKEN, TILELOSS_TOKEN_MEAN},
    {"dr_grpo", TILELOSS_POLICY_CLIP, TILELOSS_LEVEL_TOKEN, TILELOSS_SEQ_MEAN_TOKEN_SUM_NORM},
    {"dapo", TILELOSS_POLICY_CLIP, TILELOSS_LEVEL_TOKEN, TILELOSS_TOKEN_MEAN},
    {"cispo", TILELOSS_POLICY_CISPO, TILELOSS_LEVEL_TOKEN, TILELOSS_TOKEN_MEAN},
    {"sapo", TILELOSS_POLICY_SAPO, TILELOSS_LEVEL_TOKEN, TILELOSS_SEQ_MEAN_TOKEN_MEAN},
    {"gspo", TILELOSS_POLICY_CLIP, TILELOSS_LEVEL_SEQUENCE, TILELOSS_SEQ_MEAN_TOKEN_MEAN},
    {"luspo", TILELOSS_POLICY_CLIP, TILELOSS_LEVEL_SEQUENCE, TILELOSS_SEQ_MEAN_TOKEN_SUM},
    {"vespo", TILELOSS_POLICY_VESPO, TILELOSS_LEVEL_TOKEN, TILELOSS_TOKEN_MEAN},
    {"reinforce", TILELOSS_POLICY_REINFORCE, TILELOSS_LEVEL_TOKEN, TILELOSS_TOKEN_MEAN},
};
inline constexpr const char* kPresetNames = "grpo|bnpo|dr_grpo|dapo|cispo|sapo|gspo|luspo|vespo|reinforce";

}  // namespace tileloss::impl::policy

#endif  // TILELOSS_LOSSES_POLICY_KINDS_H_
