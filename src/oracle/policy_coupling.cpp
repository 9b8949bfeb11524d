#include <cmath>
#include <limits>
#include <stdexcept>

#include "oracle/policy_evaluation.h"

namespace tileloss::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kVespoLowest = -18.420680743952367;  // log 1e-8
constexpr double kVespoHighest = 20.0;
constexpr double kVespoLambdaFloor = 1e-4;

double nan_to_zero(double x) { return std::isnan(x) ? 0.0 : x; }

}  // namespace

PolicyEvaluation::PolicyEvaluation(const PolicyOptions& options, const PolicyInputs& inputs, std::span<const double> logp,
                                   std::span<const double> entropy)
    : opt_(options),
      in_(inputs),
      logp_(logp),
      entropy_(entropy),
      detached_logp_(inputs.detached_logp.empty() ? logp : inputs.detached_logp),
      detached_entropy_(inputs.detached_entropy.empty() ? entropy : inputs.detached_entropy),
      tokens_(logp.size()) {
  check_sizes();
  sequences_.resize(in_.offsets.size() - 1);
  for (std::size_t b = 0; b < sequences_.size(); ++b) {
    for (auto i = static_cast<std::size_t>(in_.offsets[b]); i < static_cast<std::size_t>(in_.offsets[b + 1]); ++i) {
      if (in_.used[i] == 0) continue;
      tokens_[i].sequence = b;
      tokens_[i].advantage = in_.advantages[opt_.advantage_level == Level::kToken ? i : b];
      sequences_[b].tokens.push_back(i);
      used_.push_back(i);
    }
  }
  for (auto* values : {&out_.advantage, &out_.token_loss, &out_.token_size, &out_.token_weight, &out_.dlogp, &out_.dentropy,
                       &out_.own_slope, &out_.kl_slope}) {
    values->assign(logp.size(), 0.0);
  }
  out_.terms.assign(logp.size(), {});
  out_.margin.assign(logp.size(), kInfinity);
}

void PolicyEvaluation::check_sizes() const {
  const auto require = [](bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
  };
  const std::size_t rows = logp_.size();
  const auto rows_or_none = [&](std::span<const double> values) { return values.empty() || values.size() == rows; };
  require(entropy_.size() == rows && in_.used.size() == rows, "entropy, used: wrong size");
  require(!in_.offsets.empty() && in_.offsets.front() == 0 && in_.offsets.back() == static_cast<std::int64_t>(rows) &&
              std::is_sorted(in_.offsets.begin(), in_.offsets.end()),
          "offsets: expected 0, ..., rows");
  require(in_.advantages.size() == (opt_.advantage_level == Level::kToken ? rows : in_.offsets.size() - 1),
          "advantages: wrong size");
  require(rows_or_none(in_.old_logp) && rows_or_none(in_.ref_logp) && rows_or_none(in_.sampler_logp), "logp: wrong size");
  require(rows_or_none(in_.detached_logp) && rows_or_none(in_.detached_entropy), "detached: wrong size");
  require(in_.loss_grad.size() <= 1 || (opt_.aggregation == Aggregation::kNone && in_.loss_grad.size() == rows),
          "loss_grad: wrong size");
  require(opt_.kind != PolicyKind::kCispo || is_given(opt_.epsilon_high), "epsilon_high: cispo needs it");
  require(opt_.beta == 0.0 || !in_.ref_logp.empty() || rows == 0, "ref_logp: beta needs it");
  require(opt_.sampler_correction == SamplerCorrection::kOff || !in_.sampler_logp.empty() || rows == 0,
          "sampler_logp: sampler_correction needs it");
  require(opt_.kind != PolicyKind::kVespo || opt_.sampler_level == Level::kToken, "sampler_level: vespo's is token");
  require(opt_.aggregation != Aggregation::kSeqMeanTokenSumNorm || opt_.max_length > 0, "max_length: required");
  require(
      opt_.aggregation != Aggregation::kNone || opt_.entropy_coef == 0.0 || opt_.entropy_reduction == EntropyReduction::kAsLoss,
      "entropy_reduction: token_mean needs a scalar loss");
}

void PolicyEvaluation::decide(std::size_t token, double value, double bound) {
  if (is_given(bound)) out_.margin[token] = std::min(out_.margin[token], std::fabs(value - bound));
}

void PolicyEvaluation::decide_relative(std::size_t token, double value, double bound) {
  if (is_given(bound)) decide(token, (value - bound) / std::max(std::fabs(bound), 1e-30), 0.0);
}

// rho is exactly 1 without old_logp.
void PolicyEvaluation::decide_ratio(std::size_t token, double bound) {
  if (!in_.old_logp.empty()) decide_relative(token, ratio(token).value, bound);
}

void PolicyEvaluation::set_log_ratios() {
  for (const std::size_t i : used_) {
    PolicyToken& token = tokens_[i];
    const double old = old_logp(i);
    // Equal infinities differ by 0 where old is logp itself.
    const auto log_ratio = [&](double logp) { return in_.old_logp.empty() && logp == old ? 0.0 : logp - old; };
    const double difference = log_ratio(logp_[i]);
    token.log_ratio = clamped(difference, -opt_.log_ratio_clamp, opt_.log_ratio_clamp);
    token.detached_log_ratio = clamped(log_ratio(detached_logp_[i]), -opt_.log_ratio_clamp, opt_.log_ratio_clamp);
    token.ratio_moves = !(std::fabs(difference) > opt_.log_ratio_clamp);
    if (!in_.old_logp.empty()) decide(i, std::fabs(difference), opt_.log_ratio_clamp);
  }
  for (PolicySequence& sequence : sequences_) {
    for (const std::size_t i : sequence.tokens) {
      sequence.log_ratio += tokens_[i].log_ratio / sequence.size();
      sequence.detached_log_ratio += tokens_[i].detached_log_ratio / sequence.size();
    }
  }
}

