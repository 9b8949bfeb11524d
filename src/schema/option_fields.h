// The options of every function as fields, in the order of tileloss_field's members; presets; metrics.
#pragma once

#include "schema/fields.h"

namespace tileloss::impl {

// clang-format off
// generated: fields, by ./dev generate from src/schema/table.toml
inline constexpr tileloss_field kLogitFields[] = {
    {"logit_scale", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_logprobs_options, logit.logit_scale), 1, 0, kUnbounded, 1, 0, nullptr, nullptr, 0},
    {"softcap", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_logprobs_options, logit.softcap), 0, 0, kUnbounded, 0, 0, nullptr, nullptr, 0},
    {"temperature", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_logprobs_options, logit.temperature), 1, 0, kUnbounded, 1, 0, nullptr, nullptr, 0},
    {"temperature_on", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_logprobs_options, logit.temperature_on), 0, 0, 1, 0, 0, "logits|logprob", nullptr, 0},
    {"valid_vocab", TILELOSS_FIELD_INT64, 0, offsetof(tileloss_logprobs_options, logit.valid_vocab), -1, 1, 0x1p62, 0, 1, nullptr, nullptr, 0},
    {"ignore_index", TILELOSS_FIELD_INT64, 0, offsetof(tileloss_logprobs_options, logit.ignore_index), -100, -0x1p62, 0x1p62, 0, 0, nullptr, nullptr, 0},
    {"vocab_start", TILELOSS_FIELD_INT64, 0, offsetof(tileloss_logprobs_options, logit.vocab_start), 0, 0, 0x1p62, 0, 0, nullptr, nullptr, 0},
    {"vocab_total", TILELOSS_FIELD_INT64, 0, offsetof(tileloss_logprobs_options, logit.vocab_total), -1, 1, 0x1p62, 0, 1, nullptr, nullptr, 0},
};

inline constexpr tileloss_field kLinearFields[] = {
    {"compute_dtype", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_logprobs_options, linear.compute_dtype), 0, 0, 2, 0, 0, "auto|float32|bfloat16", nullptr, 0},
    {"accumulate", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_logprobs_options, linear.accumulate), 0, 0, 1, 0, 0, "false|true", nullptr, 0},
};

inline constexpr tileloss_field kCrossEntropyFields[] = {
    {"label_smoothing", TILELOSS_FIELD_DOUBLE, TILELOSS_STATE_SMOOTHING_SUM, offsetof(tileloss_cross_entropy_options, label_smoothing), 0, 0, 1, 0, 0, nullptr, nullptr, 0},
    {"z_loss", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_cross_entropy_options, z_loss), 0, 0, kUnbounded, 0, 0, nullptr, nullptr, 0},
    {"num_items", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_cross_entropy_options, num_items), kNotGiven, 0, kUnbounded, 0, 1, nullptr, "reduction", 4},
    {"reduction", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_cross_entropy_options, reduction), 2, 0, 2, 0, 0, "none|sum|mean", nullptr, 0},
};

