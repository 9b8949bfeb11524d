#include "oracle/policy.h"

#include <algorithm>
#include <cmath>

#include "oracle/policy_evaluation.h"

namespace tileloss::oracle {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

}  // namespace

// ------------------------------------------------------------------------------------------------------- a token's loss

Dual PolicyEvaluation::ratio(std::size_t i) const {
  return exp(variable(sequence_ratio() ? sequences_[tokens_[i].sequence].log_ratio : tokens_[i].log_ratio, kLogRatio));
}

double PolicyEvaluation::detached_ratio(std::size_t i) const {
  return std::exp(sequence_ratio() ? sequences_[tokens_[i].sequence].detached_log_ratio : tokens_[i].detached_log_ratio);
}

Dual PolicyEvaluation::clip_term(std::size_t i) {
  const double advantage = tokens_[i].advantage;
  const Dual rho = ratio(i);
  const Dual capped = is_given(opt_.delta) ? min(rho, {opt_.delta, {}}) : rho;
  Dual loss = -min(advantage * capped, advantage * clamp(rho, low(), high()));
  if (is_given(opt_.dual_clip) && advantage < 0.0) loss = min(loss, {-opt_.dual_clip * advantage, {}});
  for (const double bound : {low(), high(), opt_.delta, opt_.dual_clip}) decide_ratio(i, bound);
  return loss;
}

Dual PolicyEvaluation::policy_term(std::size_t i) {
  const double advantage = tokens_[i].advantage;
  const bool nan = std::isnan(logp_[i]) || (has_ratio() && std::isnan(ratio(i).value));
  if (advantage == 0.0) return nan ? kNan * variable(0.0, kLogp) : Dual{};
  const Dual logp = variable(logp_[i], kLogp);
  switch (opt_.kind) {
    case PolicyKind::kClip: return clip_term(i);
    case PolicyKind::kCispo: {
      for (const double bound : {opt_.cap_low, cispo_cap()}) decide_ratio(i, bound);
      return -(clamped(detached_ratio(i), opt_.cap_low, cispo_cap()) * advantage) * logp;
    }
    case PolicyKind::kSapo: {
      const double tau = advantage > 0.0 ? opt_.tau_pos : opt_.tau_neg;
      return -4.0 / tau * advantage * sigmoid(tau * (ratio(i) + -1.0));
    }
    case PolicyKind::kVespo: return -tokens_[i].phi * advantage * logp;
    case PolicyKind::kReinforce: return -advantage * logp;
  }
  return {};
}

Dual PolicyEvaluation::kl_term(std::size_t i) {
  const Dual unclamped = Dual{in_.ref_logp[i], {}} - variable(logp_[i], kLogp);
  const Dual d = clamp(unclamped, -opt_.kl_log_ratio_clamp, opt_.kl_log_ratio_clamp);
  decide(i, std::fabs(unclamped.value), opt_.kl_log_ratio_clamp);
  Dual kl = -d;
  if (opt_.kl_estimator == KlEstimator::kK2) kl = 0.5 * (d * d);
  if (opt_.kl_estimator == KlEstimator::kK3) kl = expm1(d) - d;
  decide(i, std::fabs(kl.value), opt_.kl_clamp);
  kl = clamp(kl, -opt_.kl_clamp, opt_.kl_clamp);
  if (std::isnan(kl.value)) kl.slopes[kLogp] = kNan;  // k1's is a constant
  if (!opt_.kl_importance) return kl;
  Dual product = ratio(i) * kl;
  if (std::isnan(product.value)) product.slopes[kLogp] = product.slopes[kLogRatio] = kNan;  // 0 times infinity
  return product;
}

