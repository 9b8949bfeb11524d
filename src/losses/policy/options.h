// What the options of policy_loss must agree on, and its presets.
#pragma once

#include "losses/aggregation.h"
#include "losses/policy/kinds.h"
#include "schema/option_fields.h"

namespace tileloss::impl::policy {

using Options = tileloss_policy_loss_options;

inline void set_preset(std::string_view name, void* options) {
  Options& o = *static_cast<Options*>(options);
  for (const PolicyLossPreset& preset : kPolicyLossPresets) {
    if (name != preset.name) continue;
    o.kind = preset.kind;
    o.ratio_level = preset.ratio_level;
    o.aggregation = preset.aggregation;
  }
}

// Why the loss needs to know its sequences; null: it does not.
inline const char* needs_sequences(const Options& o) {
  if (o.advantage_level == TILELOSS_LEVEL_SEQUENCE) return "advantage_level = sequence";
  if (o.ratio_level == TILELOSS_LEVEL_SEQUENCE) return "ratio_level = sequence";
  if (o.sampler_correction != TILELOSS_SAMPLER_OFF && o.sampler_level == TILELOSS_LEVEL_SEQUENCE)
    return "sampler_level = sequence";
  if (!std::isnan(o.off_policy_threshold)) return "off_policy_threshold";
  if (o.kind == TILELOSS_POLICY_VESPO) return "kind = vespo";
  switch (static_cast<Aggregation>(o.aggregation)) {
    case Aggregation::kSeqMeanTokenMean: return "aggregation = seq_mean_token_mean";
    case Aggregation::kSeqMeanTokenSumNorm: return "aggregation = seq_mean_token_sum_norm";
    case Aggregation::kSeqMeanTokenSum: return "aggregation = seq_mean_token_sum";
    case Aggregation::kTokenMean:
    case Aggregation::kSum:
    case Aggregation::kNone: break;
  }
  return nullptr;
}

inline std::string check_tensors(const LossContext& c, const Options& o) {
  const char* const reason = needs_sequences(o);
  if (reason != nullptr && !c.sequences.is_given())
    return std::string("sequence_offsets: expected them, or sequence_length, as ") + reason + " needs sequences, got neither";
  const bool per_sequence = o.advantage_level == TILELOSS_LEVEL_SEQUENCE;
  const std::int64_t wanted = per_sequence ? c.sequences.count() : c.rows;
  if (!c.advantages) return "advantages: expected a float32 vector of size " + std::to_string(wanted) + ", got none";
  if (c.advantages.size() != wanted) {
    return "advantages.size: expected " + std::to_string(wanted) +
           " with advantage_level = " + (per_sequence ? "sequence" : "token") + ", got " + std::to_string(c.advantages.size());
  }
  if (may_differ(o.beta, 0) && !c.ref_logp) return "ref_logp: expected a float32 vector, as beta is not 0, got none";
  if (o.sampler_correction != TILELOSS_SAMPLER_OFF && !c.sampler_logp)
    return "sampler_logp: expected a float32 vector, as sampler_correction is on, got none";
  return {};
}

inline constexpr const char* kCapMissing = "epsilon_high: expected a number, as kind = cispo takes its cap from it, got none";

// NaN behind a pointer is "not given", too.
inline std::string check_numbers(const void* options) {
  const auto& o = *static_cast<const Options*>(options);
  return o.kind == TILELOSS_POLICY_CISPO && std::isnan(scalar_value(o.epsilon_high)) ? kCapMissing : "";
}

// The same for devices, where no number can be read before the call: the field's range in it, and what is said where the number
// is missing.
inline const char* limit_number(const Options& o, tileloss_field& field) {
  if (o.kind != TILELOSS_POLICY_CISPO || std::string_view(field.name) != "epsilon_high") return nullptr;
  field.has_absent = 0;
  return kCapMissing;
}

inline std::string check_options(const LossContext& context) {
  const auto& o = context.options_as<Options>();
  if (o.reserved != 0 || o.reserved2 != 0) return "options.reserved: expected 0, got another value";
  if (o.kind == TILELOSS_POLICY_CISPO && !is_given(o.epsilon_high)) return kCapMissing;
  if (o.kind == TILELOSS_POLICY_VESPO && o.sampler_correction != TILELOSS_SAMPLER_OFF &&
      o.sampler_level == TILELOSS_LEVEL_SEQUENCE)
    return "sampler_level: expected token with kind = vespo, got sequence";
  if (o.sampler_min > o.sampler_max)
    return "sampler_min: expected <= sampler_max = " + std::to_string(o.sampler_max) + ", got " + std::to_string(o.sampler_min);
  if (!std::isnan(o.entropy_quantile) && is_given(o.entropy_threshold))
    return "entropy_threshold: expected none together with entropy_quantile, got a number";
  if (o.aggregation == TILELOSS_AGGREGATION_NONE && may_differ(o.entropy_coef, 0) &&
      o.entropy_reduction == TILELOSS_ENTROPY_TOKEN_MEAN)
    return "entropy_reduction: expected as_loss with aggregation = none, got token_mean";
  const bool is_norm = o.aggregation == TILELOSS_SEQ_MEAN_TOKEN_SUM_NORM;
  if (is_norm && o.max_length < 0 && context.sequences.has_offsets())
    return "max_length: expected a number > 0, as aggregation = seq_mean_token_sum_norm divides by it, got none";
  return check_tensors(context, o);
}

}  // namespace tileloss::impl::policy
