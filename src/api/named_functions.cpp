// A function of its own for every name and pass that tileloss_call knows.
#include <tileloss/tileloss.h>

// `of`: the function whose options it takes.
#define NAMED(typed, of, name, pass)                                                                                             \
  tileloss_status tileloss_##typed(const tileloss_args* args, const tileloss_##of##_options* options, const tileloss_plan* plan, \
                                   const tileloss_run* run) {                                                                    \
    return tileloss_call(name, pass, args, options, plan, run);                                                                  \
  }

extern "C" {

// clang-format off
// generated: named functions, by ./dev generate from src/schema/table.toml
NAMED(logprobs, logprobs, "logprobs", TILELOSS_FORWARD)
NAMED(logprobs_backward, logprobs, "logprobs", TILELOSS_BACKWARD)
NAMED(logprobs_from_row_state, logprobs, "logprobs", TILELOSS_FROM_ROW_STATE)
NAMED(cross_entropy, cross_entropy, "cross_entropy", TILELOSS_FORWARD)
NAMED(cross_entropy_backward, cross_entropy, "cross_entropy", TILELOSS_BACKWARD)
NAMED(cross_entropy_value_and_grad, cross_entropy, "cross_entropy", TILELOSS_VALUE_AND_GRAD)
NAMED(cross_entropy_from_row_state, cross_entropy, "cross_entropy", TILELOSS_FROM_ROW_STATE)
NAMED(policy_loss, policy_loss, "policy_loss", TILELOSS_FORWARD)
NAMED(policy_loss_backward, policy_loss, "policy_loss", TILELOSS_BACKWARD)
NAMED(policy_loss_value_and_grad, policy_loss, "policy_loss", TILELOSS_VALUE_AND_GRAD)
NAMED(policy_loss_from_row_state, policy_loss, "policy_loss", TILELOSS_FROM_ROW_STATE)
NAMED(distillation, distillation, "distillation", TILELOSS_FORWARD)
NAMED(distillation_backward, distillation, "distillation", TILELOSS_BACKWARD)
NAMED(distillation_value_and_grad, distillation, "distillation", TILELOSS_VALUE_AND_GRAD)
NAMED(soft_cross_entropy, soft_cross_entropy, "soft_cross_entropy", TILELOSS_FORWARD)
NAMED(soft_cross_entropy_backward, soft_cross_entropy, "soft_cross_entropy", TILELOSS_BACKWARD)
NAMED(soft_cross_entropy_value_and_grad, soft_cross_entropy, "soft_cross_entropy", TILELOSS_VALUE_AND_GRAD)
NAMED(sparse_distillation, sparse_distillation, "sparse_distillation", TILELOSS_FORWARD)
NAMED(sparse_distillation_backward, sparse_distillation, "sparse_distillation", TILELOSS_BACKWARD)
NAMED(sparse_distillation_value_and_grad, sparse_distillation, "sparse_distillation", TILELOSS_VALUE_AND_GRAD)
NAMED(forward_sweep, sweep, "sweep", TILELOSS_FORWARD)
NAMED(backward_sweep, sweep, "sweep", TILELOSS_BACKWARD)
NAMED(linear_logprobs, logprobs, "linear_logprobs", TILELOSS_FORWARD)
NAMED(linear_logprobs_backward, logprobs, "linear_logprobs", TILELOSS_BACKWARD)
NAMED(linear_logprobs_from_row_state, logprobs, "linear_logprobs", TILELOSS_FROM_ROW_STATE)
NAMED(linear_cross_entropy, cross_entropy, "linear_cross_entropy", TILELOSS_FORWARD)
NAMED(linear_cross_entropy_backward, cross_entropy, "linear_cross_entropy", TILELOSS_BACKWARD)
NAMED(linear_cross_entropy_value_and_grad, cross_entropy, "linear_cross_entropy", TILELOSS_VALUE_AND_GRAD)
NAMED(linear_cross_entropy_from_row_state, cross_entropy, "linear_cross_entropy", TILELOSS_FROM_ROW_STATE)
NAMED(linear_policy_loss, policy_loss, "linear_policy_loss", TILELOSS_FORWARD)
NAMED(linear_policy_loss_backward, policy_loss, "linear_policy_loss", TILELOSS_BACKWARD)
NAMED(linear_policy_loss_value_and_grad, policy_loss, "linear_policy_loss", TILELOSS_VALUE_AND_GRAD)
NAMED(linear_policy_loss_from_row_state, policy_loss, "linear_policy_loss", TILELOSS_FROM_ROW_STATE)
NAMED(linear_distillation, distillation, "linear_distillation", TILELOSS_FORWARD)
NAMED(linear_distillation_backward, distillation, "linear_distillation", TILELOSS_BACKWARD)
NAMED(linear_distillation_value_and_grad, distillation, "linear_distillation", TILELOSS_VALUE_AND_GRAD)
NAMED(linear_soft_cross_entropy, soft_cross_entropy, "linear_soft_cross_entropy", TILELOSS_FORWARD)
NAMED(linear_soft_cross_entropy_backward, soft_cross_entropy, "linear_soft_cross_entropy", TILELOSS_BACKWARD)
NAMED(linear_soft_cross_entropy_value_and_grad, soft_cross_entropy, "linear_soft_cross_entropy", TILELOSS_VALUE_AND_GRAD)
NAMED(linear_sparse_distillation, sparse_distillation, "linear_sparse_distillation", TILELOSS_FORWARD)
NAMED(linear_sparse_distillation_backward, sparse_distillation, "linear_sparse_distillation", TILELOSS_BACKWARD)
NAMED(linear_sparse_distillation_value_and_grad, sparse_distillation, "linear_sparse_distillation", TILELOSS_VALUE_AND_GRAD)
NAMED(linear_forward_sweep, sweep, "linear_sweep", TILELOSS_FORWARD)
NAMED(linear_backward_sweep, sweep, "linear_sweep", TILELOSS_BACKWARD)
// end of generated
// clang-format on

}  // extern "C"