inline constexpr tileloss_field kPolicyLossFields[] = {
    {"kind", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_policy_loss_options, kind), 0, 0, 4, 0, 0, "clip|cispo|sapo|vespo|reinforce", nullptr, 0},
    {"ratio_level", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_policy_loss_options, ratio_level), 0, 0, 1, 0, 0, "token|sequence", nullptr, 0},
    {"aggregation", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_policy_loss_options, aggregation), 0, 0, 5, 0, 0, "seq_mean_token_mean|token_mean|seq_mean_token_sum_norm|seq_mean_token_sum|sum|none", nullptr, 0},
    {"advantage_level", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_policy_loss_options, advantage_level), 1, 0, 1, 0, 0, "token|sequence", nullptr, 0},
    {"cispo_cap", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_policy_loss_options, cispo_cap), 0, 0, 1, 0, 0, "raw|one_plus", "kind", 2},
    {"epsilon_low", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_policy_loss_options, epsilon_low), 0.2, 0, kUnbounded, 0, 0, nullptr, "kind", 1},
    {"epsilon_high", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_policy_loss_options, epsilon_high), kNotGiven, 0, kUnbounded, 0, 1, nullptr, "kind", 3},
    {"delta", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_policy_loss_options, delta), kNotGiven, 0, kUnbounded, 1, 1, nullptr, "kind", 1},
    {"dual_clip", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_policy_loss_options, dual_clip), kNotGiven, 1, kUnbounded, 1, 1, nullptr, "kind", 1},
    {"cap_low", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_policy_loss_options, cap_low), kNotGiven, 0, kUnbounded, 0, 1, nullptr, "kind", 2},
    {"tau_pos", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, tau_pos), 1, 0, kUnbounded, 1, 0, nullptr, "kind", 4},
    {"tau_neg", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, tau_neg), 1.05, 0, kUnbounded, 1, 0, nullptr, "kind", 4},
    {"vespo_k_pos", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, vespo_k_pos), 2, 0, kUnbounded, 0, 0, nullptr, "kind", 8},
    {"vespo_lambda_pos", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, vespo_lambda_pos), 3, 0, kUnbounded, 0, 0, nullptr, "kind", 8},
    {"vespo_k_neg", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, vespo_k_neg), 3, 0, kUnbounded, 0, 0, nullptr, "kind", 8},
    {"vespo_lambda_neg", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, vespo_lambda_neg), 2, 0, kUnbounded, 0, 0, nullptr, "kind", 8},
    {"log_ratio_clamp", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, log_ratio_clamp), kNotGiven, 0, kUnbounded, 1, 1, nullptr, nullptr, 0},
    {"sampler_correction", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_policy_loss_options, sampler_correction), 0, 0, 2, 0, 0, "off|truncate|mask", nullptr, 0},
    {"sampler_level", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_policy_loss_options, sampler_level), 0, 0, 1, 0, 0, "token|sequence", "sampler_correction", 6},
    {"sampler_min", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, sampler_min), kNotGiven, 0, kUnbounded, 0, 1, nullptr, "sampler_correction", 6},
    {"sampler_max", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, sampler_max), kNotGiven, 0, kUnbounded, 0, 1, nullptr, "sampler_correction", 6},
    {"off_policy_threshold", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, off_policy_threshold), kNotGiven, -kUnbounded, kUnbounded, 0, 1, nullptr, nullptr, 0},
    {"entropy_quantile", TILELOSS_FIELD_DOUBLE, TILELOSS_STATE_ENTROPY_SUM, offsetof(tileloss_policy_loss_options, entropy_quantile), kNotGiven, 0, 1, 1, 1, nullptr, nullptr, 0},
    {"entropy_threshold", TILELOSS_FIELD_SCALAR, TILELOSS_STATE_ENTROPY_SUM, offsetof(tileloss_policy_loss_options, entropy_threshold), kNotGiven, -kUnbounded, kUnbounded, 0, 1, nullptr, nullptr, 0},
    {"beta", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_policy_loss_options, beta), 0, 0, kUnbounded, 0, 0, nullptr, nullptr, 0},
    {"kl_estimator", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_policy_loss_options, kl_estimator), 2, 0, 2, 0, 0, "k1|k2|k3", nullptr, 0},
    {"kl_importance", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_policy_loss_options, kl_importance), 0, 0, 1, 0, 0, "false|true", nullptr, 0},
    {"kl_log_ratio_clamp", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, kl_log_ratio_clamp), kNotGiven, 0, kUnbounded, 1, 1, nullptr, nullptr, 0},
    {"kl_clamp", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_policy_loss_options, kl_clamp), kNotGiven, 0, kUnbounded, 1, 1, nullptr, nullptr, 0},
    {"entropy_coef", TILELOSS_FIELD_SCALAR, TILELOSS_STATE_ENTROPY_SUM, offsetof(tileloss_policy_loss_options, entropy_coef), 0, -kUnbounded, kUnbounded, 0, 0, nullptr, nullptr, 0},
    {"entropy_reduction", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_policy_loss_options, entropy_reduction), 0, 0, 1, 0, 0, "token_mean|as_loss", nullptr, 0},
    {"num_items", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_policy_loss_options, num_items), kNotGiven, 0, kUnbounded, 0, 1, nullptr, "aggregation", 18},
    {"max_length", TILELOSS_FIELD_INT64, 0, offsetof(tileloss_policy_loss_options, max_length), -1, 1, 0x1p62, 0, 1, nullptr, "aggregation", 4},
};

inline constexpr const char* kPolicyLossMetricNames = "kl|entropy|clip_low_fraction|clip_high_fraction|clip_fraction|cispo_clip_fraction|ratio_mean|sampler_ratio_mean|sampler_ratio_min|sampler_ratio_max|phi_mean|dropped_sequences|tokens";

