// A call, validated once and put in the form that backends plan and run. Which loss it is shows in three places alone: its name,
// what its row stage asks of the sweeps, and the stage itself, which make_stage gives.
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/logit_transform.h"
#include "losses/registry.h"
#include "losses/row_arrays.h"
#include "schema/status.h"
#include "schema/tensors.h"

namespace tileloss::impl {

struct Problem {
  const RegisteredLoss* loss = nullptr;
  tileloss_pass pass = TILELOSS_FORWARD;
  tileloss_device_type device_type = TILELOSS_CPU;
  std::int32_t device_index = 0;
  tileloss_args args{};  // as given, later members zero if the caller's struct is older
  tileloss_row_state row_state{};
  bool has_row_state = false;
  // Of a shard whose target is not labels: the states of all shards together, and where their sums are.
  tileloss_row_state teacher_state{}, label_state{};
  tileloss_pair_state pair_state{};
  bool has_pair_state = false;
  std::vector<std::byte> options;
  tileloss_logit_options logit{};
  tileloss_linear_options linear{};

  std::int64_t rows = 0;
  std::int64_t total_columns = 0;             // of the logits; 0 without logits
  std::int64_t columns = 0;                   // valid ones
  std::int64_t classes = 0;                   // of the whole vocabulary
  tileloss_dtype storage = TILELOSS_FLOAT32;  // of the logits
  tileloss_dtype compute = TILELOSS_FLOAT32;  // of the products with the LM head
  std::uint32_t sums = kNoSums;               // that the forward must gather: outputs, loss and row state together
  bool is_per_row = false;                    // one loss per row
  bool needs_forward = false;                 // sweeps the logits for the states
  bool needs_backward = false;
  bool gives_sums = false;  // sweeps them for a shard's share of the pair_state's sums, and gives nothing else
  bool is_shard = false;
  std::int64_t num_metrics = 0;   // that the function reports
  bool couples_rows = false;      // the row stage needs all rows' statistics before it can do any row
  bool is_multiple_of_p = false;  // the row stage's gradient
  std::int64_t stage_bytes = 0;   // the row stage's scratch

  // Whether how many classes a row has is to be found: they are some of the columns, or the row state says how many they are.
  bool has_classes() const {
    return total_columns > 0 && (present(args.allowed) || (needs_forward && row_state.allowed_count != nullptr));
  }

  bool has_several_labels() const { return args.labels_per_row > 1; }

  // Between forward and backward its states are merged with the other shards': tileloss_run.merge.
  bool merges_shards() const { return is_shard && needs_forward && needs_backward; }
};

std::string shape(std::int64_t rows, std::int64_t cols);

PairStates pair_states(const Problem& problem);
// What the row stage sees, but for its scratch.
LossContext make_context(const Problem& problem);
// The transforms of the softmax, of the teacher's, and of the label's cross-entropy where its temperature is one of its own: read
// where the temperature lies.
LogitTransform make_transform(const Problem& problem);
LogitTransform make_teacher_transform(const Problem& problem);
std::optional<LogitTransform> make_label_transform(const Problem& problem);
// Of column 0; null: 1.
const float* class_weights(const Problem& problem);
// Whether the sweeps can compute with the transforms' numbers; those behind pointers only if `with_pointers`.
Status check_transforms(const Problem& problem, bool with_pointers);

// Of the caller's workspace, if there is one.
Status check_workspace(const tileloss_run& run, const tileloss_plan& plan);
// What is said of a label that is no class. `at`: its row, or row and slot.
Status bad_label(const std::string& at, std::int64_t label, std::int64_t classes, std::int64_t ignore_index);
// Whether an entry of sequence_offsets is right after the one `before` it.
Status check_offset(std::int64_t i, std::int64_t count, std::int64_t offset, std::int64_t before, std::int64_t rows);

}  // namespace tileloss::impl
