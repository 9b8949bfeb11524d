// VESPO: a gamma weight of the sequence's importance weight w, not differentiated: l = -stop(phi) A logp, with
//   phi = exp(lambda + k log w - lambda w), (k, lambda) by the sign of A, phi(1) = 1; 0 where that is not finite
//   log w = clamp(sum_t clamp(D_t, -20, 20) + sum_t clamp(log is_t, log 1e-8, 20), log 1e-8, 20), is_t the sampler ratio
// Source: TRL (GRPOTrainer.get_gamma_weights), whose constants these are.
#pragma once

#include "losses/policy/token.h"

namespace tileloss::impl::policy {

inline constexpr double kVespoLowest = -18.420680743952367;  // log 1e-8
inline constexpr double kVespoHighest = 20;

// A token's share of log w before the clamp of the sum.
TILELOSS_HOST_DEVICE inline double vespo_log_weight(double log_ratio, double sampler_ratio) {
  return clamp(log_ratio, -kVespoHighest, kVespoHighest) + clamp(std::log(sampler_ratio), kVespoLowest, kVespoHighest);
}

TILELOSS_HOST_DEVICE inline double vespo_phi(double log_weight_sum, double advantage, const tileloss_policy_loss_options& o) {
  const double k = advantage >= 0 ? o.vespo_k_pos : o.vespo_k_neg;
  const double given = advantage >= 0 ? o.vespo_lambda_pos : o.vespo_lambda_neg;
  const double lambda = given < 1e-4 ? 1e-4 : given;
  const double log_w = clamp(log_weight_sum, kVespoLowest, kVespoHighest);
  const double phi = std::exp(lambda + k * log_w - lambda * std::exp(log_w));
  return std::isfinite(phi) ? phi : 0;
}

TILELOSS_HOST_DEVICE inline TokenLoss vespo(const Token& t, const Numbers&) {
  const double weight = -t.phi * t.advantage;
  return {.loss = weight * t.logp, .dratio = 0, .dlogp = weight};
}

}  // namespace tileloss::impl::policy