struct PolicyLossPreset {
  const char* name;
  tileloss_policy_kind kind;
  tileloss_level ratio_level;
  tileloss_aggregation aggregation;
};
inline constexpr PolicyLossPreset kPolicyLossPresets[] = {
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
inline constexpr const char* kPolicyLossPresetNames = "grpo|bnpo|dr_grpo|dapo|cispo|sapo|gspo|luspo|vespo|reinforce";

inline constexpr tileloss_field kDistillationFields[] = {
    {"divergence", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_distillation_options, divergence), 0, 0, 6, 0, 0, "forward_kl|reverse_kl|jsd|jeffreys|skew_forward_kl|skew_reverse_kl|total_variation", nullptr, 0},
    {"reduction", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_distillation_options, reduction), 2, 0, 2, 0, 0, "none|sum|mean", nullptr, 0},
    {"beta", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_distillation_options, beta), 0.5, 0, 1, 0, 0, nullptr, "divergence", 52},
    {"label_weight", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_distillation_options, label_weight), 0, 0, kUnbounded, 0, 0, nullptr, nullptr, 0},
    {"divergence_weight", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_distillation_options, divergence_weight), 1, 0, kUnbounded, 0, 0, nullptr, nullptr, 0},
    {"label_temperature", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_distillation_options, label_temperature), kNotGiven, 0, kUnbounded, 1, 1, nullptr, nullptr, 0},
    {"teacher_logit_scale", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_distillation_options, teacher_logit_scale), kNotGiven, 0, kUnbounded, 1, 1, nullptr, nullptr, 0},
    {"teacher_softcap", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_distillation_options, teacher_softcap), kNotGiven, 0, kUnbounded, 0, 1, nullptr, nullptr, 0},
    {"teacher_temperature", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_distillation_options, teacher_temperature), kNotGiven, 0, kUnbounded, 1, 1, nullptr, nullptr, 0},
    {"num_items", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_distillation_options, num_items), kNotGiven, 0, kUnbounded, 0, 1, nullptr, "reduction", 4},
    {"scale_by_temperature_squared", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_distillation_options, scale_by_temperature_squared), 0, 0, 1, 0, 0, "false|true", nullptr, 0},
};

inline constexpr tileloss_field kSoftCrossEntropyFields[] = {
    {"label_smoothing", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_soft_cross_entropy_options, label_smoothing), 0, 0, 1, 0, 0, nullptr, nullptr, 0},
    {"num_items", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_soft_cross_entropy_options, num_items), kNotGiven, 0, kUnbounded, 0, 1, nullptr, "reduction", 4},
    {"reduction", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_soft_cross_entropy_options, reduction), 2, 0, 2, 0, 0, "none|sum|mean", nullptr, 0},
};

inline constexpr tileloss_field kSparseDistillationFields[] = {
    {"divergence", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_sparse_distillation_options, divergence), 0, 0, 6, 0, 0, "forward_kl|reverse_kl|jsd|jeffreys|skew_forward_kl|skew_reverse_kl|total_variation", nullptr, 0},
    {"reduction", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_sparse_distillation_options, reduction), 2, 0, 2, 0, 0, "none|sum|mean", nullptr, 0},
    {"beta", TILELOSS_FIELD_DOUBLE, 0, offsetof(tileloss_sparse_distillation_options, beta), 0.5, 0, 1, 0, 0, nullptr, "divergence", 52},
    {"label_weight", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_sparse_distillation_options, label_weight), 0, 0, kUnbounded, 0, 0, nullptr, nullptr, 0},
    {"divergence_weight", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_sparse_distillation_options, divergence_weight), 1, 0, kUnbounded, 0, 0, nullptr, nullptr, 0},
    {"label_temperature", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_sparse_distillation_options, label_temperature), kNotGiven, 0, kUnbounded, 1, 1, nullptr, nullptr, 0},
    {"num_items", TILELOSS_FIELD_SCALAR, 0, offsetof(tileloss_sparse_distillation_options, num_items), kNotGiven, 0, kUnbounded, 0, 1, nullptr, "reduction", 4},
    {"scale_by_temperature_squared", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_sparse_distillation_options, scale_by_temperature_squared), 0, 0, 1, 0, 0, "false|true", nullptr, 0},
    {"tail", TILELOSS_FIELD_CHOICE, 0, offsetof(tileloss_sparse_distillation_options, tail), 0, 0, 2, 0, 0, "lump|ignore|renormalise", nullptr, 0},
};
// end of generated
// clang-format on

}  // namespace tileloss::impl
