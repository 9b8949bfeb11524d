// What a device runs for every row between the sweeps. Plain data and functions, for host and device.
#ifndef TILELOSS_BACKENDS_DEVICE_ROW_KERNELS_H_
#define TILELOSS_BACKENDS_DEVICE_ROW_KERNELS_H_

#include <limits>

#include "backends/targets.h"
#include "core/divergence.h"
#include "core/row_coefficients.h"
#include "losses/row_arrays.h"
#include "losses/row_outputs.h"

namespace tileloss::impl::device {

// The arrays of a call, [rows] each, on the device.
struct RowArrays {
  std::int64_t* targets = nullptr;
  double* losses = nullptr;
  RowState* states = nullptr;
  RowCoefficients* coefficients = nullptr;
  // Of a target that is more than a label:
  PairStats* pairs = nullptr;
  PairCoefficients* pair_coefficients = nullptr;
};

struct FindTarget {
  Targets labels;
  RowArrays rows;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const { rows.targets[i] = labels[i]; }
};

// The forward's state, to where the caller keeps it.
struct SaveState {
  RowArrays rows;
  tileloss_row_state saved;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const { save_row(saved, i, rows.states[i]); }
};

// The row stage and the row's outputs.
template <class Loss>
struct RowStageOf {
  const Loss* loss;
  RowArrays rows;
  RowStates states;
  RowOutputs outputs;
  bool writes;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    if constexpr (requires { loss->row(i, RowStats{}); }) {
      if (is_ignored(i)) return;
      constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
      const RowStats stats = states.stats(i);
      const RowResult result = rows.targets[i] == kBadTarget ? RowResult{kNan, {kNan, kNan, kNan, kNan}} : loss->row(i, stats);
      rows.coefficients[i] = result.coefficients;
      write(i, result.loss, stats);
    } else {
      if (is_ignored(i)) return;
      rows.pair_coefficients[i] = loss->pair_coefficients(i);
      write(i, loss->pair_loss(i, rows.pairs[i]), rows.pairs[i]);
    }
  }

 private:
  TILELOSS_HOST_DEVICE bool is_ignored(std::int64_t i) const {
    if (rows.targets[i] != kIgnoredRow) return false;
    if (writes) {
      rows.losses[i] = 0;
      outputs.write_ignored(i);
    }
    return true;
  }
  template <class Stats>
  TILELOSS_HOST_DEVICE void write(std::int64_t i, double loss_of_row, const Stats& stats) const {
    if (!writes) return;
    rows.losses[i] = loss_of_row;
    outputs.write(i, stats);
  }
};

struct WriteLoss {
  RowArrays rows;
  RowOutput<float> out;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const { out.set(i, static_cast<float>(rows.losses[i])); }
};
struct LossTerm {
  RowArrays rows;
  TILELOSS_HOST_DEVICE double operator()(std::int64_t i) const { return rows.losses[i]; }
};
struct TakeLoss {
  RowOutput<float> out;
  TILELOSS_HOST_DEVICE void operator()(double sum) const { out.set(0, static_cast<float>(sum)); }
};

}  // namespace tileloss::impl::device

#endif  // TILELOSS_BACKENDS_DEVICE_ROW_KERNELS_H_
