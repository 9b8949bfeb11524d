// The inputs of a check, and what the kernels make of them.
#ifndef TILELOSS_CHECK_GRADCHECK_RUN_H_
#define TILELOSS_CHECK_GRADCHECK_RUN_H_

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "check/gradcheck_config.h"
#include "check/linear_metric.h"
#include "check/row_outputs.h"
#include "support/abi.h"
#include "support/memory.h"
#include "support/policy_inputs.h"
#include "support/thread_team.h"

namespace tileloss::tools {

// One value for all rows, or one per row; empty: not given.
using Upstream = std::vector<float>;

// Fused with the LM head: in place of the logits.
struct LinearTensors {
  HugeBuffer hidden, head;
  reference::StoredMatrix hidden_view, head_view;
  std::vector<float> bias;
  // Once the inputs stand.
  std::optional<reference::LinearOperands> operands;
  std::optional<LinearNorms> norms;
};

struct CheckInputs {
  reference::NumberFormat format = reference::NumberFormat::kFloat32;
  int64_t batch_size = 0;
  int64_t seq_len = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t valid = 0;  // columns that are not padding
  int64_t ignore_index = 0;
  int64_t group_rows = 0;  // > 0: rows of a group, behind each of which lies a row that is nobody's
  // The rows that are ignored or nobody's and the padding hold NaN, all bits set: no result may depend on them.
  HugeBuffer logits;
  HugeBuffer teacher;  // of distillation: the teacher's, which lie as they do
  bool has_teacher = false;
  HugeBuffer probs;  // of soft_cross_entropy: class probabilities, in rows and groups as the logits
  bool has_probs = false;
  reference::NumberFormat probs_format = reference::NumberFormat::kFloat32;
  // Of sparse_distillation, [N,K].
  int64_t teacher_columns = 0;
  std::vector<int64_t> teacher_ids;
  std::vector<float> teacher_logprobs;
  std::optional<LinearTensors> linear, teacher_linear;
  std::vector<int64_t> labels;
  std::vector<float> token_weights;
  std::vector<float> class_weights;
  Upstream loss_grad, logp_grad, lse_grad, entropy_grad, mean_logit_grad;
  PolicyTensors policy;
  std::vector<uint8_t> used;          // policy losses: rows that are not ignored, and the oracle's first look at them
  std::vector<RowSummary> summaries;  // (all rows; those in use are filled)

  int64_t row_bytes() const { return row_bytes(format); }
  int64_t row_bytes(reference::NumberFormat of) const { return cols * static_cast<int64_t>(reference::format_info(of).bytes); }
  // Of logits and dlogits, in bytes.
  int64_t row_offset(int64_t row) const { return row_offset(row, format); }
  int64_t row_offset(int64_t row, reference::NumberFormat of) const {
    return (row + (group_rows > 0 ? row / group_rows : 0)) * row_bytes(of);
  }
  int64_t groups() const { return group_rows > 0 ? rows / group_rows : 0; }
  int64_t matrix_bytes() const { return matrix_bytes(format); }
  int64_t matrix_bytes(reference::NumberFormat of) const { return (rows + groups()) * row_bytes(of); }
  const char* row(int64_t index) const { return logits.data() + row_offset(index); }
  const char* teacher_row(int64_t index) const { return teacher.data() + row_offset(index); }
  const char* probs_row(int64_t index) const { return probs.data() + row_offset(index, probs_format); }
  // By its label or by the mask.
  bool is_ignored(int64_t row) const { return labels[static_cast<size_t>(row)] == ignore_index || !policy.in_use(row); }
};

// Plans the calls on shapes alone first, so that what the library refuses costs no time and no memory.
CheckInputs make_inputs(const GradcheckConfig& config, ThreadTeam& team);

// A gradient and the way it was computed; a tensor that is empty is not there.
struct CheckedGradient {
  std::string name;  // "value_and_grad/", before the names of its gates
  HugeBuffer dlogits;
  // Fused with the LM head.
  HugeBuffer dhidden, dhead, dhead_before;
  std::vector<float> dbias, dbias_before;
  // As they are stored.
  reference::NumberFormat dlogits_format = reference::NumberFormat::kFloat32;
  reference::NumberFormat dhidden_format = reference::NumberFormat::kFloat32;
  reference::NumberFormat dhead_format = reference::NumberFormat::kFloat32;
};

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
  std::vector<float> state_max, state_sum, state_target, state_entropy_sum;
  // value_and_grad (or backward alone, for a function without a loss), and backward from the forward's row state, or by itself
  // for a function that has none.
  std::vector<CheckedGradient> gradients;
  tileloss_plan plan;  // of the first gradient
  double forward_s = 0;
  double kernel_s = 0;  // the first gradient
  double backward_s = 0;
};

// How the calls are made: tools::call, or something that watches it.
using KernelCall =
    std::function<void(const Function&, tileloss_pass, const tileloss_args&, const tileloss_plan&, const tileloss_run*)>;

KernelResults run_kernels(const GradcheckConfig& config, const CheckInputs& inputs, const KernelCall& kernel = call);

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_GRADCHECK_RUN_H_
