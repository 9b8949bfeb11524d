// What a row is compared with, and the sums that a target sweep makes of it.
#ifndef TILELOSS_CORE_TARGET_H_
#define TILELOSS_CORE_TARGET_H_

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

// All that a row stage sees of a row: its own statistics, and what its target adds.
struct TargetStats : RowStats {
  RowStats label;    // of the row at the temperature of its label's cross-entropy, which may be another
  RowStats teacher;  // of kLogits; of kColumns its entropy and argmax
  TargetSums sums;

  TargetStats() = default;
  TILELOSS_HOST_DEVICE TargetStats(const RowStats& own) : RowStats(own), label(own) {}  // NOLINT(google-explicit-constructor)
};

}  // namespace tileloss::impl

#endif  // TILELOSS_CORE_TARGET_H_
