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

// The C ABI's structs, which in C++ hold the defaults as declared: CrossEntropyOptions{.logit = {.softcap = 30}, .label_smoothing
// = 0.1}. Meanings, ranges and the enumerators of choices: tileloss.h.
// generated: options in C++, by ./dev generate from src/schema/table.toml
using LogitOptions = tileloss_logit_options;
using LinearOptions = tileloss_linear_options;
using LogprobsOptions = tileloss_logprobs_options;
using CrossEntropyOptions = tileloss_cross_entropy_options;
using PolicyLossOptions = tileloss_policy_loss_options;
using DistillationOptions = tileloss_distillation_options;
using SoftCrossEntropyOptions = tileloss_soft_cross_entropy_options;
using SparseDistillationOptions = tileloss_sparse_distillation_options;
using SweepOptions = tileloss_sweep_options;
// end of generated

// The defaults, and on top of them "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo", "luspo", "vespo" or "reinforce": a
// kind, a ratio_level and an aggregation. Another name: a Status that lists them, nothing is changed.
[[nodiscard]] inline Status set_preset(PolicyLossOptions& options, const char* preset) noexcept {
  return Status(tileloss_options_preset("policy_loss", preset, &options, sizeof options));
}

// ------------------------------------------------------------------------------------------------------------- arguments

// N rows (tokens), V columns (vocabulary), B sequences, back to back. Leave out what you do not have or want; what a call cannot
// fill, such as dlogits in a forward, is refused. Outputs of ignored rows are 0, argmax -1.

// generated: arguments in C++, by ./dev generate from src/schema/table.toml
namespace detail {

// What `from` has of the C ABI's arguments.
template <class Args>
tileloss_args c_args(const Args& from) noexcept {
  tileloss_args args;
  tileloss_args_init(&args);
  if constexpr (requires { from.logits; }) args.logits = from.logits.c();
  if constexpr (requires { from.labels; }) args.labels = from.labels.c();
  if constexpr (requires { from.token_weights; }) args.token_weights = from.token_weights.c();
  if constexpr (requires { from.class_weights; }) args.class_weights = from.class_weights.c();
  if constexpr (requires { from.loss_grad; }) args.loss_grad = from.loss_grad.c();
  if constexpr (requires { from.logp_grad; }) args.logp_grad = from.logp_grad.c();
  if constexpr (requires { from.lse_grad; }) args.lse_grad = from.lse_grad.c();
  if constexpr (requires { from.entropy_grad; }) args.entropy_grad = from.entropy_grad.c();
  if constexpr (requires { from.mean_logit_grad; }) args.mean_logit_grad = from.mean_logit_grad.c();
  if constexpr (requires { from.loss; }) args.loss = from.loss.c();
  if constexpr (requires { from.logp; }) args.logp = from.logp.c();
  if constexpr (requires { from.lse; }) args.lse = from.lse.c();
  if constexpr (requires { from.entropy; }) args.entropy = from.entropy.c();
  if constexpr (requires { from.argmax; }) args.argmax = from.argmax.c();
  if constexpr (requires { from.correct; }) args.correct = from.correct.c();
  if constexpr (requires { from.log_sum_sq_probs; }) args.log_sum_sq_probs = from.log_sum_sq_probs.c();
  if constexpr (requires { from.mean_logit; }) args.mean_logit = from.mean_logit.c();
  if constexpr (requires { from.dlogits; }) args.dlogits = from.dlogits.c();
  if constexpr (requires { from.row_state; }) args.row_state = from.row_state;
  if constexpr (requires { from.mask; }) args.mask = from.mask.c();
  if constexpr (requires { from.old_logp; }) args.old_logp = from.old_logp.c();
  if constexpr (requires { from.ref_logp; }) args.ref_logp = from.ref_logp.c();
  if constexpr (requires { from.sampler_logp; }) args.sampler_logp = from.sampler_logp.c();
  if constexpr (requires { from.advantages; }) args.advantages = from.advantages.c();
  if constexpr (requires { from.sequence_offsets; }) args.sequence_offsets = from.sequence_offsets.c();
  if constexpr (requires { from.metrics; }) args.metrics = from.metrics.c();
  if constexpr (requires { from.sequence_length; }) args.sequence_length = from.sequence_length;
  if constexpr (requires { from.row_groups; }) args.row_groups = from.row_groups;
  if constexpr (requires { from.teacher_logits; }) args.teacher_logits = from.teacher_logits.c();
  if constexpr (requires { from.divergence; }) args.divergence = from.divergence.c();
  if constexpr (requires { from.teacher_entropy; }) args.teacher_entropy = from.teacher_entropy.c();
  if constexpr (requires { from.agreement; }) args.agreement = from.agreement.c();
  if constexpr (requires { from.target_probs; }) args.target_probs = from.target_probs.c();
  if constexpr (requires { from.teacher_ids; }) args.teacher_ids = from.teacher_ids.c();
  if constexpr (requires { from.teacher_logprobs; }) args.teacher_logprobs = from.teacher_logprobs.c();
  if constexpr (requires { from.target_coef; }) args.target_coef = from.target_coef.c();
  if constexpr (requires { from.prob_plus_target_coef; }) args.prob_plus_target_coef = from.prob_plus_target_coef.c();
  if constexpr (requires { from.prob_logp_coef; }) args.prob_logp_coef = from.prob_logp_coef.c();
  if constexpr (requires { from.uniform_coef; }) args.uniform_coef = from.uniform_coef.c();
  if constexpr (requires { from.allowed; }) args.allowed = from.allowed.c();
  if constexpr (requires { from.labels_per_row; }) args.labels_per_row = from.labels_per_row;
  return args;
}

}  // namespace detail