Dual PolicyEvaluation::total(std::size_t i) {
  PolicyToken& token = tokens_[i];
  const double sampler = opt_.kind == PolicyKind::kVespo ? 1.0 : token.sampler_ratio;
  const double factor = (token.dropped ? 0.0 : 1.0) * token.entropy_factor * sampler;
  Dual loss = policy_term(i);
  out_.terms[i] = {ratio(i).value, loss.value, factor, 0.0, 0.0};
  loss = factor == 0.0 ? Dual{std::isnan(loss.value) ? kNan : 0.0, {}} : factor * loss;
  if (std::isnan(factor)) loss.slopes[kLogp] = kNan;  // also where A = 0
  out_.token_size[i] = std::fabs(loss.value);
  if (!in_.ref_logp.empty()) {
    const Dual kl = kl_term(i);
    token.kl = out_.terms[i].kl = kl.value;
    out_.kl_slope[i] = std::fabs(kl.slopes[kLogp]) + std::fabs(kl.slopes[kLogRatio]);
    if (opt_.beta != 0.0) {
      loss = loss + opt_.beta * kl;
      out_.token_size[i] += std::fabs(opt_.beta * kl.value);
    }
  }
  if (opt_.entropy_coef != 0.0 && opt_.entropy_reduction == EntropyReduction::kAsLoss) {
    out_.terms[i].entropy_bonus = -opt_.entropy_coef * entropy_[i];
    loss = loss - opt_.entropy_coef * variable(entropy_[i], kEntropy);
    out_.token_size[i] += std::fabs(opt_.entropy_coef * entropy_[i]);
  }
  return loss;
}

// ----------------------------------------------------------------------------------------------- the loss and its gradient

double PolicyEvaluation::weight(std::size_t i) const {
  const double sequences = at_least_one(sequences_.size());
  switch (opt_.aggregation) {
    case Aggregation::kSeqMeanTokenMean: return 1.0 / (sequences * sequences_[tokens_[i].sequence].size());
    case Aggregation::kSeqMeanTokenSumNorm: return 1.0 / (sequences * static_cast<double>(opt_.max_length));
    case Aggregation::kSeqMeanTokenSum: return 1.0 / sequences;
    case Aggregation::kNone: return 1.0;
    case Aggregation::kTokenMean:
    case Aggregation::kSum: break;
  }
  const double tokens = opt_.aggregation == Aggregation::kTokenMean ? at_least_one(used_.size()) : 1.0;
  const double items = is_given(opt_.num_items) ? opt_.num_items : tokens;
  return items == 0.0 ? 0.0 : 1.0 / items;
}

void PolicyEvaluation::add_gradient(std::size_t i, const Dual& loss) {
  const double share = upstream(i) * weight(i);
  const auto of = [&](Variable which) { return share == 0.0 ? 0.0 : times(share, loss.slopes[which]); };
  out_.dlogp[i] += of(kLogp);
  out_.dentropy[i] += of(kEntropy);
  if (sequence_ratio()) {
    sequences_[tokens_[i].sequence].through_ratio += of(kLogRatio);
  } else if (tokens_[i].ratio_moves) {
    out_.dlogp[i] += of(kLogRatio);
  }
}

// d log rho_b / dlogp_t = 1 / n_b for every token in use whose D is not clamped. NaN goes to all of them, but rho's to those of a
// loss that is made of rho.
void PolicyEvaluation::add_ratio_gradients() {
  if (!sequence_ratio()) return;
  for (const PolicySequence& sequence : sequences_) {
    const bool nan = (has_ratio() && std::isnan(sequence.log_ratio)) || std::isnan(sequence.through_ratio);
    for (const std::size_t i : sequence.tokens) {
      if (tokens_[i].ratio_moves) out_.dlogp[i] += sequence.through_ratio / sequence.size();
      if (nan) out_.dlogp[i] = kNan;
    }
  }
}

double PolicyEvaluation::add_entropy_bonus() {
  if (opt_.entropy_coef == 0.0 || opt_.entropy_reduction == EntropyReduction::kAsLoss) return 0.0;
  double kept = 0.0;
  long double sum = 0.0L;
  for (const std::size_t i : used_) {
    if (tokens_[i].entropy_factor == 0.0) continue;
    kept += tokens_[i].entropy_factor;
    sum += static_cast<long double>(tokens_[i].entropy_factor) * entropy_[i];
  }
  const double share = -opt_.entropy_coef / (kept < 1.0 ? 1.0 : kept);
  for (const std::size_t i : used_) {
    const double own = share * tokens_[i].entropy_factor;
    out_.dentropy[i] += upstream(i) * own;
    out_.terms[i].entropy_bonus = own == 0.0 ? 0.0 : own * entropy_[i];
  }
  return share * static_cast<double>(sum);
}

