// The policy losses (the GRPO family) in double, straight from their definitions, as a function of every token's logp and
// entropy; derivatives by dual numbers (dual.h) and the chain rule through the sequence's mean. The rows' own gradients follow
// from logprobs_gradient with this function's dlogp and dentropy as upstream.
//
//   for each row i in use: softmax.compute(...); logp[i] = softmax.outputs().logp; entropy[i] = softmax.entropy();
//   const PolicyResult result = policy_loss(options, inputs, logp, entropy);
//   for each row i in use: softmax.compute(...); logprobs_gradient(softmax, {result.dlogp[i], 0, result.dentropy[i]}, gradient);
//
// Where a definition leaves something open:
//   * A = 0: l and its gradient are 0, also where rho is infinite, unless logp, or a rho that l is made of, is NaN.
//   * ratio_level sequence: a rho_b of NaN makes the gradients of all tokens of the sequence NaN.
//   * A factor (off-policy mask, entropy mask, sampler ratio) of exactly 0 makes a token's l and its gradient 0, also where l is
//     infinite; NaN stays NaN.
//   * old_logp absent: D = 0 with gradient, also where logp is infinite.
//   * num_items = 0: the sum over tokens counts 0. The entropy bonus has a denominator of its own.
//   * entropy_quantile with a NaN among the entropies in use: the threshold is NaN, and so is every token's factor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace tileloss::oracle {

// generated: enums policy_kind, level, aggregation, cispo_cap, sampler_correction, kl_estimator, entropy_reduction
enum class PolicyKind { kClip, kCispo, kSapo, kVespo, kReinforce };
enum class Level { kToken, kSequence };
enum class Aggregation { kSeqMeanTokenMean, kTokenMean, kSeqMeanTokenSumNorm, kSeqMeanTokenSum, kSum, kNone };
enum class CispoCap { kRaw, kOnePlus };
enum class SamplerCorrection { kOff, kTruncate, kMask };
enum class KlEstimator { kK1, kK2, kK3 };
enum class EntropyReduction { kTokenMean, kAsLoss };
// end of generated

// NaN: not given.
struct PolicyOptions {
  static constexpr double kNotGiven = std::numeric_limits<double>::quiet_NaN();

  PolicyKind kind = PolicyKind::kClip;
  Level ratio_level = Level::kToken;
  Aggregation aggregation = Aggregation::kSeqMeanTokenMean;
  Level advantage_level = Level::kSequence;
  CispoCap cispo_cap = CispoCap::kRaw;
  double epsilon_low = 0.2;
  double epsilon_high = kNotGiven;  // epsilon_low, with kClip
  double delta = kNotGiven;
  double dual_clip = kNotGiven;
  double cap_low = kNotGiven;
  double tau_pos = 1.0, tau_neg = 1.05;
  double vespo_k_pos = 2.0, vespo_lambda_pos = 3.0;
  double vespo_k_neg = 3.0, vespo_lambda_neg = 2.0;
  double log_ratio_clamp = kNotGiven;
  SamplerCorrection sampler_correction = SamplerCorrection::kOff;
  Level sampler_level = Level::kToken;
  double sampler_min = kNotGiven, sampler_max = kNotGiven;
  double off_policy_threshold = kNotGiven;
  double entropy_quantile = kNotGiven;
  double entropy_threshold = kNotGiven;
  double beta = 0.0;
  KlEstimator kl_estimator = KlEstimator::kK3;
  bool kl_importance = false;
  double kl_log_ratio_clamp = kNotGiven;
  double kl_clamp = kNotGiven;
  double entropy_coef = 0.0;
  EntropyReduction entropy_reduction = EntropyReduction::kTokenMean;
  double num_items = kNotGiven;
  std::int64_t max_length = 0;  // L_max; required by kSeqMeanTokenSumNorm
};

// Empty spans: not given. `used` and `offsets` are required.
struct PolicyInputs {
  std::span<const std::uint8_t> used;     // [N] mask != 0 and label != ignore_index
  std::span<const std::int64_t> offsets;  // [B+1]
  std::span<const double> advantages;     // [B] or [N]
  std::span<const double> old_logp, ref_logp, sampler_logp;
  std::span<const double> loss_grad;  // one value, or one per row with kNone
  // Where what is detached is evaluated; empty: at logp and entropy themselves. Central differences move those and leave these.
  std::span<const double> detached_logp, detached_entropy;
};

// What a step reports, in the order of the result's `metrics`. NaN: does not apply.
enum PolicyMetric : std::size_t {
  kMetricKl,
  kMetricEntropy,
  kMetricClipLowFraction,
  kMetricClipHighFraction,
  kMetricClipFraction,
  kMetricCispoClipFraction,
  kMetricRatioMean,
  kMetricSamplerRatioMean,
  kMetricSamplerRatioMin,
  kMetricSamplerRatioMax,
  kMetricPhiMean,
  kMetricDroppedSequences,
  kMetricTokens,
  kPolicyMetrics
};

// What a token's loss is made of.
struct PolicyTerms {
  double ratio = 0.0;          // rho, the token's own or its sequence's
  double surrogate = 0.0;      // l
  double factor = 0.0;         // of l: the masks and the sampler ratio
  double kl = 0.0;             // without beta
  double entropy_bonus = 0.0;  // what it adds to the token's loss (as_loss) or to the loss (token_mean)
};

// [N] vectors; 0 for rows that are not in use.
struct PolicyResult {
  double loss = 0.0;                 // of a scalar aggregation
  std::vector<double> advantage;     // the token's own, or its sequence's
  std::vector<double> token_loss;    // l_total, before aggregation
  std::vector<double> token_size;    // the sum of the absolute values of its terms
  std::vector<double> token_weight;  // its share in the loss (1 with kNone)
  std::vector<double> dlogp;         // of the loss, upstream gradient included
  std::vector<double> dentropy;
  std::vector<PolicyTerms> terms;
  std::vector<double> own_slope;  // |d l_total / d logp|, but for what goes through rho
  std::vector<double> kl_slope;   // |d KL / d logp|, in the KL metric's terms
  // How far the token is from the nearest decision that another rounding could turn: relative to the bound for ratios, absolute
  // for entropies, log ratios and means. Infinite if there is none.
  std::vector<double> margin;
  std::array<double, kPolicyMetrics> metrics{};
};

// Throws std::invalid_argument on sizes or options that do not go together.
PolicyResult policy_loss(const PolicyOptions& options, const PolicyInputs& inputs, std::span<const double> logp,
                         std::span<const double> entropy);

}  // namespace tileloss::oracle