struct LogprobsArgs {
  using Options = LogprobsOptions;
  static constexpr const char* kFunction = "logprobs";
  static constexpr const char* kLinearFunction = "linear_logprobs";

  LogitsView logits = {};                    // [N,V] float32, bfloat16, float16; any row stride >= V, column stride 1
  LabelsView labels;                         // [N] int32, int64
  std::int64_t labels_per_row = 0;           // K, up to 1024; 0: 1
  Vector<const float> logp_grad = {};        // [N] float32; upstream gradient; absent: 0
  Vector<const float> lse_grad = {};         // [N] float32; upstream gradient; absent: 0
  Vector<const float> entropy_grad = {};     // [N] float32; upstream gradient; absent: 0
  Vector<const float> mean_logit_grad = {};  // [N] float32; upstream gradient; absent: 0
  Vector<float> logp = {};                   // [N] float32; log softmax at the label
  Vector<float> lse = {};                    // [N] float32; log sum_j exp(z_j)
  Vector<float> entropy = {};                // [N] float32; nats
  Vector<std::int64_t> argmax = {};          // [N] int64; lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};         // [N] uint8; argmax == label
  Vector<float> log_sum_sq_probs = {};       // [N] float32; log sum_j p_j^2
  Vector<float> mean_logit = {};             // [N] float32; mean of z over the valid columns; not together with class_weights
  // [N,V] float32, bfloat16, float16; the logits' dtype; may be the logits themselves, otherwise must not overlap them
  MutableLogitsView dlogits = {};
  // Output of a forward, input of a backward (required: max, sum, label_logit; logprobs with entropy_grad: entropy_sum); null:
  // none. A backward without it sweeps the logits twice. Distillation and soft labels: of a shard of the vocabulary alone.
  tileloss_row_state* row_state = nullptr;
  tileloss_row_groups row_groups = {};  // for logits like x[:, :-1] of a [B,T,V] tensor
  // [N,W] int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all are allowed
  Matrix<const std::int32_t> allowed = {};

  [[nodiscard]] tileloss_args c() const noexcept { return detail::c_args(*this); }
};

struct CrossEntropyArgs {
  using Options = CrossEntropyOptions;
  static constexpr const char* kFunction = "cross_entropy";
  static constexpr const char* kLinearFunction = "linear_cross_entropy";

