// What a device runs for every row between the sweeps. Plain data and functions, for host and device.
#pragma once

#include <limits>

#include "backends/label_columns.h"
#include "core/row_coefficients.h"
#include "core/target.h"
#include "losses/row_arrays.h"
#include "losses/row_outputs.h"

namespace tileloss::impl::device {

// Of rows with several labels, which are `count`: of each slot [rows, count], and which is the likeliest, [rows].
struct LabelSlots {
  std::int64_t count = 0;   // 0: a row has one label
  float* logits = nullptr;  // as they lie in memory
  float* z = nullptr;       // transformed; the row state's, where that has them
  std::int64_t* likeliest = nullptr;

  TILELOSS_HOST_DEVICE SeveralLabels of(std::int64_t i) const {
    return count == 0 ? SeveralLabels() : SeveralLabels{z + i * count, likeliest[i]};
  }
};

// The arrays of a call, [rows] each, on the device.
struct RowArrays {
  std::int64_t* label_columns = nullptr;
  RowState* states = nullptr;
  TargetStats* stats = nullptr;  // of a target that is not labels; else null
  RowResult* results = nullptr;
  RowClasses* classes = nullptr;  // of a call with allowed columns: how many of these there are here, merged of all shards
                                  // once that is known; else null
  LabelSlots slots;

  TILELOSS_HOST_DEVICE void set_classes(RowStats& of, std::int64_t i) const {
    if (classes != nullptr) impl::set_classes(of, classes[i]);
  }
};

// What stands for the statistics of a row whose label, or the call's numbers, are wrong.
TILELOSS_HOST_DEVICE inline TargetStats bad_stats() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  TargetStats stats(make_row_stats({kNan, kNan, kNan, kNan, kNan, kNan, -1}));
  stats.teacher = stats.label;
  stats.sums = {kNan, kNan};
  return stats;
}

TILELOSS_HOST_DEVICE inline RowResult bad_result() {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  return {kNan, {kNan, kNan, kNan, kNan}, kNan, true};
}

// A pair_state's, but for the sums that this call is to find its share of.
struct LoadStats {
  RowArrays rows;
  PairStates pair;
  bool has_sums;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    if (rows.label_columns[i] == kIgnoredRow) return;
    rows.stats[i] = pair.stats(i, has_sums);
    if (rows.classes != nullptr) rows.classes[i] = rows.stats[i].classes;
  }
};

struct GiveSums {
  RowArrays rows;
  PairStates pair;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    TargetSums sums = rows.stats[i].sums;
    if (rows.label_columns[i] == kIgnoredRow) sums = {};
    if (rows.label_columns[i] == kBadLabel) sums = bad_stats().sums;
    pair.give(i, sums);
  }
};

// The forward's state, to where the caller keeps it.
struct SaveState {
  RowArrays rows;
  tileloss_row_state saved;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    save_row(saved, i, rows.states[i]);
    if (rows.classes != nullptr) save_classes(saved, i, rows.classes[i]);
  }
};

// The row stage and the row's outputs.
template <class Loss>
struct RowStageOf {
  const Loss* loss;
  RowArrays rows;
  RowStates states;
  RowOutputs outputs;
  RowOutput<float> loss_out;  // of each row
  bool writes;
  bool is_merged;  // the states are of all shards, with their classes

  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    if (rows.label_columns[i] == kIgnoredRow) return ignore(i);
    const bool is_bad = rows.label_columns[i] == kBadLabel;
    TargetStats stats = is_bad ? bad_stats() : rows.stats != nullptr ? rows.stats[i] : TargetStats(states.stats(i));
    if (!is_bad) stats.labels = rows.slots.of(i);
    if (!is_merged) {
      rows.set_classes(stats, i);
    } else if (rows.classes != nullptr && !is_bad) {
      rows.classes[i] = stats.classes;
    }
    const RowResult result = is_bad ? bad_result() : loss->row(i, stats);
    rows.results[i] = result;
    if (!writes) return;
    outputs.write(i, stats);
    loss_out.set(i, static_cast<float>(result.loss));
  }
  TILELOSS_HOST_DEVICE void ignore(std::int64_t i) const {
    rows.results[i] = {};
    if (!writes) return;
    outputs.write_ignored(i);
    loss_out.set(i, 0);
  }
};

// The coefficients alone, before anything else of the row stage, where a row is held until its gradient is written.
template <class Loss>
struct CoefficientsOf {
  static constexpr bool kMayNeedNoStats = requires(const Loss& l) { l.coefficients_need_stats(); };
  const Loss* loss;
  bool need_stats = true;  // false: they are the same whatever the row's logits are

  TILELOSS_HOST_DEVICE RowCoefficients operator()(std::int64_t i, bool is_bad, const RowStats& stats) const {
    return is_bad ? bad_result().coefficients : loss->row(i, stats).coefficients;
  }
};

struct LossTerm {
  RowArrays rows;
  TILELOSS_HOST_DEVICE double operator()(std::int64_t i) const { return rows.results[i].loss; }
};
struct TakeLoss {
  RowOutput<float> out;
  TILELOSS_HOST_DEVICE void operator()(double sum) const { out.set(0, static_cast<float>(sum)); }
};

}  // namespace tileloss::impl::device
