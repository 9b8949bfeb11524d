// The options and the tensors of each function, as structs for designated initialisers. Part of tileloss.hpp.
#ifndef TILELOSS_ARGUMENTS_HPP_
#define TILELOSS_ARGUMENTS_HPP_

#include <tileloss/tileloss.h>

#include <cstdint>
#include <limits>
#include <tileloss/views.hpp>

namespace tileloss {
inline namespace v0 {

// --------------------------------------------------------------------------------------------------------------- options

enum class Reduction : std::int32_t {
  kNone = TILELOSS_REDUCTION_NONE,
  kSum = TILELOSS_REDUCTION_SUM,
  kMean = TILELOSS_REDUCTION_MEAN
};
enum class TemperatureOn : std::int32_t { kLogits = TILELOSS_TEMPERATURE_ON_LOGITS, kLogprob = TILELOSS_TEMPERATURE_ON_LOGPROB };

// z = softcap(logit_scale * x) / temperature, softcap(u) = c tanh(u / c); which columns and rows count.
struct LogitOptions {
  double logit_scale = 1;                                 // > 0
  double softcap = 0;                                     // c; 0 is off
  Scalar temperature = 1;                                 // > 0
  TemperatureOn temperature_on = TemperatureOn::kLogits;  // kLogprob: logp' = logp / T of the softmax at T = 1
  std::int64_t valid_vocab = -1;                          // columns from here on are padding; -1: none is
  std::int64_t ignore_index = -100;                       // rows with this label are neither read nor counted
  std::int64_t vocab_start = 0;                           // the class of column 0, for a shard of the vocabulary
  std::int64_t vocab_total = -1;                          // classes in all shards; -1: this matrix holds them all

  [[nodiscard]] tileloss_logit_options c() const noexcept {
    tileloss_logprobs_options defaults;
    tileloss_logprobs_options_init(&defaults);
    tileloss_logit_options options = defaults.logit;
    options.logit_scale = logit_scale;
    options.softcap = softcap;
    options.temperature = temperature.c();
    options.temperature_on = static_cast<tileloss_temperature_on>(temperature_on);
    options.valid_vocab = valid_vocab;
    options.ignore_index = ignore_index;
    options.vocab_start = vocab_start;
    options.vocab_total = vocab_total;
    return options;
  }
};

struct LogprobsOptions {
  LogitOptions logit = {};

  [[nodiscard]] tileloss_logprobs_options c() const noexcept {
    tileloss_logprobs_options options;
    tileloss_logprobs_options_init(&options);
    options.logit = logit.c();
    return options;
  }
};

struct CrossEntropyOptions {
  LogitOptions logit = {};
  double label_smoothing = 0;              // s in [0, 1]
  double z_loss = 0;                       // zeta >= 0: adds zeta * lse^2
  Scalar num_items = Scalar::not_given();  // kMean's denominator when given
  Reduction reduction = Reduction::kMean;

  [[nodiscard]] tileloss_cross_entropy_options c() const noexcept {
    tileloss_cross_entropy_options options;
    tileloss_cross_entropy_options_init(&options);
    options.logit = logit.c();
    options.label_smoothing = label_smoothing;
    options.z_loss = z_loss;
    options.num_items = num_items.c();
    options.reduction = static_cast<tileloss_reduction>(reduction);
    return options;
  }
};

enum class PolicyKind : std::int32_t {
  kClip = TILELOSS_POLICY_CLIP,
  kCispo = TILELOSS_POLICY_CISPO,
  kSapo = TILELOSS_POLICY_SAPO,
  kVespo = TILELOSS_POLICY_VESPO,
  kReinforce = TILELOSS_POLICY_REINFORCE
};
enum class Level : std::int32_t { kToken = TILELOSS_LEVEL_TOKEN, kSequence = TILELOSS_LEVEL_SEQUENCE };
enum class Aggregation : std::int32_t {
  kSeqMeanTokenMean = TILELOSS_SEQ_MEAN_TOKEN_MEAN,
  kTokenMean = TILELOSS_TOKEN_MEAN,
  kSeqMeanTokenSumNorm = TILELOSS_SEQ_MEAN_TOKEN_SUM_NORM,
  kSeqMeanTokenSum = TILELOSS_SEQ_MEAN_TOKEN_SUM,
  kSum = TILELOSS_AGGREGATION_SUM,
  kNone = TILELOSS_AGGREGATION_NONE
};
enum class SamplerCorrection : std::int32_t {
  kOff = TILELOSS_SAMPLER_OFF,
  kTruncate = TILELOSS_SAMPLER_TRUNCATE,
  kMask = TILELOSS_SAMPLER_MASK
};
enum class KlEstimator : std::int32_t { kK1 = TILELOSS_KL_K1, kK2 = TILELOSS_KL_K2, kK3 = TILELOSS_KL_K3 };
enum class EntropyReduction : std::int32_t { kTokenMean = TILELOSS_ENTROPY_TOKEN_MEAN, kAsLoss = TILELOSS_ENTROPY_AS_LOSS };
enum class CispoCap : std::int32_t { kRaw = TILELOSS_CISPO_CAP_RAW, kOnePlus = TILELOSS_CISPO_CAP_ONE_PLUS };

// Meanings and ranges: tileloss_policy_loss_options. kNotGiven switches an option off.
struct PolicyLossOptions {
  static constexpr double kNotGiven = std::numeric_limits<double>::quiet_NaN();

  LogitOptions logit = {};
  PolicyKind kind = PolicyKind::kClip;
  Level ratio_level = Level::kToken;
  Aggregation aggregation = Aggregation::kSeqMeanTokenMean;
  Level advantage_level = Level::kSequence;
  CispoCap cispo_cap = CispoCap::kRaw;
  Scalar epsilon_low = 0.2;
  Scalar epsilon_high = Scalar::not_given();  // 0.2, but kCispo requires it
  Scalar delta = Scalar::not_given();
  Scalar dual_clip = Scalar::not_given();
  Scalar cap_low = Scalar::not_given();
  double tau_pos = 1.0;
  double tau_neg = 1.05;
  double vespo_k_pos = 2;
  double vespo_lambda_pos = 3;
  double vespo_k_neg = 3;
  double vespo_lambda_neg = 2;
  double log_ratio_clamp = kNotGiven;
  SamplerCorrection sampler_correction = SamplerCorrection::kOff;
  Level sampler_level = Level::kToken;
  double sampler_min = kNotGiven;
  double sampler_max = kNotGiven;
  double off_policy_threshold = kNotGiven;
  double entropy_quantile = kNotGiven;
  Scalar entropy_threshold = Scalar::not_given();
  Scalar beta = 0.0;
  KlEstimator kl_estimator = KlEstimator::kK3;
  bool kl_importance = false;
  double kl_log_ratio_clamp = kNotGiven;
  double kl_clamp = kNotGiven;
  Scalar entropy_coef = 0.0;
  EntropyReduction entropy_reduction = EntropyReduction::kTokenMean;
  Scalar num_items = Scalar::not_given();
  std::int64_t max_length = -1;

  // "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo", "luspo", "vespo" or "reinforce" sets kind, ratio_level and
  // aggregation; another name: a Status that lists them, nothing is changed.
  [[nodiscard]] Status set_preset(const char* preset) noexcept {
    tileloss_policy_loss_options options;
    Status status(tileloss_options_preset("policy_loss", preset, &options, sizeof options));
    if (!status) return status;
    kind = static_cast<PolicyKind>(options.kind);
    ratio_level = static_cast<Level>(options.ratio_level);
    aggregation = static_cast<Aggregation>(options.aggregation);
    return status;
  }

  [[nodiscard]] tileloss_policy_loss_options c() const noexcept {
    tileloss_policy_loss_options options;
    tileloss_policy_loss_options_init(&options);
    options.logit = logit.c();
    options.kind = static_cast<tileloss_policy_kind>(kind);
    options.ratio_level = static_cast<tileloss_level>(ratio_level);
    options.aggregation = static_cast<tileloss_aggregation>(aggregation);
    options.advantage_level = static_cast<tileloss_level>(advantage_level);
    options.cispo_cap = static_cast<tileloss_cispo_cap>(cispo_cap);
    options.epsilon_low = epsilon_low.c();
    options.epsilon_high = epsilon_high.c();
    options.delta = delta.c();
    options.dual_clip = dual_clip.c();
    options.cap_low = cap_low.c();
    options.tau_pos = tau_pos;
    options.tau_neg = tau_neg;
    options.vespo_k_pos = vespo_k_pos;
    options.vespo_lambda_pos = vespo_lambda_pos;
    options.vespo_k_neg = vespo_k_neg;
    options.vespo_lambda_neg = vespo_lambda_neg;
    options.log_ratio_clamp = log_ratio_clamp;
    options.sampler_correction = static_cast<tileloss_sampler_correction>(sampler_correction);
    options.sampler_level = static_cast<tileloss_level>(sampler_level);
    options.sampler_min = sampler_min;
    options.sampler_max = sampler_max;
    options.off_policy_threshold = off_policy_threshold;
    options.entropy_quantile = entropy_quantile;
    options.entropy_threshold = entropy_threshold.c();
    options.beta = beta.c();
    options.kl_estimator = static_cast<tileloss_kl_estimator>(kl_estimator);
    options.kl_importance = kl_importance ? 1 : 0;
    options.kl_log_ratio_clamp = kl_log_ratio_clamp;
    options.kl_clamp = kl_clamp;
    options.entropy_coef = entropy_coef.c();
    options.entropy_reduction = static_cast<tileloss_entropy_reduction>(entropy_reduction);
    options.num_items = num_items.c();
    options.max_length = max_length;
    return options;
  }
};

// ------------------------------------------------------------------------------------------------------------- arguments

namespace detail {

// What every function takes: logits, labels, row outputs, gradient, row state.
template <class Args>
tileloss_args common_args(const Args& from) noexcept {
  tileloss_args args;
  tileloss_args_init(&args);
  args.logits = from.logits.c();
  args.labels = from.labels.c();
  args.logp = from.logp.c();
  args.lse = from.lse.c();
  args.entropy = from.entropy.c();
  args.argmax = from.argmax.c();
  args.correct = from.correct.c();
  args.log_sum_sq_probs = from.log_sum_sq_probs.c();
  args.mean_logit = from.mean_logit.c();
  args.dlogits = from.dlogits.c();
  if (from.row_state.present()) args.row_state = from.row_state.c();
  args.row_groups = from.row_groups;
  return args;
}

}  // namespace detail

// N rows (tokens), V columns (vocabulary). Leave out what you do not have or want; what a call cannot fill, such as dlogits in a
// forward, is refused. Outputs of ignored rows are 0, argmax -1.
struct LogprobsArgs {
  LogitsView logits = {};  // [N,V] float, BFloat16, Float16
  LabelsView labels;       // [N] int32, int64
  // Upstream gradients [N] of the backward; an absent one is 0.
  Vector<const float> logp_grad = {};
  Vector<const float> lse_grad = {};
  Vector<const float> entropy_grad = {};
  // Outputs of the forward.
  Vector<float> logp = {};              // [N] log softmax at the label
  Vector<float> lse = {};               // [N] log sum_j exp(z_j)
  Vector<float> entropy = {};           // [N] nats
  Vector<std::int64_t> argmax = {};     // [N] lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};    // [N] argmax == label
  Vector<float> log_sum_sq_probs = {};  // [N] log sum_j p_j^2
  Vector<float> mean_logit = {};        // [N] mean of z over the valid columns
  // Output of the backward: [N,V] of the logits' type; may be the logits themselves, else must not overlap them.
  MutableLogitsView dlogits = {};
  RowStateView row_state = {};          // out of a forward, into a backward, which without it sweeps the logits twice
  tileloss_row_groups row_groups = {};  // for logits like x[:, :-1] of a [B,T,V] tensor

  [[nodiscard]] tileloss_args c() const noexcept {
    tileloss_args args = detail::common_args(*this);
    args.logp_grad = logp_grad.c();
    args.lse_grad = lse_grad.c();
    args.entropy_grad = entropy_grad.c();
    return args;
  }
};

struct CrossEntropyArgs {
  LogitsView logits = {};                  // [N,V] float, BFloat16, Float16
  LabelsView labels;                       // [N] int32, int64
  Vector<const float> token_weights = {};  // [N] w_i; absent: 1
  Vector<const float> class_weights = {};  // [classes] c_j, stride 1; absent: 1
  Vector<const float> loss_grad = {};      // upstream gradient, [1], or [N] with Reduction::kNone; absent: 1
  Vector<float> loss = {};                 // [1], or [N] with Reduction::kNone
  // Further row outputs of the forward and of value_and_grad, as in LogprobsArgs.
  Vector<float> logp = {};
  Vector<float> lse = {};
  Vector<float> entropy = {};
  Vector<std::int64_t> argmax = {};
  Vector<std::uint8_t> correct = {};
  Vector<float> log_sum_sq_probs = {};
  Vector<float> mean_logit = {};
  MutableLogitsView dlogits = {};
  RowStateView row_state = {};
  tileloss_row_groups row_groups = {};

  [[nodiscard]] tileloss_args c() const noexcept {
    tileloss_args args = detail::common_args(*this);
    args.token_weights = token_weights.c();
    args.class_weights = class_weights.c();
    args.loss_grad = loss_grad.c();
    args.loss = loss.c();
    return args;
  }
};

// N rows (tokens) in B sequences, back to back: [B,T] with sequence_length = T, or by offsets.
struct PolicyLossArgs {
  LogitsView logits = {};                 // [N,V] float, BFloat16, Float16
  LabelsView labels;                      // [N] int32, int64
  MaskView mask = {};                     // [N] uint8, int32, int64 or float; 0: neither read nor counted; absent: all are in use
  LabelsView sequence_offsets = {};       // [B+1], 0 first, N last
  std::int64_t sequence_length = 0;       // T; 0: none
  Vector<const float> advantages = {};    // [B], or [N] with advantage_level = kToken
  Vector<const float> old_logp = {};      // [N]; absent: the new logp, detached
  Vector<const float> ref_logp = {};      // [N]
  Vector<const float> sampler_logp = {};  // [N]
  Vector<const float> loss_grad = {};     // upstream gradient, [1], or [N] with Aggregation::kNone; absent: 1
  Vector<float> loss = {};                // [1], or [N] with Aggregation::kNone
  Vector<float> metrics = {};             // [TILELOSS_POLICY_METRICS] or fewer, indexed by TILELOSS_METRIC_*
  // Further row outputs of the forward and of value_and_grad, as in LogprobsArgs.
  Vector<float> logp = {};
  Vector<float> lse = {};
  Vector<float> entropy = {};
  Vector<std::int64_t> argmax = {};
  Vector<std::uint8_t> correct = {};
  Vector<float> log_sum_sq_probs = {};
  Vector<float> mean_logit = {};
  MutableLogitsView dlogits = {};
  RowStateView row_state = {};
  tileloss_row_groups row_groups = {};

  [[nodiscard]] tileloss_args c() const noexcept {
    tileloss_args args = detail::common_args(*this);
    args.mask = mask.c();
    args.sequence_offsets = sequence_offsets.c();
    args.sequence_length = sequence_length;
    args.advantages = advantages.c();
    args.old_logp = old_logp.c();
    args.ref_logp = ref_logp.c();
    args.sampler_logp = sampler_logp.c();
    args.loss_grad = loss_grad.c();
    args.loss = loss.c();
    args.metrics = metrics.c();
    return args;
  }
};

// The LM head, in place of logits and dlogits: logits = hidden head^T + bias. Any strides: Matrix(w.data(), V, H, 1, V) is a head
// that lies as [H,V].
enum class ComputeDtype : std::int32_t { kAuto = TILELOSS_NONE, kFloat32 = TILELOSS_FLOAT32, kBfloat16 = TILELOSS_BFLOAT16 };
struct LinearHead {
  LogitsView hidden = {};                      // [N,H]
  LogitsView head = {};                        // [V,H]
  BiasView bias = {};                          // [V] float, BFloat16 or Float16
  MutableLogitsView dhidden = {};              // [N,H] float or hidden's type
  MutableLogitsView dhead = {};                // [V,H] float or head's type, accumulated in float32
  MutableBiasView dbias = {};                  // [V] float or bias's type, accumulated in float32
  ComputeDtype compute = ComputeDtype::kAuto;  // of the products; kAuto: bfloat16 if hidden and head are that
  bool accumulate = false;                     // add to dhead and dbias

  // `args` with this head; its logits and dlogits stay absent.
  template <class Args>
  [[nodiscard]] tileloss_args c(const Args& args) const noexcept {
    tileloss_args c_args = args.c();
    c_args.hidden = hidden.c();
    c_args.head = head.c();
    c_args.bias = bias.c();
    c_args.dhidden = dhidden.c();
    c_args.dhead = dhead.c();
    c_args.dbias = dbias.c();
    c_args.compute_dtype = static_cast<tileloss_dtype>(compute);
    c_args.accumulate = accumulate ? 1 : 0;
    return c_args;
  }
};

}  // namespace v0
}  // namespace tileloss

#endif  // TILELOSS_ARGUMENTS_HPP_