  LogitsView logits = {};  // [N,V] float32, bfloat16, float16; any row stride >= V, column stride 1
  LabelsView labels;       // [N] int32, int64
  MaskView mask = {};      // [N] uint8, int32, int64, float32; rows with 0 are neither read nor counted; default: all count
  Vector<const float> token_weights = {};  // [N] float32; w_i; default 1
  Vector<const float> class_weights = {};  // [classes] float32; c_j, stride 1; default 1
  Vector<const float> loss_grad = {};      // [1] or [N] float32; upstream gradient, [N] for a loss a row; absent: 1
  Vector<float> loss = {};                 // [1] or [N] float32; [N] with reduction or aggregation none
  Vector<float> logp = {};                 // [N] float32; log softmax at the label
  Vector<float> lse = {};                  // [N] float32; log sum_j exp(z_j)
  Vector<float> entropy = {};              // [N] float32; nats
  Vector<std::int64_t> argmax = {};        // [N] int64; lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};       // [N] uint8; argmax == label
  Vector<float> log_sum_sq_probs = {};     // [N] float32; log sum_j p_j^2
  Vector<float> mean_logit = {};           // [N] float32; mean of z over the valid columns; not together with class_weights
  // [N,V] float32, bfloat16, float16; the logits' dtype; may be the logits themselves, otherwise must not overlap them
  MutableLogitsView dlogits = {};
  // Output of a forward, input of a backward (required: max, sum, label_logit; logprobs with entropy_grad: entropy_sum); null:
  // none. A backward without it sweeps the logits twice. Distillation and soft labels: of a shard of the vocabulary alone.
  tileloss_row_state* row_state = nullptr;
  tileloss_row_groups row_groups = {};  // for logits like x[:, :-1] of a [B,T,V] tensor
  // [N,W] int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all are allowed
  Matrix<const std::int32_t> allowed = {};

  [[nodiscard]] tileloss_args c() const noexcept { return detail::c_args(*this); }
};

struct PolicyLossArgs {
  using Options = PolicyLossOptions;
  static constexpr const char* kFunction = "policy_loss";
  static constexpr const char* kLinearFunction = "linear_policy_loss";

  LogitsView logits = {};  // [N,V] float32, bfloat16, float16; any row stride >= V, column stride 1
  LabelsView labels;       // [N] int32, int64
  MaskView mask = {};      // [N] uint8, int32, int64, float32; rows with 0 are neither read nor counted; default: all count
  LabelsView sequence_offsets = {};       // [B+1] int32, int64; sequence b is rows offsets[b] to offsets[b+1], 0 first, N last
  std::int64_t sequence_length = 0;       // T > 0: N = B*T rows of a [B,T] batch, instead of sequence_offsets; 0: none
  Vector<const float> advantages = {};    // [B] or [N] float32; as options.advantage_level says
  Vector<const float> old_logp = {};      // [N] float32; absent: the new logp itself, detached (rho = 1, with gradient)
  Vector<const float> ref_logp = {};      // [N] float32; of the reference model; of NaN here or in old_logp: docs/users/losses.md
  Vector<const float> sampler_logp = {};  // [N] float32; of the engine that sampled the tokens; NaN: no difference
  Vector<const float> loss_grad = {};     // [1] or [N] float32; upstream gradient, [N] for a loss a row; absent: 1
  Vector<float> loss = {};                // [1] or [N] float32; [N] with reduction or aggregation none
  // [TILELOSS_POLICY_METRICS] float32; out, indexed by TILELOSS_METRIC_*; a shorter one gets the first
  Vector<float> metrics = {};
  Vector<float> logp = {};              // [N] float32; log softmax at the label
  Vector<float> lse = {};               // [N] float32; log sum_j exp(z_j)
  Vector<float> entropy = {};           // [N] float32; nats
  Vector<std::int64_t> argmax = {};     // [N] int64; lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};    // [N] uint8; argmax == label
  Vector<float> log_sum_sq_probs = {};  // [N] float32; log sum_j p_j^2
  Vector<float> mean_logit = {};        // [N] float32; mean of z over the valid columns; not together with class_weights
  // [N,V] float32, bfloat16, float16; the logits' dtype; may be the logits themselves, otherwise must not overlap them
  MutableLogitsView dlogits = {};
  // Output of a forward, input of a backward (required: max, sum, label_logit; logprobs with entropy_grad: entropy_sum); null:
  // none. A backward without it sweeps the logits twice. Distillation and soft labels: of a shard of the vocabulary alone.
  tileloss_row_state* row_state = nullptr;
  tileloss_row_groups row_groups = {};  // for logits like x[:, :-1] of a [B,T,V] tensor
  // [N,W] int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all are allowed
  Matrix<const std::int32_t> allowed = {};

