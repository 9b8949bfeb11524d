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
struct LogprobsArgs {
  using Options = LogprobsOptions;
  static constexpr const char* kFunction = "logprobs";
  static constexpr const char* kLinearFunction = "linear_logprobs";

  LogitsView logits = {};                    // [N,V] float, BFloat16, Float16
  LabelsView labels;                         // [N] int32, int64
  Vector<const float> logp_grad = {};        // upstream gradient [N]; absent: 0
  Vector<const float> lse_grad = {};         // upstream gradient [N]; absent: 0
  Vector<const float> entropy_grad = {};     // upstream gradient [N]; absent: 0
  Vector<const float> mean_logit_grad = {};  // upstream gradient [N]; absent: 0
  Vector<float> logp = {};                   // [N] log softmax at the label
  Vector<float> lse = {};                    // [N] log sum_j exp(z_j)
  Vector<float> entropy = {};                // [N] nats
  Vector<std::int64_t> argmax = {};          // [N] lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};         // [N] argmax == label
  Vector<float> log_sum_sq_probs = {};       // [N] log sum_j p_j^2
  Vector<float> mean_logit = {};             // [N] mean of z over the valid columns
  MutableLogitsView dlogits = {};            // out: [N,V] of the logits' type; may be the logits themselves
  tileloss_row_state* row_state = nullptr;   // out of a forward, into a backward; distillation and soft labels refuse it
  tileloss_row_groups row_groups = {};       // for logits like x[:, :-1] of a [B,T,V] tensor

  [[nodiscard]] tileloss_args c() const noexcept {
    tileloss_args args;
    tileloss_args_init(&args);
    args.logits = logits.c();
    args.labels = labels.c();
    args.logp_grad = logp_grad.c();
    args.lse_grad = lse_grad.c();
    args.entropy_grad = entropy_grad.c();
    args.mean_logit_grad = mean_logit_grad.c();
    args.logp = logp.c();
    args.lse = lse.c();
    args.entropy = entropy.c();
    args.argmax = argmax.c();
    args.correct = correct.c();
    args.log_sum_sq_probs = log_sum_sq_probs.c();
    args.mean_logit = mean_logit.c();
    args.dlogits = dlogits.c();
    args.row_state = row_state;
    args.row_groups = row_groups;
    return args;
  }
};

struct CrossEntropyArgs {
  using Options = CrossEntropyOptions;
  static constexpr const char* kFunction = "cross_entropy";
  static constexpr const char* kLinearFunction = "linear_cross_entropy";

  LogitsView logits = {};                   // [N,V] float, BFloat16, Float16
  LabelsView labels;                        // [N] int32, int64
  Vector<const float> token_weights = {};   // [N] w_i; absent: 1
  Vector<const float> class_weights = {};   // [classes] c_j, stride 1; absent: 1
  Vector<const float> loss_grad = {};       // upstream gradient, [1], or [N] for a loss a row; absent: 1
  Vector<float> loss = {};                  // [1], or [N] with reduction or aggregation none
  Vector<float> logp = {};                  // [N] log softmax at the label
  Vector<float> lse = {};                   // [N] log sum_j exp(z_j)
  Vector<float> entropy = {};               // [N] nats
  Vector<std::int64_t> argmax = {};         // [N] lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};        // [N] argmax == label
  Vector<float> log_sum_sq_probs = {};      // [N] log sum_j p_j^2
  Vector<float> mean_logit = {};            // [N] mean of z over the valid columns
  MutableLogitsView dlogits = {};           // out: [N,V] of the logits' type; may be the logits themselves
  tileloss_row_state* row_state = nullptr;  // out of a forward, into a backward; distillation and soft labels refuse it
  tileloss_row_groups row_groups = {};      // for logits like x[:, :-1] of a [B,T,V] tensor

  [[nodiscard]] tileloss_args c() const noexcept {
    tileloss_args args;
    tileloss_args_init(&args);
    args.logits = logits.c();
    args.labels = labels.c();
    args.token_weights = token_weights.c();
    args.class_weights = class_weights.c();
    args.loss_grad = loss_grad.c();
    args.loss = loss.c();
    args.logp = logp.c();
    args.lse = lse.c();
    args.entropy = entropy.c();
    args.argmax = argmax.c();
    args.correct = correct.c();
    args.log_sum_sq_probs = log_sum_sq_probs.c();
    args.mean_logit = mean_logit.c();
    args.dlogits = dlogits.c();
    args.row_state = row_state;
    args.row_groups = row_groups;
    return args;
  }
};

struct PolicyLossArgs {
  using Options = PolicyLossOptions;
  static constexpr const char* kFunction = "policy_loss";
  static constexpr const char* kLinearFunction = "linear_policy_loss";

