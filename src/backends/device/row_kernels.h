// What a device runs for every row between the sweeps. Plain data and functions, for host and device.
#ifndef TILELOSS_BACKENDS_DEVICE_ROW_KERNELS_H_
#define TILELOSS_BACKENDS_DEVICE_ROW_KERNELS_H_

#include <limits>

#include "backends/label_columns.h"
#include "core/row_coefficients.h"
#include "core/target.h"
#include "losses/row_arrays.h"
#include "losses/row_outputs.h"

namespace tileloss::impl::device {

// The arrays of a call, [rows] each, on the device.
struct RowArrays {
  std::int64_t* label_columns = nullptr;
  RowState* states = nullptr;
  TargetStats* stats = nullptr;  // of a target that is not labels; else null
  RowResult* results = nullptr;
};

struct FindLabelColumn {
  LabelColumns labels;
  RowArrays rows;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const { rows.label_columns[i] = labels[i]; }
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
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    RowResult& result = rows.results[i];
    result = {};
    if (rows.label_columns[i] == kIgnoredRow) {
      if (writes) outputs.write_ignored(i);
      return;
    }
    const TargetStats stats = rows.stats != nullptr ? rows.stats[i] : TargetStats(states.stats(i));
    result = rows.label_columns[i] == kBadLabel ? RowResult{kNan, {kNan, kNan, kNan, kNan}, kNan, true} : loss->row(i, stats);
    if (writes) outputs.write(i, stats);
  }
};

struct WriteLoss {
  RowArrays rows;
  RowOutput<float> out;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const { out.set(i, static_cast<float>(rows.results[i].loss)); }
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

#endif  // TILELOSS_BACKENDS_DEVICE_ROW_KERNELS_H_