  [[nodiscard]] tileloss_args c() const noexcept { return detail::c_args(*this); }
};

struct DistillationArgs {
  using Options = DistillationOptions;
  static constexpr const char* kFunction = "distillation";
  static constexpr const char* kLinearFunction = "linear_distillation";

  LogitsView logits = {};          // [N,V] float32, bfloat16, float16; any row stride >= V, column stride 1
  LogitsView teacher_logits = {};  // [N,V] float32, bfloat16, float16; the logits' dtype; any row stride >= V, column stride 1
  LabelsView labels = {};          // [N] int32, int64
  MaskView mask = {};  // [N] uint8, int32, int64, float32; rows with 0 are neither read nor counted; default: all count
  Vector<const float> token_weights = {};  // [N] float32; w_i; default 1
  Vector<const float> loss_grad = {};      // [1] or [N] float32; upstream gradient, [N] for a loss a row; absent: 1
  Vector<float> loss = {};                 // [1] or [N] float32; [N] with reduction or aggregation none
  Vector<float> divergence = {};           // [N] float32; out: the divergence alone, neither weighted nor scaled
  Vector<float> teacher_entropy = {};      // [N] float32; out: nats, of the classes that the divergence sees
  Vector<std::uint8_t> agreement = {};     // [N] uint8; out: whether both have the same argmax
  Vector<float> logp = {};                 // [N] float32; log softmax at the label
  Vector<float> lse = {};                  // [N] float32; log sum_j exp(z_j)
  Vector<float> entropy = {};              // [N] float32; nats
  Vector<std::int64_t> argmax = {};        // [N] int64; lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};       // [N] uint8; argmax == label
  Vector<float> log_sum_sq_probs = {};     // [N] float32; log sum_j p_j^2
  Vector<float> mean_logit = {};           // [N] float32; mean of z over the valid columns; not together with class_weights
  // [N,V] float32, bfloat16, float16; the logits' dtype; may be the logits themselves, otherwise must not overlap them
  MutableLogitsView dlogits = {};
  // Output of a forward, input of a backward (required: max, sum, label_logit; logprobs with entropy_grad: entropy_sum); null:
  // none. A backward without it sweeps the logits twice. Distillation and soft labels: of a shard of the vocabulary alone.
  tileloss_row_state* row_state = nullptr;
  tileloss_row_groups row_groups = {};  // for logits like x[:, :-1] of a [B,T,V] tensor
  // [N,W] int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all are allowed
  Matrix<const std::int32_t> allowed = {};

  [[nodiscard]] tileloss_args c() const noexcept { return detail::c_args(*this); }
};

struct SoftCrossEntropyArgs {
  using Options = SoftCrossEntropyOptions;
  static constexpr const char* kFunction = "soft_cross_entropy";
  static constexpr const char* kLinearFunction = "linear_soft_cross_entropy";

