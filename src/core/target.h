// What a row is compared with, and the sums that a target sweep makes of it.
#pragma once

#include <cstdint>

#include "core/divergence.h"
#include "core/row_stats.h"

namespace tileloss::impl {

// A label, a teacher's logits, some of a teacher's columns, or class probabilities. A loss says which (LossInfo::target).
enum class TargetKind { kLabels, kLogits, kColumns, kProbabilities };

// Whether a row needs one more sweep of the vocabulary, once its statistics are there: a label needs none.
constexpr bool needs_target_sweep(TargetKind kind) { return kind != TargetKind::kLabels; }

// How the columns count that a teacher does not list: tileloss_tail.
enum class Tail : std::int32_t { kLump, kIgnore, kRenormalise };

// The options of a loss that the target sweep needs.
struct TargetOptions {
  Divergence divergence{};     // of kLogits, kColumns
  Tail tail = Tail::kLump;     // of kColumns
  double label_smoothing = 0;  // of kProbabilities
};

// The target sweep's sums: the divergence, or sum q (-log p) of class probabilities, and the mean in its gradient.
struct TargetSums {
  double divergence = 0;
  double mean = 0;
};

// Of rows with several labels. The sweeps know one, the likeliest: no other has p > 1/2, so that 1 - p and log p of the others
// keep their digits with their terms among those of all columns.
struct SeveralLabels {
  const float* z = nullptr;     // of each slot, -inf where it is empty or outside the row's set; null: there is one label
  std::int64_t likeliest = -1;  // the slot that the statistics' logp and p are of; -1: no label is in the row's set

  // Fills z in. column(k): less than 0 for an empty slot, or a label outside the row's set; logit(column): transformed.
  template <class Column, class Logit>
  TILELOSS_HOST_DEVICE static SeveralLabels find(std::int64_t count, float* z, const Column& column, const Logit& logit) {
    SeveralLabels labels{z, -1};
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t j = column(k);
      z[k] = j < 0 ? -kInfinity : logit(j);
      if (j >= 0) labels.consider(k);
    }
    return labels;
  }
  TILELOSS_HOST_DEVICE void consider(std::int64_t k) {
    if (likeliest < 0 || z[k] > z[likeliest]) likeliest = k;
  }
  TILELOSS_HOST_DEVICE double logp(std::int64_t k, const RowStats& row) const {
    return likeliest >= 0 && z[k] == z[likeliest] ? row.logp : z[k] - row.max - row.log_sum;
  }
};

// All that a row stage sees of a row: its own statistics, and what its target adds.
struct TargetStats : RowStats {
  RowStats label;    // of the row at the temperature of its label's cross-entropy, which may be another
  RowStats teacher;  // of kLogits; of kColumns its entropy and argmax
  TargetSums sums;
  SeveralLabels labels;

  TargetStats() = default;
  TILELOSS_HOST_DEVICE TargetStats(const RowStats& own) : RowStats(own), label(own) {}  // NOLINT(google-explicit-constructor)
};

}  // namespace tileloss::impl
