// logprobs: no loss of its own. logp_i = log softmax(z_i)_y, and the gradient of whatever is built on logp, lse, the entropy H
// and the mean logit M over C classes:
//   dL/dz_j = g_logp [j = y] + p_j (-g_logp + g_lse - g_H (H + log p_j)) + g_M / C
// Of several labels y_k: sum_k g_k [j = y_k] - p_j sum_k g_k. The row's target is that of the likeliest label; what the others
// add to their own columns is the sweeps'.
// With temperature_on = logprob: logp' = logp / T, so g_logp' / T stands for g_logp.
#pragma once

#include "losses/loss.h"

namespace tileloss::impl {

class Logprobs {
 public:
  explicit Logprobs(const LossContext& context) : context_(context) {}

  std::uint32_t backward_sums() const { return context_.entropy_grad ? kEntropySum : kNoSums; }

  TILELOSS_HOST_DEVICE RowResult row(std::int64_t i, const TargetStats& stats) const {
    const bool has_several = context_.labels.per_row() > 1 && context_.logp_grad;
    double target = has_several ? 0 : context_.logp_grad[i] / context_.logp_divisor(), others = 0;
    for (std::int64_t k = 0; has_several && k < context_.labels.per_row(); ++k) {
      const std::int64_t likeliest = stats.labels.likeliest;
      const bool is_target = likeliest >= 0 && context_.labels.at(i, k) == context_.labels.at(i, likeliest);
      (is_target ? target : others) += context_.logp_grad_at(i, k);
    }
    RowResult result{0, coefficients_from_upstream(target, context_.lse_grad[i], context_.entropy_grad[i], stats.entropy)};
    if (has_several) result.coefficients.prob_plus_target -= others;
    result.coefficients.uniform = context_.mean_logit_grad[i] / stats.classes.count_of(static_cast<double>(context_.classes));
    return result;
  }

  static LossInfo info() {
    return {.name = "logprobs",
            .is_loss = false,
            .options_size = sizeof(tileloss_logprobs_options),
            .tensors = kRowGrads,
            .make = &make_stage<Logprobs>,
            .takes_several_labels = true};
  }

 private:
  LossContext context_;
};

}  // namespace tileloss::impl
