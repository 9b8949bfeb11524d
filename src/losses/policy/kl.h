// Estimators of the KL to the reference policy from one token, d = ref - logp, with the optional clamps of d and of the estimate:
//   k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1;  dk1/dlogp = 1, dk2/dlogp = -d, dk3/dlogp = 1 - exp(d); 0 beyond a clamp. A
// value of NaN (d is NaN, or k3 of an infinite d) has a gradient of NaN.
// Source: Schulman 2020, "Approximating KL divergence"; the clamps as in verl.
#pragma once

#include "losses/policy/token.h"

namespace tileloss::impl::policy {

// generated: enums kl_estimator
enum class KlEstimator { kK1, kK2, kK3 };
// end of generated

struct Kl {
  double value = 0;
  double dlogp = 0;
};

TILELOSS_HOST_DEVICE inline Kl estimate_kl(double difference, const tileloss_policy_loss_options& o) {
  const bool is_clamped = std::fabs(difference) > o.kl_log_ratio_clamp;  // false when it is off
  const double d = is_clamped ? std::copysign(o.kl_log_ratio_clamp, difference) : difference;
  Kl kl;
  switch (static_cast<KlEstimator>(o.kl_estimator)) {
    case KlEstimator::kK1: kl = {-d, 1}; break;
    case KlEstimator::kK2: kl = {d * d / 2, -d}; break;
    case KlEstimator::kK3: kl = {std::expm1(d) - d, -std::expm1(d)}; break;
  }
  if (is_clamped) kl.dlogp = 0;
  if (std::isnan(kl.value)) kl.dlogp = kl.value;
  if (std::fabs(kl.value) > o.kl_clamp) kl = {std::copysign(o.kl_clamp, kl.value), 0};
  return kl;
}

}  // namespace tileloss::impl::policy
