// The options of a call as the oracle has them; what is generated comes from src/schema/table.toml.
#include "support/oracle_options.h"

#include <type_traits>

namespace tileloss::tools {
namespace {

// A number, choice or flag; the oracle's choices are in the ABI's order.
template <class From, class To>
void hand_over(const From& from, To& to) {
  if constexpr (std::is_same_v<From, tileloss_scalar>) {
    to = from.pointer != nullptr ? static_cast<double>(*from.pointer) : from.value;
  } else {
    to = static_cast<To>(from);
  }
}

template <class From>
reference::DistillationOptions rows_of(const From& from) {
  reference::DistillationOptions to;
  to.student = make_transform(from.logit);
  to.ignore_index = from.logit.ignore_index;
  return to;
}

static_assert(static_cast<int>(reference::Tail::kIgnore) == TILELOSS_TAIL_IGNORE);
static_assert(static_cast<int>(reference::Reduction::kSum) == TILELOSS_REDUCTION_SUM);
static_assert(static_cast<int>(reference::TemperatureOn::kLogprob) == TILELOSS_TEMPERATURE_ON_LOGPROB);

}  // namespace

reference::Transform make_transform(const tileloss_logit_options& from) {
  reference::Transform to;
  hand_over(from.logit_scale, to.logit_scale);
  hand_over(from.softcap, to.softcap);
  hand_over(from.temperature, to.temperature);
  hand_over(from.temperature_on, to.temperature_on);
  return to;
}

reference::CrossEntropyOptions make_oracle_options(const tileloss_cross_entropy_options& from) {
  reference::CrossEntropyOptions to;
  to.transform = make_transform(from.logit);
  to.ignore_index = from.logit.ignore_index;
  // generated: copies of cross_entropy
  hand_over(from.label_smoothing, to.label_smoothing);
  hand_over(from.z_loss, to.z_loss);
  hand_over(from.num_items, to.num_items);
  hand_over(from.reduction, to.reduction);
  // end of generated
  return to;
}

reference::PolicyOptions make_oracle_options(const tileloss_policy_loss_options& from, std::int64_t sequence_length) {
  reference::PolicyOptions to;
  // generated: copies of policy_loss but max_length
  hand_over(from.kind, to.kind);
  hand_over(from.ratio_level, to.ratio_level);
  hand_over(from.aggregation, to.aggregation);
  hand_over(from.advantage_level, to.advantage_level);
  hand_over(from.cispo_cap, to.cispo_cap);
  hand_over(from.epsilon_low, to.epsilon_low);
  hand_over(from.epsilon_high, to.epsilon_high);
  hand_over(from.delta, to.delta);
  hand_over(from.dual_clip, to.dual_clip);
  hand_over(from.cap_low, to.cap_low);
  hand_over(from.tau_pos, to.tau_pos);
  hand_over(from.tau_neg, to.tau_neg);
  hand_over(from.vespo_k_pos, to.vespo_k_pos);
  hand_over(from.vespo_lambda_pos, to.vespo_lambda_pos);
  hand_over(from.vespo_k_neg, to.vespo_k_neg);
  hand_over(from.vespo_lambda_neg, to.vespo_lambda_neg);
  hand_over(from.log_ratio_clamp, to.log_ratio_clamp);
  hand_over(from.sampler_correction, to.sampler_correction);
  hand_over(from.sampler_level, to.sampler_level);
  hand_over(from.sampler_min, to.sampler_min);
  hand_over(from.sampler_max, to.sampler_max);
  hand_over(from.off_policy_threshold, to.off_policy_threshold);
  hand_over(from.entropy_quantile, to.entropy_quantile);
  hand_over(from.entropy_threshold, to.entropy_threshold);
  hand_over(from.beta, to.beta);
  hand_over(from.kl_estimator, to.kl_estimator);
  hand_over(from.kl_importance, to.kl_importance);
  hand_over(from.kl_log_ratio_clamp, to.kl_log_ratio_clamp);
  hand_over(from.kl_clamp, to.kl_clamp);
  hand_over(from.entropy_coef, to.entropy_coef);
  hand_over(from.entropy_reduction, to.entropy_reduction);
  hand_over(from.num_items, to.num_items);
  // end of generated
  to.max_length = from.max_length > 0 ? from.max_length : sequence_length;
  return to;
}

reference::DistillationOptions make_oracle_options(const tileloss_distillation_options& from) {
  reference::DistillationOptions to = rows_of(from);
  // generated: copies of distillation but teacher_logit_scale, teacher_softcap, teacher_temperature
  hand_over(from.divergence, to.divergence);
  hand_over(from.reduction, to.reduction);
  hand_over(from.beta, to.beta);
  hand_over(from.alpha, to.alpha);
  hand_over(from.label_temperature, to.label_temperature);
  hand_over(from.num_items, to.num_items);
  hand_over(from.scale_by_temperature_squared, to.scale_by_temperature_squared);
  // end of generated
  hand_over(from.teacher_logit_scale, to.teacher.logit_scale);
  hand_over(from.teacher_softcap, to.teacher.softcap);
  hand_over(from.teacher_temperature, to.teacher.temperature);
  return to;
}

reference::DistillationOptions make_oracle_options(const tileloss_sparse_distillation_options& from) {
  reference::DistillationOptions to = rows_of(from);
  // generated: copies of sparse_distillation but tail
  hand_over(from.divergence, to.divergence);
  hand_over(from.reduction, to.reduction);
  hand_over(from.beta, to.beta);
  hand_over(from.alpha, to.alpha);
  hand_over(from.label_temperature, to.label_temperature);
  hand_over(from.num_items, to.num_items);
  hand_over(from.scale_by_temperature_squared, to.scale_by_temperature_squared);
  // end of generated
  return to;
}

reference::DistillationOptions make_oracle_options(const tileloss_soft_cross_entropy_options& from) {
  reference::DistillationOptions to = rows_of(from);
  // generated: copies of soft_cross_entropy but label_smoothing
  hand_over(from.num_items, to.num_items);
  hand_over(from.reduction, to.reduction);
  // end of generated
  return to;
}

}  // namespace tileloss::tools