// Over tokens, or over sequences of each one's own mean.
template <typename Value>
double PolicyEvaluation::mean(Level level, double of_empty, Value value) const {
  long double sum = 0.0L;
  if (level == Level::kToken) {
    for (const std::size_t i : used_) sum += value(i);
    return static_cast<double>(sum) / at_least_one(used_.size());
  }
  for (const PolicySequence& sequence : sequences_) {
    long double inner = sequence.tokens.empty() ? of_empty : 0.0L;
    for (const std::size_t i : sequence.tokens) inner += value(i);
    sum += inner / sequence.size();
  }
  return static_cast<double>(sum) / at_least_one(sequences_.size());
}

void PolicyEvaluation::set_metrics() {
  auto& metrics = out_.metrics;
  metrics.fill(kNan);
  const auto fraction = [&](auto&& condition) {
    return mean(opt_.ratio_level, 0.0,
                [&](std::size_t i) { return condition(ratio(i).value, tokens_[i].advantage) ? 1.0 : 0.0; });
  };
  if (!in_.ref_logp.empty()) metrics[kMetricKl] = mean(Level::kToken, 0.0, [&](std::size_t i) { return tokens_[i].kl; });
  metrics[kMetricEntropy] = mean(Level::kToken, 0.0, [&](std::size_t i) { return entropy_[i]; });
  if (opt_.kind == PolicyKind::kClip) {
    metrics[kMetricClipLowFraction] = fraction([&](double rho, double a) { return rho < low() && a < 0.0; });
    metrics[kMetricClipHighFraction] = fraction([&](double rho, double a) { return rho > high() && a > 0.0; });
    metrics[kMetricClipFraction] =
        fraction([&](double rho, double a) { return (rho < low() && a < 0.0) || (rho > high() && a > 0.0); });
  }
  if (opt_.kind == PolicyKind::kCispo) {
    metrics[kMetricCispoClipFraction] = fraction([&](double rho, double a) { return rho > cispo_cap() && a > 0.0; });
  }
  metrics[kMetricRatioMean] = mean(opt_.ratio_level, 1.0, [&](std::size_t i) { return ratio(i).value; });
  if (opt_.sampler_correction != SamplerCorrection::kOff) {
    std::vector<double> ratios;
    if (opt_.sampler_level == Level::kToken) {
      for (const std::size_t i : used_) ratios.push_back(tokens_[i].sampler_ratio);
    } else {
      for (const PolicySequence& sequence : sequences_) ratios.push_back(sequence.sampler_ratio);
    }
    long double sum = 0.0L;
    for (const double ratio : ratios) sum += ratio;
    metrics[kMetricSamplerRatioMean] = static_cast<double>(sum) / at_least_one(ratios.size());
    metrics[kMetricSamplerRatioMin] = ratios.empty() ? 0.0 : *std::min_element(ratios.begin(), ratios.end());
    metrics[kMetricSamplerRatioMax] = ratios.empty() ? 0.0 : *std::max_element(ratios.begin(), ratios.end());
  }
  if (opt_.kind == PolicyKind::kVespo) {
    metrics[kMetricPhiMean] = mean(Level::kSequence, 1.0, [&](std::size_t i) { return tokens_[i].phi; });
  }
  metrics[kMetricDroppedSequences] =
      static_cast<double>(std::count_if(sequences_.begin(), sequences_.end(), [&](const PolicySequence& sequence) {
        return std::any_of(sequence.tokens.begin(), sequence.tokens.end(), [&](std::size_t i) { return tokens_[i].dropped; });
      }));
  metrics[kMetricTokens] = static_cast<double>(used_.size());
}

PolicyResult PolicyEvaluation::run() {
  set_log_ratios();
  set_sampler_ratios();
  set_off_policy_mask();
  set_entropy_mask();
  set_vespo_weights();
  long double sum = 0.0L;
  for (const std::size_t i : used_) {
    const Dual loss = total(i);
    out_.token_loss[i] = loss.value;
    out_.own_slope[i] = std::fabs(loss.slopes[kLogp]);
    out_.advantage[i] = tokens_[i].advantage;
    out_.token_weight[i] = weight(i);
    if (weight(i) != 0.0) sum += static_cast<long double>(weight(i)) * loss.value;
    add_gradient(i, loss);
  }
  add_ratio_gradients();
  out_.loss = static_cast<double>(sum) + add_entropy_bonus();
  set_metrics();
  return std::move(out_);
}

PolicyResult policy_loss(const PolicyOptions& options, const PolicyInputs& inputs, std::span<const double> logp,
                         std::span<const double> entropy) {
  return PolicyEvaluation(options, inputs, logp, entropy).run();
}

}  // namespace tileloss::oracle
