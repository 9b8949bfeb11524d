// The inputs of a check, drawn or from a file.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "judge/inputs/config.h"
#include "judge/oracles/oracle.h"
#include "support/memory.h"
#include "support/policy_inputs.h"
#include "support/tensor_file.h"
#include "support/thread_team.h"

namespace tileloss::tools {

// One value for all rows, or one per row; empty: not given.
using Upstream = std::vector<float>;

// Fused with the LM head: in place of the logits.
struct LinearTensors {
  HugeBuffer hidden, head;
  oracle::StoredMatrix hidden_view, head_view;
  std::vector<float> bias;
  std::unique_ptr<LinearTensors> low_rank;  // hidden_r and head_r; null: there is none
  // Once the inputs stand.
  std::optional<oracle::LinearOperands> operands;
  std::optional<LinearNorms> norms;
};

// What a row is compared with besides its label.
struct TargetTensors {
  // A teacher's logits or class probabilities, in rows and groups as the logits lie; null: there are none.
  tileloss_matrix tileloss_args::*argument = nullptr;
  oracle::NumberFormat format = oracle::NumberFormat::kFloat32;
  HugeBuffer matrix;
  // Some columns of a teacher, [N,K].
  int64_t columns = 0;
  std::vector<int64_t> ids;
  std::vector<float> log_q;
  // A teacher with an LM head of its own.
  std::optional<LinearTensors> linear;
};

struct CheckInputs {
  oracle::NumberFormat format = oracle::NumberFormat::kFloat32;
  int64_t batch_size = 0;
  int64_t seq_len = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t valid = 0;  // columns that are not padding
  int64_t ignore_index = 0;
  int64_t group_rows = 0;  // > 0: rows of a group, behind each of which lies a row that is nobody's
  // The rows that are ignored or nobody's and the padding hold NaN, all bits set: no result may depend on them.
  HugeBuffer logits;
  std::optional<LinearTensors> linear;
  TargetTensors target;
  AllowedSets allowed;
  std::vector<int64_t> labels;
  // Where a row has several: [N*K]. `labels` has one of each row then, ignore_index where all its slots are empty.
  int64_t labels_per_row = 1;
  std::vector<int64_t> slots;
  std::vector<float> token_weights;
  std::vector<float> class_weights;
  Upstream loss_grad, logp_grad, lse_grad, entropy_grad, mean_logit_grad;
  PolicyTensors policy;               // the mask of every function that takes one
  std::vector<uint8_t> used;          // policy losses: rows that are not ignored, and the oracle's first look at them
  std::vector<RowSummary> summaries;  // (all rows; those in use are filled)

  int64_t row_bytes() const { return row_bytes(format); }
  int64_t row_bytes(oracle::NumberFormat of) const { return cols * static_cast<int64_t>(oracle::format_info(of).bytes); }
  // Of logits and dlogits, in bytes.
  int64_t row_offset(int64_t row) const { return row_offset(row, format); }
  int64_t row_offset(int64_t row, oracle::NumberFormat of) const {
    return (row + (group_rows > 0 ? row / group_rows : 0)) * row_bytes(of);
  }
  int64_t groups() const { return group_rows > 0 ? rows / group_rows : 0; }
  int64_t matrix_bytes() const { return matrix_bytes(format); }
  int64_t matrix_bytes(oracle::NumberFormat of) const { return (rows + groups()) * row_bytes(of); }
  char* row(int64_t index) const { return logits.data() + row_offset(index); }
  char* target_row(int64_t index) const { return target.matrix.data() + row_offset(index, target.format); }
  // A row's of what each label has.
  template <class T>
  std::span<const T> slots_of(std::span<const T> values, int64_t row) const {
    const auto count = static_cast<size_t>(labels_per_row);
    return values.subspan(static_cast<size_t>(row) * count, count);
  }
  // By its label or by the mask.
  bool is_ignored(int64_t row) const { return labels[static_cast<size_t>(row)] == ignore_index || !policy.in_use(row); }
  std::vector<int64_t> used_rows() const;
};

// Plans the calls on shapes alone first, so that what the library refuses costs no time and no memory.
CheckInputs make_inputs(const GradcheckConfig& config, ThreadTeam& team);

// Reads the rows of a file's tensor to where logits lie.
void read_logits(const TensorFile& file, const StoredTensor& tensor, const CheckInputs& inputs, const HugeBuffer& buffer);

OracleTensors oracle_tensors(const CheckInputs& inputs);

// Rows in use with their targets, in double. Of stored logits on all threads, a fixed share for each in the rows' order; of LM
// heads one after the other on thread 0.
using RowWork = std::function<void(const GivenRow& row, int thread)>;
void for_each_row(const CheckInputs& inputs, std::span<const int64_t> rows, ThreadTeam& team, const RowWork& work);

}  // namespace tileloss::tools
