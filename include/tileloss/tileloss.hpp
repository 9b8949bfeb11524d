// TileLoss for C++20: views, options with designated initialisers, and Status, header-only over the C ABI (tileloss.h).
//
//   std::vector<float> logits(2 * 5), dlogits(2 * 5);
//   std::vector<std::int64_t> labels = {3, -100};
//   float loss = 0;
//   const tileloss::Status status = tileloss::cross_entropy_value_and_grad(
//       {.logits = tileloss::Matrix(logits, 2, 5), .labels = labels, .loss = tileloss::Vector(&loss, 1),
//        .dlogits = tileloss::Matrix(dlogits, 2, 5)},
//       {.label_smoothing = 0.1});
//   if (!status) std::puts(status.message().c_str());
//
// Views never own and cannot be built from temporaries; a default-constructed view means "absent". No function here throws, but
// for RowState and Plan::describe, which may throw std::bad_alloc or std::length_error. Formulas, special values and determinism:
// tileloss.h and docs/.
#ifndef TILELOSS_TILELOSS_HPP_
#define TILELOSS_TILELOSS_HPP_

#if __cplusplus < 202002L
#error "tileloss.hpp needs C++20 (-std=c++20, or CMake's cxx_std_20); tileloss.h is for older C++ and for C"
#endif

#include <tileloss/tileloss.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tileloss/arguments.hpp>
#include <utility>