  LogitsView logits = {};                 // [N,V] float, BFloat16, Float16
  LabelsView labels;                      // [N] int32, int64
  MaskView mask = {};                     // [N] uint8, int32, int64 or float; 0: neither read nor counted; absent: all are in use
  LabelsView sequence_offsets = {};       // [B+1], 0 first, N last
  std::int64_t sequence_length = 0;       // T of a [B,T] batch, instead of offsets; 0: none
  Vector<const float> advantages = {};    // [B], or [N] with advantage_level token
  Vector<const float> old_logp = {};      // [N]; absent: the new logp, detached
  Vector<const float> ref_logp = {};      // [N]
  Vector<const float> sampler_logp = {};  // [N]
  Vector<const float> loss_grad = {};     // upstream gradient, [1], or [N] for a loss a row; absent: 1
  Vector<float> loss = {};                // [1], or [N] with reduction or aggregation none
  Vector<float> metrics = {};             // [TILELOSS_POLICY_METRICS] or fewer, indexed by TILELOSS_METRIC_*
  Vector<float> logp = {};                // [N] log softmax at the label
  Vector<float> lse = {};                 // [N] log sum_j exp(z_j)
  Vector<float> entropy = {};             // [N] nats
  Vector<std::int64_t> argmax = {};       // [N] lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};      // [N] argmax == label
  Vector<float> log_sum_sq_probs = {};    // [N] log sum_j p_j^2
  Vector<float> mean_logit = {};          // [N] mean of z over the valid columns
  MutableLogitsView dlogits = {};         // out: [N,V] of the logits' type; may be the logits themselves
  tileloss_row_state* row_state = nullptr;  // out of a forward, into a backward; distillation and soft labels refuse it
  tileloss_row_groups row_groups = {};      // for logits like x[:, :-1] of a [B,T,V] tensor

  [[nodiscard]] tileloss_args c() const noexcept {
    tileloss_args args;
    tileloss_args_init(&args);
    args.logits = logits.c();
    args.labels = labels.c();
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
    args.logp = logp.c();
    args.lse = lse.c();
    args.entropy = entropy.c();
    args.argmax = argmax.c();
    args.correct = correct.c();
    args.log_sum_sq_probs = log_sum_sq_probs.c();
    args.mean_logit = mean_logit.c();
    args.dlogits = dlogits.c();
    args.row_state = row_state;
    args.row_groups = row_groups;
    return args;
  }
};

struct DistillationArgs {
  using Options = DistillationOptions;
  static constexpr const char* kFunction = "distillation";
  static constexpr const char* kLinearFunction = "linear_distillation";

  LogitsView logits = {};          // [N,V] float, BFloat16, Float16
  LogitsView teacher_logits = {};  // [N,V] of the logits' type; never written
  LabelsView labels = {};          // [N] int32, int64
  MaskView mask = {};              // [N] uint8, int32, int64 or float; 0: neither read nor counted; absent: all are in use
  Vector<const float> token_weights = {};   // [N] w_i; absent: 1
  Vector<const float> loss_grad = {};       // upstream gradient, [1], or [N] for a loss a row; absent: 1
  Vector<float> loss = {};                  // [1], or [N] with reduction or aggregation none
  Vector<float> divergence = {};            // [N] the divergence alone
  Vector<float> teacher_entropy = {};       // [N] nats, of the classes that the divergence sees
  Vector<std::uint8_t> agreement = {};      // [N] whether both have the same argmax
  Vector<float> logp = {};                  // [N] log softmax at the label
  Vector<float> lse = {};                   // [N] log sum_j exp(z_j)
  Vector<float> entropy = {};               // [N] nats
  Vector<std::int64_t> argmax = {};         // [N] lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};        // [N] argmax == label
  Vector<float> log_sum_sq_probs = {};      // [N] log sum_j p_j^2
  Vector<float> mean_logit = {};            // [N] mean of z over the valid columns
  MutableLogitsView dlogits = {};           // out: [N,V] of the logits' type; may be the logits themselves
  tileloss_row_state* row_state = nullptr;  // out of a forward, into a backward; distillation and soft labels refuse it
  tileloss_row_groups row_groups = {};      // for logits like x[:, :-1] of a [B,T,V] tensor

  [[nodiscard]] tileloss_args c() const noexcept {
    tileloss_args args;
    tileloss_args_init(&args);
    args.logits = logits.c();
    args.teacher_logits = teacher_logits.c();
    args.labels = labels.c();
    args.mask = mask.c();
    args.token_weights = token_weights.c();
    args.loss_grad = loss_grad.c();
    args.loss = loss.c();
    args.divergence = divergence.c();
    args.teacher_entropy = teacher_entropy.c();
    args.agreement = agreement.c();
    args.logp = logp.c();
    args.lse = lse.c();
    args.entropy = entropy.c();
    args.argmax = argmax.c();
    args.correct = correct.c();
    args.log_sum_sq_probs = log_sum_sq_probs.c();
    args.mean_logit = mean_logit.c();
    args.dlogits = dlogits.c();
    args.row_state = row_state;
    args.row_groups = row_groups;
    return args;
  }
};

struct SoftCrossEntropyArgs {
  using Options = SoftCrossEntropyOptions;
  static constexpr const char* kFunction = "soft_cross_entropy";
  static constexpr const char* kLinearFunction = "linear_soft_cross_entropy";

