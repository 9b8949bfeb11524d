// A case's call: its arguments, and what the kernels make of them.
#pragma once

#include <tileloss/tileloss.h>

#include <array>
#include <string>
#include <vector>

#include "judge/inputs/config.h"
#include "judge/inputs/inputs.h"
#include "judge/oracles/row_outputs.h"

namespace tileloss::tools {

// A gradient with the LM head; dbias is a column. Without `data` it is a shape alone.
struct LinearGradient {
  LinearOutput which;
  oracle::StoredMatrix view;
  HugeBuffer data, before;  // before: what the call adds to, if it does

  oracle::StoredMatrix before_view() const {
    oracle::StoredMatrix matrix = view;
    matrix.data = before.data();
    return matrix;
  }
};

// A gradient and the way it was computed.
struct CheckedGradient {
  std::string name;    // "value_and_grad/", before the names of its gates
  HugeBuffer dlogits;  // empty with the LM head, which has `linear`: those that are there, in their order
  oracle::NumberFormat dlogits_format = oracle::NumberFormat::kFloat32;
  std::vector<LinearGradient> linear;
};

// What mutants drop or count twice of outputs whose tiles nobody knows: so many columns.
inline constexpr int64_t kMutantTile = 64;

// Whatever was not asked for, or is not there, is empty.
struct KernelResults {
  // Of the forward, for every row.
  std::vector<float> per_loss;
  std::array<std::vector<double>, kOutputCount> outputs;
  std::vector<float> loss;         // of value_and_grad: one, or one per row
  std::vector<double> fused_logp;  // of value_and_grad: must have the forward's bits
  std::vector<float> forward_loss;
  std::vector<float> metrics, forward_metrics;  // of value_and_grad and of the forward
  // The forward's row state, as far as it was asked for.
  std::vector<float> state_max, state_sum, state_label_logit, state_entropy_sum;
  // value_and_grad (or backward alone, for a function without a loss), and backward from the forward's row state, or by itself
  // for a function that has none.
  std::vector<CheckedGradient> gradients;
  tileloss_plan plan;          // of the first gradient
  int64_t tile = kMutantTile;  // columns
  double forward_s = 0;
  double kernel_s = 0;  // the first gradient
  double backward_s = 0;
};

tileloss_vector vector_of(const std::vector<float>& values);

// What every call has in common; `logits` unless there is an LM head.
tileloss_args base_args(const CheckInputs& inputs, const void* logits);
void add_upstream(const GradcheckConfig& config, const CheckInputs& inputs, tileloss_args& args);
// Plans the call that makes the gradient, on shapes alone.
void plan_shapes(const GradcheckConfig& config, const CheckInputs& inputs);

// With the LM head: the gradients that the config asks for, as shapes; their memory; and as arguments.
std::vector<LinearGradient> linear_gradients(const GradcheckConfig& config, const CheckInputs& inputs);
void allocate(const GradcheckConfig& config, LinearGradient& gradient);
void add_gradients(const std::vector<LinearGradient>& gradients, tileloss_args& args);

}  // namespace tileloss::tools
