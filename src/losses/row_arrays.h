// Rows of the public row state's arrays.
#pragma once

#include <tileloss/tileloss.h>

#include "core/row_state.h"
#include "core/target.h"
#include "losses/inputs.h"

namespace tileloss::impl {

TILELOSS_HOST_DEVICE inline void save_row(const tileloss_row_state& s, std::int64_t i, const RowState& r) {
  if (s.max != nullptr) s.max[i] = r.max;
  if (s.sum != nullptr) s.sum[i] = r.sum;
  if (s.label_logit != nullptr) s.label_logit[i] = r.label_logit;
  if (s.entropy_sum != nullptr) s.entropy_sum[i] = r.entropy_sum;
  if (s.collision_sum != nullptr) s.collision_sum[i] = r.collision_sum;
  if (s.smoothing_sum != nullptr) s.smoothing_sum[i] = r.smoothing_sum;
  if (s.argmax != nullptr) s.argmax[i] = r.argmax;
}

// max, sum and label_logit must be there.
TILELOSS_HOST_DEVICE inline RowState load_row(const tileloss_row_state& s, std::int64_t i) {
  RowState r;
  r.max = s.max[i];
  r.sum = s.sum[i];
  r.label_logit = s.label_logit[i];
  if (s.entropy_sum != nullptr) r.entropy_sum = s.entropy_sum[i];
  if (s.collision_sum != nullptr) r.collision_sum = s.collision_sum[i];
  if (s.smoothing_sum != nullptr) r.smoothing_sum = s.smoothing_sum[i];
  if (s.argmax != nullptr) r.argmax = s.argmax[i];
  return r;
}

// The sum of c_j over the columns that a row's state has seen.
TILELOSS_HOST_DEVICE inline double smoothing_weight(const tileloss_row_state& s, std::int64_t i) {
  if (s.allowed_weight != nullptr) return s.allowed_weight[i];
  return s.allowed_count != nullptr ? s.allowed_count[i] : s.smoothing_weight;
}
TILELOSS_HOST_DEVICE inline void save_classes(const tileloss_row_state& s, std::int64_t i, const RowClasses& classes) {
  if (s.allowed_count != nullptr) s.allowed_count[i] = static_cast<float>(classes.count);
  if (s.allowed_weight != nullptr) s.allowed_weight[i] = static_cast<float>(classes.weight);
}
TILELOSS_HOST_DEVICE inline RowClasses load_classes(const tileloss_row_state& s, std::int64_t i) {
  if (s.allowed_count == nullptr) return {};
  return {s.allowed_count[i], smoothing_weight(s, i)};
}
// Of several labels a row. `labels` without z: none of them is in the row's set.
TILELOSS_HOST_DEVICE inline void save_labels(const tileloss_row_state& s, std::int64_t i, const SeveralLabels& labels) {
  for (std::int64_t k = 0; s.label_logits != nullptr && k < s.labels_per_row; ++k)
    s.label_logits[i * s.labels_per_row + k] = labels.z == nullptr ? -kInfinity : labels.z[k];
}
// Those of all shards. One that is on another shard may be outside the row's set there: its z is -inf then.
TILELOSS_HOST_DEVICE inline SeveralLabels load_labels(const tileloss_row_state& s, std::int64_t i, const Labels& given) {
  if (s.label_logits == nullptr) return {};
  SeveralLabels labels{s.label_logits + i * s.labels_per_row, -1};
  for (std::int64_t k = 0; k < s.labels_per_row; ++k) {
    if (given.has_label_at(i, k)) labels.consider(k);
  }
  return labels;
}
TILELOSS_HOST_DEVICE inline void empty_row(const tileloss_row_state& s, std::int64_t i) {
  save_row(s, i, RowState());
  save_classes(s, i, {0, 0});
  save_labels(s, i, {});
}
// A row of into = into + from, which both have counts and labels' logits or neither. Other arrays that `from` lacks are left
// alone.
TILELOSS_HOST_DEVICE inline void merge_row(tileloss_row_state into, const tileloss_row_state& from, std::int64_t i) {
  const RowState both = merge(load_row(into, i), smoothing_weight(into, i), load_row(from, i), smoothing_weight(from, i));
  if (into.allowed_count != nullptr) into.allowed_count[i] += from.allowed_count[i];
  if (into.allowed_weight != nullptr) into.allowed_weight[i] += from.allowed_weight[i];
  for (std::int64_t k = 0; into.label_logits != nullptr && k < into.labels_per_row; ++k) {
    float& z = into.label_logits[i * into.labels_per_row + k];
    const float other = from.label_logits[i * into.labels_per_row + k];
    z = z < other || std::isnan(other) ? other : z;
  }
  if (from.entropy_sum == nullptr) into.entropy_sum = nullptr;
  if (from.collision_sum == nullptr) into.collision_sum = nullptr;
  if (from.smoothing_sum == nullptr) into.smoothing_sum = nullptr;
  if (from.argmax == nullptr) into.argmax = nullptr;
  save_row(into, i, both);
}

// The states of all rows, once the forward sweep has seen them.
struct RowStates {
  const RowState* kept = nullptr;  // null: what was saved
  tileloss_row_state saved{};

  TILELOSS_HOST_DEVICE RowState operator[](std::int64_t i) const { return kept != nullptr ? kept[i] : load_row(saved, i); }
  TILELOSS_HOST_DEVICE RowStats stats(std::int64_t i) const {
    RowStats stats = make_row_stats((*this)[i]);
    set_classes(stats, load_classes(saved, i));
    return stats;
  }
};

// What is known of the rows of all shards together, whose target is not labels.
struct PairStates {
  tileloss_row_state own, teacher, label;  // the last two without arrays: none
  tileloss_pair_state sums;

  // Without `has_sums`: these are to be found.
  TILELOSS_HOST_DEVICE TargetStats stats(std::int64_t i, bool has_sums) const {
    TargetStats stats(make_row_stats(load_row(own, i)));
    set_classes(stats, load_classes(own, i));
    if (teacher.max != nullptr) stats.teacher = make_row_stats(load_row(teacher, i));
    if (label.max != nullptr) stats.label = make_row_stats(load_row(label, i));
    if (has_sums) stats.sums = {sums.divergence[i], sums.mean[i]};
    return stats;
  }
  // A shard's share of the sums, to where the caller keeps it.
  TILELOSS_HOST_DEVICE void give(std::int64_t i, const TargetSums& share) const {
    sums.divergence[i] = share.divergence;
    sums.mean[i] = share.mean;
  }
};

}  // namespace tileloss::impl