namespace tileloss {
inline namespace v0 {

// ---------------------------------------------------------------------------------------------------------- plan and run

enum class Isa : std::int32_t {
  kAuto = TILELOSS_ISA_AUTO,
  kBaseline = TILELOSS_ISA_BASELINE,
  kAvx2 = TILELOSS_ISA_AVX2,
  kAvx512 = TILELOSS_ISA_AVX512,
  kAvx512Bf16 = TILELOSS_ISA_AVX512_BF16,
  kAvx512Amx = TILELOSS_ISA_AVX512_AMX,
  kNeon = TILELOSS_ISA_NEON,
  kNeonBf16 = TILELOSS_ISA_NEON_BF16
};
enum class Schedule : std::int32_t {
  kAuto = TILELOSS_SCHEDULE_AUTO,
  kStash = TILELOSS_SCHEDULE_STASH,
  kRecompute = TILELOSS_SCHEDULE_RECOMPUTE,
  kSweeps = TILELOSS_SCHEDULE_SWEEPS
};
enum class Pass : std::int32_t {
  kForward = TILELOSS_FORWARD,
  kBackward = TILELOSS_BACKWARD,
  kValueAndGrad = TILELOSS_VALUE_AND_GRAD,
  kFromRowState = TILELOSS_FROM_ROW_STATE
};

inline const char* name(Isa isa) noexcept { return tileloss_isa_name(static_cast<tileloss_isa>(isa)); }
inline const char* name(Schedule schedule) noexcept { return tileloss_schedule_name(static_cast<tileloss_schedule>(schedule)); }
inline bool supported(Isa isa) noexcept { return tileloss_isa_supported(static_cast<tileloss_isa>(isa)) != 0; }
inline std::int32_t default_threads() noexcept { return tileloss_default_threads(); }
inline const char* version() noexcept { return tileloss_version(); }

// Hints for the planner; what is left at its default is the planner's choice. Meaning: tileloss_cpu_plan_options.
struct CpuPlanOptions {
  Isa isa = Isa::kAuto;
  Schedule schedule = Schedule::kAuto;
  std::int32_t threads = 0;
  std::int64_t row_block = 0;
  std::int64_t vocab_block = 0;
  std::int64_t chunk_columns = 0;

  [[nodiscard]] tileloss_cpu_plan_options c() const noexcept {
    return {static_cast<tileloss_isa>(isa),
            static_cast<tileloss_schedule>(schedule),
            threads,
            0,
            row_block,
            vocab_block,
            chunk_columns};
  }
};

// Meaning: tileloss_cuda_plan_options.
struct CudaPlanOptions {
  tileloss_cuda_kernel kernel = TILELOSS_CUDA_KERNEL_AUTO;
  Schedule schedule = Schedule::kAuto;
  std::int64_t row_block = 0;
  std::int64_t vocab_block = 0;
  std::int64_t chunk_columns = 0;

  [[nodiscard]] tileloss_cuda_plan_options c() const noexcept {
    return {kernel, static_cast<tileloss_schedule>(schedule), row_block, vocab_block, chunk_columns};
  }
};

struct PlanOptions {
  std::int64_t workspace_bytes = 0;
  CpuPlanOptions cpu = {};
  CudaPlanOptions cuda = {};

  [[nodiscard]] tileloss_plan_options c() const noexcept {
    tileloss_plan_options options;
    tileloss_plan_options_init(&options);
    options.workspace_bytes = workspace_bytes;
    options.cpu = cpu.c();
    options.cuda = cuda.c();
    return options;
  }
};

// What a call will do. A plain value: copy and keep it; it fits every call with the same shapes, strides and options.
class Plan {
 public:
  Plan() noexcept { tileloss_plan_init(&c_); }
  explicit Plan(const tileloss_plan& plan) noexcept : c_(plan) {}

  [[nodiscard]] std::string_view function() const& noexcept { return c_.function; }
  std::string_view function() const&& = delete;
  [[nodiscard]] Pass pass() const noexcept { return static_cast<Pass>(c_.pass); }
  [[nodiscard]] std::int64_t workspace_bytes() const noexcept { return c_.workspace_bytes; }
  [[nodiscard]] double predicted_ms() const noexcept { return c_.predicted_ms; }
  // What its backend will do; null on another device.
  [[nodiscard]] const tileloss_cpu_plan* cpu() const& noexcept { return c_.device_type == TILELOSS_CPU ? &c_.cpu : nullptr; }
  const tileloss_cpu_plan* cpu() const&& = delete;
  // What the workspace is made of: name and bytes of each part.
  [[nodiscard]] std::span<const tileloss_plan_buffer> buffers() const& noexcept {
    return {c_.buffers, static_cast<std::size_t>(c_.buffer_count)};
  }
  std::span<const tileloss_plan_buffer> buffers() const&& = delete;  // of a plan that is gone
  [[nodiscard]] const tileloss_plan& c() const noexcept { return c_; }
  // A line a fact, or one JSON object; empty for a plan that was never made. May throw std::bad_alloc.
  [[nodiscard]] std::string describe(tileloss_text_format format = TILELOSS_TEXT) const {
    std::size_t needed = 0;
    if (tileloss_plan_describe(&c_, format, nullptr, 0, &needed) != TILELOSS_OK) return {};
    std::string text(needed, '\0');
    (void)tileloss_plan_describe(&c_, format, text.data(), needed, nullptr);
    text.pop_back();
    return text;
  }

 private:
  tileloss_plan c_;
};

// One unit of the library's work, handed to the host's threads.
struct Task {
  tileloss_task function;
  void* data;
  void operator()(std::int64_t index) const { function(data, index); }
};

// The caller's threads, lent for the time of a call. The callable is held by reference, must outlive the executor and must not
// throw.
class Executor {
 public:
  // parallel_for(std::int64_t count, Task task): task(i) once for every i in [0, count), then return.
  template <std::invocable<std::int64_t, Task> Function>
  static Executor from_parallel_for(Function& parallel_for, std::int32_t threads) noexcept {
    Executor executor(&parallel_for, threads);
    executor.c_.parallel_for = [](void* context, std::int64_t count, tileloss_task task, void* data) noexcept {
      (*static_cast<Function*>(context))(count, Task{task, data});
    };
    return executor;
  }
  // schedule(Task task, std::int64_t index): task(index) once, at some time, on some thread, now or later.
  template <std::invocable<Task, std::int64_t> Function>
  static Executor from_schedule(Function& schedule, std::int32_t threads) noexcept {
    Executor executor(&schedule, threads);
    executor.c_.schedule = [](void* context, tileloss_task task, void* data, std::int64_t index) noexcept {
      (*static_cast<Function*>(context))(Task{task, data}, index);
    };
    return executor;
  }
  [[nodiscard]] const tileloss_executor* c() const noexcept { return &c_; }

 private:
  Executor(const void* context, std::int32_t threads) noexcept {
    tileloss_executor_init(&c_);
    c_.context = const_cast<void*>(context);  // cast back to the callable's own type before it is called
    c_.threads = threads;
  }
  tileloss_executor c_;
};

// How to run. Everything is optional: no plan plans first, no workspace allocates what the plan asks for, no executor takes the
// built-in pool.
struct RunOptions {
  const Plan* plan = nullptr;
  std::span<std::byte> workspace = {};  // at least plan->workspace_bytes(); alignment 64
  const Executor* executor = nullptr;
  void* stream = nullptr;  // the device's; the CPU has none

  [[nodiscard]] const tileloss_plan* c_plan() const noexcept { return plan == nullptr ? nullptr : &plan->c(); }
  [[nodiscard]] tileloss_run c() const noexcept {
    tileloss_run run;
    tileloss_run_init(&run);
    run.workspace = workspace.data();
    run.workspace_bytes = workspace.size();
    run.executor = executor == nullptr ? nullptr : executor->c();
    run.stream = stream;
    return run;
  }
};

// gradient *= *factor, in place. Meaning: tileloss_scale_gradient.
inline Status scale_gradient(const MutableLogitsView& gradient, const float* factor, const RunOptions& options = {}) noexcept {
  const tileloss_run run = options.c();
  return Status(tileloss_scale_gradient(&gradient.c(), factor, &run));
}

// What calls on a device found wrong while they ran; on the CPU they say so themselves. Meaning: tileloss_check_errors.
inline Status check_errors(tileloss_device_type device_type, std::int32_t device_index = 0, void* stream = nullptr) noexcept {
  return Status(tileloss_check_errors(device_type, device_index, stream));
}

struct [[nodiscard]] PlanResult {
  Status status;
  Plan plan;
};

namespace detail {

template <class Options>
PlanResult make_plan(const char* function, Pass pass, const tileloss_args& c_args, const Options& options,
                     const PlanOptions& hints, const Executor* executor) noexcept {
  const tileloss_plan_options c_hints = hints.c();
  tileloss_plan plan;
  tileloss_plan_init(&plan);
  Status status(tileloss_make_plan(function, static_cast<tileloss_pass>(pass), &c_args, &options, &c_hints,
                                   executor == nullptr ? nullptr : executor->c(), &plan));
  return {std::move(status), Plan(plan)};
}

template <class Options>
Status call(const char* function, Pass pass, const tileloss_args& c_args, const Options& options,
            const RunOptions& run) noexcept {
  const tileloss_run c_run = run.c();
  return Status(tileloss_call(function, static_cast<tileloss_pass>(pass), &c_args, &options, run.c_plan(), &c_run));
}

}  // namespace detail

// Validates shapes, types and options without touching data (views may hold null) and says what a call would do. Errors:
// kInvalidArgument naming the argument, kWorkspaceTooSmall naming the bytes, kUnsupported.
//   auto [status, plan] = tileloss::plan(tileloss::Pass::kForward, tileloss::CrossEntropyArgs{...});
template <class Args>
PlanResult plan(Pass pass, const Args& args, const typename Args::Options& options = {}, const PlanOptions& hints = {},
                const Executor* executor = nullptr) noexcept {
  return detail::make_plan(Args::kFunction, pass, args.c(), options, hints, executor);
}
// The same, fused with the LM head: `args` without logits and dlogits.
template <class Args>
PlanResult linear_plan(Pass pass, const LinearHead& head, const Args& args, const typename Args::Options& options = {},
                       const PlanOptions& hints = {}, const Executor* executor = nullptr) noexcept {
  return detail::make_plan(Args::kLinearFunction, pass, head.c(args), options, hints, executor);
}
inline PlanResult linear_plan(Pass pass, const LinearHead& head, const TeacherHead& teacher, const DistillationArgs& args,
                              const DistillationOptions& options = {}, const PlanOptions& hints = {},
                              const Executor* executor = nullptr) noexcept {
  return detail::make_plan(DistillationArgs::kLinearFunction, pass, teacher.c(head, args), options, hints, executor);
}

// The functions. cross_entropy, ... is the forward, *_backward gives the gradients for the upstream ones, *_value_and_grad both
// at once, each row while it is in cache: the fast way to train; *_from_row_state gives the forward's outputs from args.row_state
// alone, once the states of all vocabulary shards are merged in it. linear_* are fused with the LM head: `args` without logits
// and dlogits; docs/users/memory.md says what a call holds. Errors: those of plan, kLabelOutOfRange naming row and label before
// anything is written, kPlanMismatch, kOutOfMemory.

// generated: functions in C++, by ./dev generate from src/schema/table.toml
// logp, lse and the other row outputs; its backward takes logp_grad, lse_grad, entropy_grad and mean_logit_grad, so that any loss
// written on top of them differentiates exactly: dL/dz_j = g_logp [j = y] + p_j (-g_logp + g_lse - g_H (H + log p_j)) + g_M / V,
// V the valid columns. Of labels [N,K] (labels_per_row) sum_k g_logp_k [j = y_k] and sum_k g_logp_k stand for the terms of one.
inline Status logprobs(const LogprobsArgs& args, const LogprobsOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("logprobs", Pass::kForward, args.c(), options, run);
}
inline Status logprobs_backward(const LogprobsArgs& args, const LogprobsOptions& options = {},
                                const RunOptions& run = {}) noexcept {
  return detail::call("logprobs", Pass::kBackward, args.c(), options, run);
}
inline Status logprobs_from_row_state(const LogprobsArgs& args, const LogprobsOptions& options = {},
                                      const RunOptions& run = {}) noexcept {
  return detail::call("logprobs", Pass::kFromRowState, args.c(), options, run);
}

// loss_i = w_i [ (1-s) c_y (-logp_i) + (s/V) sum_j c_j (-log p_ij) ] + zeta w_i lse_i^2, reduced. mean divides the first part by
// the sum of w_i c_y (as PyTorch) and the second by the sum of w_i (as Liger) over the rows that are not ignored, both by
// num_items when given; a denominator of 0 gives 0.
inline Status cross_entropy(const CrossEntropyArgs& args, const CrossEntropyOptions& options = {},
                            const RunOptions& run = {}) noexcept {
  return detail::call("cross_entropy", Pass::kForward, args.c(), options, run);
}
inline Status cross_entropy_backward(const CrossEntropyArgs& args, const CrossEntropyOptions& options = {},
                                     const RunOptions& run = {}) noexcept {
  return detail::call("cross_entropy", Pass::kBackward, args.c(), options, run);
}
inline Status cross_entropy_value_and_grad(const CrossEntropyArgs& args, const CrossEntropyOptions& options = {},
                                           const RunOptions& run = {}) noexcept {
  return detail::call("cross_entropy", Pass::kValueAndGrad, args.c(), options, run);
}
inline Status cross_entropy_from_row_state(const CrossEntropyArgs& args, const CrossEntropyOptions& options = {},
                                           const RunOptions& run = {}) noexcept {
  return detail::call("cross_entropy", Pass::kFromRowState, args.c(), options, run);
}

// The GRPO family. Per token: l * (off-policy mask) * (entropy mask) * (sampler ratio) + beta * KL - entropy bonus, aggregated
// over sequences and tokens; docs/users/losses.md has every formula, and says which losses sweep the logits twice, as the
// coefficients of a row need other rows.
inline Status policy_loss(const PolicyLossArgs& args, const PolicyLossOptions& options = {},
                          const RunOptions& run = {}) noexcept {
  return detail::call("policy_loss", Pass::kForward, args.c(), options, run);
}
inline Status policy_loss_backward(const PolicyLossArgs& args, const PolicyLossOptions& options = {},
                                   const RunOptions& run = {}) noexcept {
  return detail::call("policy_loss", Pass::kBackward, args.c(), options, run);
}
inline Status policy_loss_value_and_grad(const PolicyLossArgs& args, const PolicyLossOptions& options = {},
                                         const RunOptions& run = {}) noexcept {
  return detail::call("policy_loss", Pass::kValueAndGrad, args.c(), options, run);
}
inline Status policy_loss_from_row_state(const PolicyLossArgs& args, const PolicyLossOptions& options = {},
                                         const RunOptions& run = {}) noexcept {
  return detail::call("policy_loss", Pass::kFromRowState, args.c(), options, run);
}

// Distillation: the divergence of the student's distribution (logits) from the teacher's (teacher_logits), alone or mixed with
// the cross-entropy of the labels:
//   loss_i = w_i [ label_weight (-logp_i) + divergence_weight s D_i ],  s = 1, or T^2 with scale_by_temperature_squared
// where logp, and the row output of that name, is at label_temperature, and all else at temperature. mean divides by the sum of
// the w_i of the rows in use, or by num_items; 0 where that is 0. Rows are in use unless their label is ignore_index or their
// mask is 0; labels may be left out where label_weight is 0. The gradient is the student's. _backward repeats the forward's sums;
// _value_and_grad makes them once. Shards of the vocabulary take four steps. 1: logprobs on each shard gives the row states of
// the student, the teacher and, with label_temperature, the label; the caller merges each over the shards. 2: the forward, with
// row_state and pair_state and no output, gives each shard's sums; the caller adds them up. 3: the pass TILELOSS_FROM_ROW_STATE
// gives loss and outputs. 4: _backward on each shard gives its gradient.
inline Status distillation(const DistillationArgs& args, const DistillationOptions& options = {},
                           const RunOptions& run = {}) noexcept {
  return detail::call("distillation", Pass::kForward, args.c(), options, run);
}
inline Status distillation_backward(const DistillationArgs& args, const DistillationOptions& options = {},
                                    const RunOptions& run = {}) noexcept {
  return detail::call("distillation", Pass::kBackward, args.c(), options, run);
}
inline Status distillation_value_and_grad(const DistillationArgs& args, const DistillationOptions& options = {},
                                          const RunOptions& run = {}) noexcept {
  return detail::call("distillation", Pass::kValueAndGrad, args.c(), options, run);
}

// Cross-entropy with class probabilities q (target_probs) instead of labels, as PyTorch has it:
//   loss_i = w_i sum_j c_j q'_j (-log p_ij),  q' = (1-s) q + s/V
// with label smoothing s, class weights c, token weights w. mean divides by the sum of the w_i of the rows in use (PyTorch: their
// number), or by num_items; 0 where that is 0. q need not sum to 1; q'_j = 0 has no part in the sum. Labels are of no use but for
// ignore_index and the row outputs logp and correct. Shards of the vocabulary: as distillation's.
inline Status soft_cross_entropy(const SoftCrossEntropyArgs& args, const SoftCrossEntropyOptions& options = {},
                                 const RunOptions& run = {}) noexcept {
  return detail::call("soft_cross_entropy", Pass::kForward, args.c(), options, run);
}
inline Status soft_cross_entropy_backward(const SoftCrossEntropyArgs& args, const SoftCrossEntropyOptions& options = {},
                                          const RunOptions& run = {}) noexcept {
  return detail::call("soft_cross_entropy", Pass::kBackward, args.c(), options, run);
}
inline Status soft_cross_entropy_value_and_grad(const SoftCrossEntropyArgs& args, const SoftCrossEntropyOptions& options = {},
                                                const RunOptions& run = {}) noexcept {
  return detail::call("soft_cross_entropy", Pass::kValueAndGrad, args.c(), options, run);
}

// Distillation from a teacher of which K columns are known, by teacher_ids and teacher_logprobs: distillation's formula and
// options, without a transform of the teacher's, with options.tail for the other columns. Cross-entropy is of the whole p.
inline Status sparse_distillation(const SparseDistillationArgs& args, const SparseDistillationOptions& options = {},
                                  const RunOptions& run = {}) noexcept {
  return detail::call("sparse_distillation", Pass::kForward, args.c(), options, run);
}
inline Status sparse_distillation_backward(const SparseDistillationArgs& args, const SparseDistillationOptions& options = {},
                                           const RunOptions& run = {}) noexcept {
  return detail::call("sparse_distillation", Pass::kBackward, args.c(), options, run);
}
inline Status sparse_distillation_value_and_grad(const SparseDistillationArgs& args,
                                                 const SparseDistillationOptions& options = {},
                                                 const RunOptions& run = {}) noexcept {
  return detail::call("sparse_distillation", Pass::kValueAndGrad, args.c(), options, run);
}

// The two sweeps alone, for a loss that is computed elsewhere: forward into row_state, with the arrays that are there, and
// backward from row_state and four coefficients of each row,
//   dL/dz_j = target [j = y] + p_j (prob + prob_logp log p_j) + uniform c_j
// A label that is no class is one of another shard, and no error: the state's label_logit is -inf then. By name: "sweep".
inline Status forward_sweep(const SweepArgs& args, const SweepOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("sweep", Pass::kForward, args.c(), options, run);
}
inline Status backward_sweep(const SweepArgs& args, const SweepOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("sweep", Pass::kBackward, args.c(), options, run);
}

inline Status linear_logprobs(const LinearHead& head, const LogprobsArgs& args, const LogprobsOptions& options = {},
                              const RunOptions& run = {}) noexcept {
  return detail::call("linear_logprobs", Pass::kForward, head.c(args), options, run);
}
inline Status linear_logprobs_backward(const LinearHead& head, const LogprobsArgs& args, const LogprobsOptions& options = {},
                                       const RunOptions& run = {}) noexcept {
  return detail::call("linear_logprobs", Pass::kBackward, head.c(args), options, run);
}
inline Status linear_logprobs_from_row_state(const LinearHead& head, const LogprobsArgs& args,
                                             const LogprobsOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_logprobs", Pass::kFromRowState, head.c(args), options, run);
}

inline Status linear_cross_entropy(const LinearHead& head, const CrossEntropyArgs& args, const CrossEntropyOptions& options = {},
                                   const RunOptions& run = {}) noexcept {
  return detail::call("linear_cross_entropy", Pass::kForward, head.c(args), options, run);
}
inline Status linear_cross_entropy_backward(const LinearHead& head, const CrossEntropyArgs& args,
                                            const CrossEntropyOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_cross_entropy", Pass::kBackward, head.c(args), options, run);
}
inline Status linear_cross_entropy_value_and_grad(const LinearHead& head, const CrossEntropyArgs& args,
                                                  const CrossEntropyOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_cross_entropy", Pass::kValueAndGrad, head.c(args), options, run);
}
inline Status linear_cross_entropy_from_row_state(const LinearHead& head, const CrossEntropyArgs& args,
                                                  const CrossEntropyOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_cross_entropy", Pass::kFromRowState, head.c(args), options, run);
}

inline Status linear_policy_loss(const LinearHead& head, const PolicyLossArgs& args, const PolicyLossOptions& options = {},
                                 const RunOptions& run = {}) noexcept {
  return detail::call("linear_policy_loss", Pass::kForward, head.c(args), options, run);
}
inline Status linear_policy_loss_backward(const LinearHead& head, const PolicyLossArgs& args,
                                          const PolicyLossOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_policy_loss", Pass::kBackward, head.c(args), options, run);
}
inline Status linear_policy_loss_value_and_grad(const LinearHead& head, const PolicyLossArgs& args,
                                                const PolicyLossOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_policy_loss", Pass::kValueAndGrad, head.c(args), options, run);
}
inline Status linear_policy_loss_from_row_state(const LinearHead& head, const PolicyLossArgs& args,
                                                const PolicyLossOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_policy_loss", Pass::kFromRowState, head.c(args), options, run);
}

inline Status linear_distillation(const LinearHead& head, const TeacherHead& teacher, const DistillationArgs& args,
                                  const DistillationOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_distillation", Pass::kForward, teacher.c(head, args), options, run);
}
inline Status linear_distillation_backward(const LinearHead& head, const TeacherHead& teacher, const DistillationArgs& args,
                                           const DistillationOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_distillation", Pass::kBackward, teacher.c(head, args), options, run);
}
inline Status linear_distillation_value_and_grad(const LinearHead& head, const TeacherHead& teacher, const DistillationArgs& args,
                                                 const DistillationOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_distillation", Pass::kValueAndGrad, teacher.c(head, args), options, run);
}

inline Status linear_soft_cross_entropy(const LinearHead& head, const SoftCrossEntropyArgs& args,
                                        const SoftCrossEntropyOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_soft_cross_entropy", Pass::kForward, head.c(args), options, run);
}
inline Status linear_soft_cross_entropy_backward(const LinearHead& head, const SoftCrossEntropyArgs& args,
                                                 const SoftCrossEntropyOptions& options = {},
                                                 const RunOptions& run = {}) noexcept {
  return detail::call("linear_soft_cross_entropy", Pass::kBackward, head.c(args), options, run);
}
inline Status linear_soft_cross_entropy_value_and_grad(const LinearHead& head, const SoftCrossEntropyArgs& args,
                                                       const SoftCrossEntropyOptions& options = {},
                                                       const RunOptions& run = {}) noexcept {
  return detail::call("linear_soft_cross_entropy", Pass::kValueAndGrad, head.c(args), options, run);
}

inline Status linear_sparse_distillation(const LinearHead& head, const SparseDistillationArgs& args,
                                         const SparseDistillationOptions& options = {}, const RunOptions& run = {}) noexcept {
  return detail::call("linear_sparse_distillation", Pass::kForward, head.c(args), options, run);
}
inline Status linear_sparse_distillation_backward(const LinearHead& head, const SparseDistillationArgs& args,
                                                  const SparseDistillationOptions& options = {},
                                                  const RunOptions& run = {}) noexcept {
  return detail::call("linear_sparse_distillation", Pass::kBackward, head.c(args), options, run);
}
inline Status linear_sparse_distillation_value_and_grad(const LinearHead& head, const SparseDistillationArgs& args,
                                                        const SparseDistillationOptions& options = {},
                                                        const RunOptions& run = {}) noexcept {
  return detail::call("linear_sparse_distillation", Pass::kValueAndGrad, head.c(args), options, run);
}

inline Status linear_forward_sweep(const LinearHead& head, const SweepArgs& args, const SweepOptions& options = {},
                                   const RunOptions& run = {}) noexcept {
  return detail::call("linear_sweep", Pass::kForward, head.c(args), options, run);
}
inline Status linear_backward_sweep(const LinearHead& head, const SweepArgs& args, const SweepOptions& options = {},
                                    const RunOptions& run = {}) noexcept {
  return detail::call("linear_sweep", Pass::kBackward, head.c(args), options, run);
}
// end of generated

}  // namespace v0
}  // namespace tileloss

#endif  // TILELOSS_TILELOSS_HPP_