void PolicyEvaluation::set_sampler_ratios() {
  if (opt_.sampler_correction == SamplerCorrection::kOff) return;
  const auto corrected = [&](double ratio) {
    if (opt_.sampler_correction == SamplerCorrection::kTruncate) return clamped(ratio, opt_.sampler_min, opt_.sampler_max);
    return ratio < opt_.sampler_min || ratio > opt_.sampler_max ? 0.0 : ratio;
  };
  const auto decide_bounds = [&](std::size_t i, double ratio) {
    if (opt_.sampler_correction == SamplerCorrection::kTruncate) return;  // continuous
    decide_relative(i, ratio, opt_.sampler_min);
    decide_relative(i, ratio, opt_.sampler_max);
  };
  for (PolicySequence& sequence : sequences_) {
    double sum = 0.0;
    for (const std::size_t i : sequence.tokens) sum += nan_to_zero(old_logp(i) - in_.sampler_logp[i]);
    sequence.sampler_ratio = corrected(std::exp(sum));
    for (const std::size_t i : sequence.tokens) {
      const bool whole = opt_.sampler_level == Level::kSequence;
      const double ratio = std::exp(whole ? sum : nan_to_zero(old_logp(i) - in_.sampler_logp[i]));
      tokens_[i].sampler_ratio = corrected(ratio);
      decide_bounds(i, ratio);
    }
  }
}

void PolicyEvaluation::set_off_policy_mask() {
  if (!is_given(opt_.off_policy_threshold)) return;
  for (PolicySequence& sequence : sequences_) {
    double sum = 0.0;
    for (const std::size_t i : sequence.tokens) {
      const double behaviour = in_.sampler_logp.empty() ? old_logp(i) : in_.sampler_logp[i];
      sum += nan_to_zero(behaviour - detached_logp_[i]);
    }
    const double mean = sum / sequence.size();
    sequence.off_policy = mean > opt_.off_policy_threshold;
    const bool exact = in_.sampler_logp.empty() && in_.old_logp.empty();
    for (const std::size_t i : sequence.tokens) {
      if (!exact) decide(i, mean, opt_.off_policy_threshold);
      tokens_[i].dropped = sequence.off_policy && tokens_[i].advantage < 0.0;
    }
  }
}

void PolicyEvaluation::set_entropy_mask() {
  double threshold = opt_.entropy_threshold;
  const bool quantile = is_given(opt_.entropy_quantile);
  bool between = true;  // the threshold is no token's own entropy
  if ((!quantile && !is_given(threshold)) || used_.empty()) return;
  if (quantile) {
    std::vector<double> sorted;
    bool any_nan = false;
    for (const std::size_t i : used_) {
      sorted.push_back(detached_entropy_[i]);
      any_nan |= std::isnan(detached_entropy_[i]);
    }
    if (any_nan) {
      for (const std::size_t i : used_) tokens_[i].entropy_factor = kNan;
      return;
    }
    std::sort(sorted.begin(), sorted.end());
    const double position = (1.0 - opt_.entropy_quantile) * static_cast<double>(sorted.size() - 1);
    const double whole = std::nearbyint(position);
    between = std::fabs(position - whole) > 1e-9;  // or it is meant to be that whole number
    const auto below = static_cast<std::size_t>(between ? position : whole);
    const double fraction = between ? position - static_cast<double>(below) : 0.0;
    threshold = between ? sorted[below] + fraction * (sorted[below + 1] - sorted[below]) : sorted[below];
  }
  for (const std::size_t i : used_) {
    tokens_[i].entropy_factor = detached_entropy_[i] >= threshold ? 1.0 : 0.0;
    if (between || detached_entropy_[i] != threshold) decide(i, detached_entropy_[i], threshold);
  }
}

void PolicyEvaluation::set_vespo_weights() {
  for (PolicySequence& sequence : sequences_) {
    double sum = 0.0;
    for (const std::size_t i : sequence.tokens) {
      sum += clamped(tokens_[i].detached_log_ratio, -kVespoHighest, kVespoHighest);
      sum += clamped(std::log(tokens_[i].sampler_ratio), kVespoLowest, kVespoHighest);
    }
    sequence.vespo_log_weight = clamped(sum, kVespoLowest, kVespoHighest);
  }
  for (const std::size_t i : used_) tokens_[i].phi = phi(i);
}

double PolicyEvaluation::phi(std::size_t i) const {
  const bool positive = tokens_[i].advantage >= 0.0;
  const double k = positive ? opt_.vespo_k_pos : opt_.vespo_k_neg;
  const double lambda = std::max(positive ? opt_.vespo_lambda_pos : opt_.vespo_lambda_neg, kVespoLambdaFloor);
  const double log_weight = sequences_[tokens_[i].sequence].vespo_log_weight;
  const double phi = std::exp(lambda + k * log_weight - lambda * std::exp(log_weight));
  return std::isfinite(phi) ? phi : 0.0;
}

}  // namespace tileloss::oracle