  LogitsView logits = {};        // [N,V] float32, bfloat16, float16; any row stride >= V, column stride 1
  LogitsView target_probs = {};  // [N,V] float32, bfloat16, float16; q_j, need not sum to 1; any row stride >= V, column stride 1
  LabelsView labels = {};        // [N] int32, int64
  MaskView mask = {};            // [N] uint8, int32, int64, float32; rows with 0 are neither read nor counted; default: all count
  Vector<const float> token_weights = {};  // [N] float32; w_i; default 1
  Vector<const float> class_weights = {};  // [classes] float32; c_j, stride 1; default 1
  Vector<const float> loss_grad = {};      // [1] or [N] float32; upstream gradient, [N] for a loss a row; absent: 1
  Vector<float> loss = {};                 // [1] or [N] float32; [N] with reduction or aggregation none
  Vector<float> logp = {};                 // [N] float32; log softmax at the label
  Vector<float> lse = {};                  // [N] float32; log sum_j exp(z_j)
  Vector<float> entropy = {};              // [N] float32; nats
  Vector<std::int64_t> argmax = {};        // [N] int64; lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};       // [N] uint8; argmax == label
  Vector<float> log_sum_sq_probs = {};     // [N] float32; log sum_j p_j^2
  Vector<float> mean_logit = {};           // [N] float32; mean of z over the valid columns; not together with class_weights
  // [N,V] float32, bfloat16, float16; the logits' dtype; may be the logits themselves, otherwise must not overlap them
  MutableLogitsView dlogits = {};
  // Output of a forward, input of a backward (required: max, sum, label_logit; logprobs with entropy_grad: entropy_sum); null:
  // none. A backward without it sweeps the logits twice. Distillation and soft labels: of a shard of the vocabulary alone.
  tileloss_row_state* row_state = nullptr;
  tileloss_row_groups row_groups = {};  // for logits like x[:, :-1] of a [B,T,V] tensor
  // [N,W] int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all are allowed
  Matrix<const std::int32_t> allowed = {};

  [[nodiscard]] tileloss_args c() const noexcept { return detail::c_args(*this); }
};

struct SparseDistillationArgs {
  using Options = SparseDistillationOptions;
  static constexpr const char* kFunction = "sparse_distillation";
  static constexpr const char* kLinearFunction = "linear_sparse_distillation";

  LogitsView logits = {};            // [N,V] float32, bfloat16, float16; any row stride >= V, column stride 1
  IdsView teacher_ids = {};          // [N,K] int32, int64; distinct columns of each row, in any order; negative: none
  LogitsView teacher_logprobs = {};  // [N,K] float32, bfloat16, float16; their log q, <= 0 but for rounding, as they are
  LabelsView labels = {};            // [N] int32, int64
  MaskView mask = {};  // [N] uint8, int32, int64, float32; rows with 0 are neither read nor counted; default: all count
  Vector<const float> token_weights = {};  // [N] float32; w_i; default 1
  Vector<const float> loss_grad = {};      // [1] or [N] float32; upstream gradient, [N] for a loss a row; absent: 1
  Vector<float> loss = {};                 // [1] or [N] float32; [N] with reduction or aggregation none
  Vector<float> divergence = {};           // [N] float32; out: the divergence alone, neither weighted nor scaled
  Vector<float> teacher_entropy = {};      // [N] float32; out: nats, of the classes that the divergence sees
  Vector<std::uint8_t> agreement = {};     // [N] uint8; out: whether both have the same argmax
  Vector<float> logp = {};                 // [N] float32; log softmax at the label
  Vector<float> lse = {};                  // [N] float32; log sum_j exp(z_j)
  Vector<float> entropy = {};              // [N] float32; nats
  Vector<std::int64_t> argmax = {};        // [N] int64; lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};       // [N] uint8; argmax == label
  Vector<float> log_sum_sq_probs = {};     // [N] float32; log sum_j p_j^2
  Vector<float> mean_logit = {};           // [N] float32; mean of z over the valid columns; not together with class_weights
  // [N,V] float32, bfloat16, float16; the logits' dtype; may be the logits themselves, otherwise must not overlap them
  MutableLogitsView dlogits = {};
  // Output of a forward, input of a backward (required: max, sum, label_logit; logprobs with entropy_grad: entropy_sum); null:
  // none. A backward without it sweeps the logits twice. Distillation and soft labels: of a shard of the vocabulary alone.
  tileloss_row_state* row_state = nullptr;
  tileloss_row_groups row_groups = {};  // for logits like x[:, :-1] of a [B,T,V] tensor
  // [N,W] int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all are allowed
  Matrix<const std::int32_t> allowed = {};

  [[nodiscard]] tileloss_args c() const noexcept { return detail::c_args(*this); }
};

