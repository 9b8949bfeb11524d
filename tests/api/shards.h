// A vocabulary in column shards: their states, merged, and from the merged state the outputs and each shard's gradient.
#pragma once

#include <functional>
#include <vector>

#include "tests/api/calls.h"

namespace tileloss::test {

struct Shard {
  std::int64_t start, columns;
};
inline constexpr std::int64_t kShardRows = 12, kShardVocab = 1000;
inline const std::vector<Shard> kUneven = {{0, 300}, {300, 37}, {337, 663}};

inline tileloss_matrix columns_of(tileloss_matrix m, const Shard& s) {
  m.data = static_cast<unsigned char*>(m.data) + s.start * m.col_stride * impl::element_bytes(m.dtype);
  m.cols = s.columns;
  return m;
}

// Of a shard's logits, and of its head; `args` are the whole's.
inline tileloss_args columns_alone(tileloss_args args, const Shard& s) {
  for (tileloss_matrix* m : {&args.logits, &args.dlogits}) {
    if (m->dtype != TILELOSS_NONE) *m = columns_of(*m, s);
  }
  if (args.allowed.dtype != TILELOSS_NONE) args.allowed = columns_of(args.allowed, {s.start / 32, (s.columns + 31) / 32});
  return args;
}
inline tileloss_args rows_of_head(tileloss_args args, const Shard& s) {
  for (tileloss_matrix* m : {&args.head, &args.teacher_head, &args.dhead}) {
    if (m->dtype == TILELOSS_NONE) continue;
    m->data = static_cast<unsigned char*>(m->data) + s.start * m->row_stride * (m->dtype == TILELOSS_FLOAT32 ? 4 : 2);
    m->rows = s.columns;
  }
  return args;
}

// The options of a shard's call; of {} those of from_row_state.
template <class Options>
Options of_shard(Options options, const Shard& s, std::int64_t vocab = kShardVocab) {
  options.logit.vocab_start = s.start;
  options.logit.vocab_total = vocab;
  return options;
}

// Without what a shard's forward does not give or take.
inline tileloss_args without_outputs(tileloss_args args) {
  for (const impl::TensorSlot& slot : impl::tensor_slots()) {
    if (!slot.is_output()) continue;
    if (slot.vector != nullptr) args.*slot.vector = {};
    if (slot.matrix != nullptr) args.*slot.matrix = {};
  }
  args.logp_grad = args.lse_grad = args.entropy_grad = args.mean_logit_grad = {};
  return args;
}

// The states of all shards, merged in their order. `weight_of`: the sum of the class weights of a shard's columns. `cut`: what a
// shard has of the tensors.
template <class Options>
void merge_states(const char* function, const tileloss_args& all, const Options& options, const std::vector<Shard>& shards,
                  RowStateArrays& merged, std::int64_t vocab, const std::function<double(const Shard&)>& weight_of,
                  tileloss_args (*cut)(tileloss_args, const Shard&) = columns_alone,
                  const tileloss_plan_options& hints = plan_options()) {
  ASSERT_TRUE(succeeds(tileloss_row_state_set_identity(&merged.get())));
  for (const Shard& s : shards) {
    RowStateArrays part(merged.get().rows, all.labels_per_row, merged.get().allowed_count != nullptr);
    tileloss_args args = cut(without_outputs(all), s);
    args.row_state = &part.get();
    const Options own = of_shard(options, s, vocab);
    ASSERT_TRUE(runs(function, TILELOSS_FORWARD, args, &own, hints));
    part.get().smoothing_weight = weight_of(s);
    ASSERT_TRUE(succeeds(tileloss_row_state_merge(&merged.get(), &part.get())));
  }
}
inline double weight_of_columns(const Shard& s) { return static_cast<double>(s.columns); }

// All passes of a function on logits.
template <class Options>
void run_sharded(const char* function, const tileloss_args& all, const Options& options, const std::vector<Shard>& shards,
                 const std::function<double(const Shard&)>& weight_of = weight_of_columns,
                 const tileloss_plan_options& hints = plan_options()) {
  const std::int64_t vocab = all.logits.cols;
  RowStateArrays merged(all.logits.rows, all.labels_per_row, all.allowed.dtype != TILELOSS_NONE);
  ASSERT_NO_FATAL_FAILURE(merge_states(function, all, options, shards, merged, vocab, weight_of, columns_alone, hints));
  tileloss_args args = all;
  args.logits = args.dlogits = args.allowed = {};
  args.logp_grad = args.lse_grad = args.entropy_grad = args.mean_logit_grad = {};
  args.row_state = &merged.get();
  const Options total = of_shard(options, {}, vocab);
  ASSERT_TRUE(runs(function, TILELOSS_FROM_ROW_STATE, args, &total, hints));
  for (const Shard& s : shards) {
    args = columns_alone(all, s);
    args.row_state = &merged.get();
    const Options own = of_shard(options, s, vocab);
    ASSERT_TRUE(runs(function, TILELOSS_BACKWARD, args, &own, hints));
  }
}

}  // namespace tileloss::test
