// A function of its own for every name and pass that tileloss_call knows.
// Written by ./dev generate from src/schema/table.toml, which is the file to edit.
#include <tileloss/tileloss.h>

extern "C" {

tileloss_status tileloss_logprobs(const tileloss_args* args, const tileloss_logprobs_options* options, const tileloss_plan* plan,
                                  const tileloss_run* run) {
  return tileloss_call("logprobs", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_logprobs_backward(const tileloss_args* args, const tileloss_logprobs_options* options,
                                           const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("logprobs", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_logprobs_from_row_state(const tileloss_args* args, const tileloss_logprobs_options* options,
                                                 const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("logprobs", TILELOSS_FROM_ROW_STATE, args, options, plan, run);
}
tileloss_status tileloss_cross_entropy(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                       const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("cross_entropy", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_cross_entropy_backward(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                                const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("cross_entropy", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_cross_entropy_value_and_grad(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                                      const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("cross_entropy", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}
tileloss_status tileloss_cross_entropy_from_row_state(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                                      const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("cross_entropy", TILELOSS_FROM_ROW_STATE, args, options, plan, run);
}
tileloss_status tileloss_policy_loss(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                     const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("policy_loss", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_policy_loss_backward(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                              const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("policy_loss", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_policy_loss_value_and_grad(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                                    const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("policy_loss", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}
tileloss_status tileloss_policy_loss_from_row_state(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                                    const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("policy_loss", TILELOSS_FROM_ROW_STATE, args, options, plan, run);
}
tileloss_status tileloss_distillation(const tileloss_args* args, const tileloss_distillation_options* options,
                                      const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("distillation", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_distillation_backward(const tileloss_args* args, const tileloss_distillation_options* options,
                                               const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("distillation", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_distillation_value_and_grad(const tileloss_args* args, const tileloss_distillation_options* options,
                                                     const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("distillation", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}
tileloss_status tileloss_soft_cross_entropy(const tileloss_args* args, const tileloss_soft_cross_entropy_options* options,
                                            const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("soft_cross_entropy", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_soft_cross_entropy_backward(const tileloss_args* args,
                                                     const tileloss_soft_cross_entropy_options* options,
                                                     const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("soft_cross_entropy", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_soft_cross_entropy_value_and_grad(const tileloss_args* args,
                                                           const tileloss_soft_cross_entropy_options* options,
                                                           const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("soft_cross_entropy", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}
tileloss_status tileloss_sparse_distillation(const tileloss_args* args, const tileloss_sparse_distillation_options* options,
                                             const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("sparse_distillation", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_sparse_distillation_backward(const tileloss_args* args,
                                                      const tileloss_sparse_distillation_options* options,
                                                      const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("sparse_distillation", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_sparse_distillation_value_and_grad(const tileloss_args* args,
                                                            const tileloss_sparse_distillation_options* options,
                                                            const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("sparse_distillation", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}
tileloss_status tileloss_forward_sweep(const tileloss_args* args, const tileloss_sweep_options* options,
                                       const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("sweep", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_backward_sweep(const tileloss_args* args, const tileloss_sweep_options* options,
                                        const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("sweep", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_logprobs(const tileloss_args* args, const tileloss_logprobs_options* options,
                                         const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_logprobs", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_logprobs_backward(const tileloss_args* args, const tileloss_logprobs_options* options,
                                                  const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_logprobs", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_logprobs_from_row_state(const tileloss_args* args, const tileloss_logprobs_options* options,
                                                        const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_logprobs", TILELOSS_FROM_ROW_STATE, args, options, plan, run);
}
tileloss_status tileloss_linear_cross_entropy(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                              const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_cross_entropy", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_cross_entropy_backward(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                                       const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_cross_entropy", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_cross_entropy_value_and_grad(const tileloss_args* args,
                                                             const tileloss_cross_entropy_options* options,
                                                             const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}
tileloss_status tileloss_linear_cross_entropy_from_row_state(const tileloss_args* args,
                                                             const tileloss_cross_entropy_options* options,
                                                             const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_cross_entropy", TILELOSS_FROM_ROW_STATE, args, options, plan, run);
}
tileloss_status tileloss_linear_policy_loss(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                            const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_policy_loss", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_policy_loss_backward(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                                     const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_policy_loss", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_policy_loss_value_and_grad(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                                           const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_policy_loss", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}
tileloss_status tileloss_linear_policy_loss_from_row_state(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                                           const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_policy_loss", TILELOSS_FROM_ROW_STATE, args, options, plan, run);
}
tileloss_status tileloss_linear_distillation(const tileloss_args* args, const tileloss_distillation_options* options,
                                             const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_distillation", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_distillation_backward(const tileloss_args* args, const tileloss_distillation_options* options,
                                                      const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_distillation", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_distillation_value_and_grad(const tileloss_args* args,
                                                            const tileloss_distillation_options* options,
                                                            const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_distillation", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}
tileloss_status tileloss_linear_soft_cross_entropy(const tileloss_args* args, const tileloss_soft_cross_entropy_options* options,
                                                   const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_soft_cross_entropy", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_soft_cross_entropy_backward(const tileloss_args* args,
                                                            const tileloss_soft_cross_entropy_options* options,
                                                            const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_soft_cross_entropy", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_soft_cross_entropy_value_and_grad(const tileloss_args* args,
                                                                  const tileloss_soft_cross_entropy_options* options,
                                                                  const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_soft_cross_entropy", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}
tileloss_status tileloss_linear_sparse_distillation(const tileloss_args* args,
                                                    const tileloss_sparse_distillation_options* options,
                                                    const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_sparse_distillation", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_sparse_distillation_backward(const tileloss_args* args,
                                                             const tileloss_sparse_distillation_options* options,
                                                             const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_sparse_distillation", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_sparse_distillation_value_and_grad(const tileloss_args* args,
                                                                   const tileloss_sparse_distillation_options* options,
                                                                   const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_sparse_distillation", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}
tileloss_status tileloss_linear_forward_sweep(const tileloss_args* args, const tileloss_sweep_options* options,
                                              const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_sweep", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_backward_sweep(const tileloss_args* args, const tileloss_sweep_options* options,
                                               const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_sweep", TILELOSS_BACKWARD, args, options, plan, run);
}

}  // extern "C"