struct SweepArgs {
  using Options = SweepOptions;
  static constexpr const char* kFunction = "sweep";
  static constexpr const char* kLinearFunction = "linear_sweep";

  LogitsView logits = {};                          // [N,V] float32, bfloat16, float16; any row stride >= V, column stride 1
  LabelsView labels;                               // [N] int32, int64
  Vector<const float> class_weights = {};          // [classes] float32; c_j, stride 1; default 1
  Vector<const float> target_coef = {};            // [N] float32; target
  Vector<const float> prob_plus_target_coef = {};  // [N] float32; prob + target
  Vector<const float> prob_logp_coef = {};         // [N] float32; prob_logp
  Vector<const float> uniform_coef = {};           // [N] float32; uniform
  Vector<float> logp = {};                         // [N] float32; log softmax at the label
  Vector<float> lse = {};                          // [N] float32; log sum_j exp(z_j)
  Vector<float> entropy = {};                      // [N] float32; nats
  Vector<std::int64_t> argmax = {};                // [N] int64; lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};               // [N] uint8; argmax == label
  Vector<float> log_sum_sq_probs = {};             // [N] float32; log sum_j p_j^2
  Vector<float> mean_logit = {};  // [N] float32; mean of z over the valid columns; not together with class_weights
  // [N,V] float32, bfloat16, float16; the logits' dtype; may be the logits themselves, otherwise must not overlap them
  MutableLogitsView dlogits = {};
  // Output of a forward, input of a backward (required: max, sum, label_logit; logprobs with entropy_grad: entropy_sum); null:
  // none. A backward without it sweeps the logits twice. Distillation and soft labels: of a shard of the vocabulary alone.
  tileloss_row_state* row_state = nullptr;
  tileloss_row_groups row_groups = {};  // for logits like x[:, :-1] of a [B,T,V] tensor
  // [N,W] int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all are allowed
  Matrix<const std::int32_t> allowed = {};

  [[nodiscard]] tileloss_args c() const noexcept { return detail::c_args(*this); }
};
// end of generated

// The LM head, in place of logits and dlogits: logits = hidden head^T + bias. Any strides: Matrix(w.data(), V, H, 1, V) is a head
// that lies as [H,V]. What the products see, and whether dhead and dbias are added to, is said by options.linear.
struct LinearHead {
  LogitsView hidden = {};          // [N,H]
  LogitsView head = {};            // [V,H]
  BiasView bias = {};              // [V] float, BFloat16 or Float16
  MutableLogitsView dhidden = {};  // [N,H] float or hidden's type
  MutableLogitsView dhead = {};    // [V,H] float or head's type, accumulated in float32
  MutableBiasView dbias = {};      // [V] float or bias's type, accumulated in float32
  // A low-rank part, as of LoRA: logits = hidden head^T + hidden_r head_r^T + bias. R up to 512.
  LogitsView hidden_r = {};          // [N,R]
  LogitsView head_r = {};            // [V,R], any strides
  MutableLogitsView dhidden_r = {};  // [N,R] float or hidden_r's type
  MutableLogitsView dhead_r = {};    // [V,R] float or head_r's type, accumulated in float32

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
    c_args.hidden_r = hidden_r.c();
    c_args.head_r = head_r.c();
    c_args.dhidden_r = dhidden_r.c();
    c_args.dhead_r = dhead_r.c();
    return c_args;
  }
};

// A teacher's LM head beside the student's, in place of teacher_logits. G: its own width.
struct TeacherHead {
  LogitsView hidden = {};  // [N,G]
  LogitsView head = {};    // [V,G], any strides
  BiasView bias = {};      // [V]

  // `args` with both heads.
  [[nodiscard]] tileloss_args c(const LinearHead& student, const DistillationArgs& args) const noexcept {
    tileloss_args c_args = student.c(args);
    c_args.teacher_hidden = hidden.c();
    c_args.teacher_head = head.c();
    c_args.teacher_bias = bias.c();
    return c_args;
  }
};

}  // namespace v0
}  // namespace tileloss

#endif  // TILELOSS_ARGUMENTS_HPP_