  LogitsView logits = {};        // [N,V] float, BFloat16, Float16
  LogitsView target_probs = {};  // [N,V] float, BFloat16, Float16; need not sum to 1
  LabelsView labels = {};        // [N] int32, int64
  MaskView mask = {};            // [N] uint8, int32, int64 or float; 0: neither read nor counted; absent: all are in use
  Vector<const float> token_weights = {};   // [N] w_i; absent: 1
  Vector<const float> class_weights = {};   // [classes] c_j, stride 1; absent: 1
  Vector<const float> loss_grad = {};       // upstream gradient, [1], or [N] for a loss a row; absent: 1
  Vector<float> loss = {};                  // [1], or [N] with reduction or aggregation none
  Vector<float> logp = {};                  // [N] log softmax at the label
  Vector<float> lse = {};                   // [N] log sum_j exp(z_j)
  Vector<float> entropy = {};               // [N] nats
  Vector<std::int64_t> argmax = {};         // [N] lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};        // [N] argmax == label
  Vector<float> log_sum_sq_probs = {};      // [N] log sum_j p_j^2
  Vector<float> mean_logit = {};            // [N] mean of z over the valid columns
  MutableLogitsView dlogits = {};           // out: [N,V] of the logits' type; may be the logits themselves
  tileloss_row_state* row_state = nullptr;  // out of a forward, into a backward; distillation and soft labels refuse it
  tileloss_row_groups row_groups = {};      // for logits like x[:, :-1] of a [B,T,V] tensor

  [[nodiscard]] tileloss_args c() const noexcept {
    tileloss_args args;
    tileloss_args_init(&args);
    args.logits = logits.c();
    args.target_probs = target_probs.c();
    args.labels = labels.c();
    args.mask = mask.c();
    args.token_weights = token_weights.c();
    args.class_weights = class_weights.c();
    args.loss_grad = loss_grad.c();
    args.loss = loss.c();
    args.logp = logp.c();
    args.lse = lse.c();
    args.entropy = entropy.c();
    args.argmax = argmax.c();
    args.correct = correct.c();
    args.log_sum_sq_probs = log_sum_sq_probs.c();
    args.mean_logit = mean_logit.c();
    args.dlogits = dlogits.c();
    args.row_state = row_state;
    args.row_groups = row_groups;
    return args;
  }
};

struct SparseDistillationArgs {
  using Options = SparseDistillationOptions;
  static constexpr const char* kFunction = "sparse_distillation";
  static constexpr const char* kLinearFunction = "linear_sparse_distillation";

  LogitsView logits = {};            // [N,V] float, BFloat16, Float16
  IdsView teacher_ids = {};          // [N,K] int32, int64: distinct columns of each row; negative: none
  LogitsView teacher_logprobs = {};  // [N,K] float, BFloat16, Float16: their log q
  LabelsView labels = {};            // [N] int32, int64
  MaskView mask = {};                // [N] uint8, int32, int64 or float; 0: neither read nor counted; absent: all are in use
  Vector<const float> token_weights = {};   // [N] w_i; absent: 1
  Vector<const float> loss_grad = {};       // upstream gradient, [1], or [N] for a loss a row; absent: 1
  Vector<float> loss = {};                  // [1], or [N] with reduction or aggregation none
  Vector<float> divergence = {};            // [N] the divergence alone
  Vector<float> teacher_entropy = {};       // [N] nats, of the classes that the divergence sees
  Vector<std::uint8_t> agreement = {};      // [N] whether both have the same argmax
  Vector<float> logp = {};                  // [N] log softmax at the label
  Vector<float> lse = {};                   // [N] log sum_j exp(z_j)
  Vector<float> entropy = {};               // [N] nats
  Vector<std::int64_t> argmax = {};         // [N] lowest index on ties; -1 if the row holds a NaN
  Vector<std::uint8_t> correct = {};        // [N] argmax == label
  Vector<float> log_sum_sq_probs = {};      // [N] log sum_j p_j^2
  Vector<float> mean_logit = {};            // [N] mean of z over the valid columns
  MutableLogitsView dlogits = {};           // out: [N,V] of the logits' type; may be the logits themselves
  tileloss_row_state* row_state = nullptr;  // out of a forward, into a backward; distillation and soft labels refuse it
  tileloss_row_groups row_groups = {};      // for logits like x[:, :-1] of a [B,T,V] tensor

  [[nodiscard]] tileloss_args c() const noexcept {
    tileloss_args args;
    tileloss_args_init(&args);
    args.logits = logits.c();
    args.teacher_ids = teacher_ids.c();
    args.teacher_logprobs = teacher_logprobs.c();
    args.labels = labels.c();
    args.mask = mask.c();
    args.token_weights = token_weights.c();
    args.loss_grad = loss_grad.c();
    args.loss = loss.c();
    args.divergence = divergence.c();
    args.teacher_entropy = teacher_entropy.c();
    args.agreement = agreement.c();
    args.logp = logp.c();
    args.lse = lse.c();
    args.entropy = entropy.c();
    args.argmax = argmax.c();
    args.correct = correct.c();
    args.log_sum_sq_probs = log_sum_sq_probs.c();
    args.mean_logit = mean_logit.c();
    args.dlogits = dlogits.c();
    args.row_state = row_state;
    args.row_groups = row_groups;
    return args;
  }
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
