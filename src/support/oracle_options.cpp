// The options of a call as the oracle has them; what is generated comes from src/schema/table.toml.
#include "support/oracle_options.h"

#include <type_traits>

namespace tileloss::tools {
namespace {

// A number, choice or flag; the oracle's choices are in the ABI's order.
template <class From, class To>
void copy(const From& from, To& to) {
  if constexpr (std::is_same_v<From, tileloss_scalar>) {
    to = from.pointer != nullptr ? static_cast<double>(*from.pointer) : from.value;
  } else {
    to = static_cast<To>(from);
  }
}

template <class From>
oracle::DistillationOptions rows_of(const From& from) {
  oracle::DistillationOptions to;
  to.student = make_transform(from.logit);
  to.ignore_index = from.logit.ignore_index;
  return to;
}

}  // namespace

oracle::Transform make_transform(const tileloss_logit_options& from) {
  oracle::Transform to;
  copy(from.logit_scale, to.logit_scale);
  copy(from.softcap, to.softcap);
  copy(from.temperature, to.temperature);
  copy(from.temperature_on, to.temperature_on);
  return to;
}

oracle::CrossEntropyOptions make_oracle_options(const tileloss_cross_entropy_options& from) {
  oracle::CrossEntropyOptions to;
  to.transform = make_transform(from.logit);
  to.ignore_index = from.logit.ignore_index;
  // generated: copies of cross_entropy
  copy(from.label_smoothing, to.label_smoothing);
  copy(from.z_loss, to.z_loss);
  copy(from.num_items, to.num_items);
  copy(from.reduction, to.reduction);
  // end of generated
  return to;
}

oracle::PolicyOptions make_oracle_options(const tileloss_policy_loss_options& from, std::int64_t sequence_length) {
  oracle::PolicyOptions to;
  // generated: copies of policy_loss but max_length
  copy(from.kind, to.kind);
  copy(from.ratio_level, to.ratio_level);
  copy(from.aggregation, to.aggregation);
  copy(from.advantage_level, to.advantage_level);
  copy(from.cispo_cap, to.cispo_cap);
  copy(from.epsilon_low, to.epsilon_low);
  copy(from.epsilon_high, to.epsilon_high);
  copy(from.delta, to.delta);
  copy(from.dual_clip, to.dual_clip);
  copy(from.cap_low, to.cap_low);
  copy(from.tau_pos, to.tau_pos);
  copy(from.tau_neg, to.tau_neg);
  copy(from.vespo_k_pos, to.vespo_k_pos);
  copy(from.vespo_lambda_pos, to.vespo_lambda_pos);
  copy(from.vespo_k_neg, to.vespo_k_neg);
  copy(from.vespo_lambda_neg, to.vespo_lambda_neg);
  copy(from.log_ratio_clamp, to.log_ratio_clamp);
  copy(from.sampler_correction, to.sampler_correction);
  copy(from.sampler_level, to.sampler_level);
  copy(from.sampler_min, to.sampler_min);
  copy(from.sampler_max, to.sampler_max);
  copy(from.off_policy_threshold, to.off_policy_threshold);
  copy(from.entropy_quantile, to.entropy_quantile);
  copy(from.entropy_threshold, to.entropy_threshold);
  copy(from.beta, to.beta);
  copy(from.kl_estimator, to.kl_estimator);
  copy(from.kl_importance, to.kl_importance);
  copy(from.kl_log_ratio_clamp, to.kl_log_ratio_clamp);
  copy(from.kl_clamp, to.kl_clamp);
  copy(from.entropy_coef, to.entropy_coef);
  copy(from.entropy_reduction, to.entropy_reduction);
  copy(from.num_items, to.num_items);
  // end of generated
  to.max_length = from.max_length > 0 ? from.max_length : sequence_length;
  return to;
}

oracle::DistillationOptions make_oracle_options(const tileloss_distillation_options& from) {
  oracle::DistillationOptions to = rows_of(from);
  // generated: copies of distillation but teacher_logit_scale, teacher_softcap, teacher_temperature
  copy(from.divergence, to.divergence);
  copy(from.reduction, to.reduction);
  copy(from.beta, to.beta);
  copy(from.label_weight, to.label_weight);
  copy(from.divergence_weight, to.divergence_weight);
  copy(from.label_temperature, to.label_temperature);
  copy(from.num_items, to.num_items);
  copy(from.scale_by_temperature_squared, to.scale_by_temperature_squared);
  // end of generated
  copy(from.teacher_logit_scale, to.teacher.logit_scale);
  copy(from.teacher_softcap, to.teacher.softcap);
  copy(from.teacher_temperature, to.teacher.temperature);
  return to;
}

oracle::DistillationOptions make_oracle_options(const tileloss_sparse_distillation_options& from) {
  oracle::DistillationOptions to = rows_of(from);
  // generated: copies of sparse_distillation but tail
  copy(from.divergence, to.divergence);
  copy(from.reduction, to.reduction);
  copy(from.beta, to.beta);
  copy(from.label_weight, to.label_weight);
  copy(from.divergence_weight, to.divergence_weight);
  copy(from.label_temperature, to.label_temperature);
  copy(from.num_items, to.num_items);
  copy(from.scale_by_temperature_squared, to.scale_by_temperature_squared);
  // end of generated
  return to;
}

oracle::DistillationOptions make_oracle_options(const tileloss_soft_cross_entropy_options& from) {
  oracle::DistillationOptions to = rows_of(from);
  // generated: copies of soft_cross_entropy but label_smoothing
  copy(from.num_items, to.num_items);
  copy(from.reduction, to.reduction);
  // end of generated
  return to;
}

}  // namespace tileloss::tools
