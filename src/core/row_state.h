// What one row of logits is to a loss: a monoid, merged at every level (lane, tile, shard). Definitions in losses.md and in
// tileloss.h (tileloss_row_state), of which this is one row.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/host_device.h"

namespace tileloss::impl {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The sums a row stage may ask for besides max, sum and label_logit. Bits, so that demands unite with |.
enum RowSums : std::uint32_t {
  kNoSums = 0,
  kEntropySum = 1,
  kCollisionSum = 2,
  kSmoothingSum = 4,
  kArgmax = 8,
};

// What stands for the column of a row's label where there is none.
inline constexpr std::int64_t kIgnoredRow = -2;
inline constexpr std::int64_t kLabelElsewhere = -1;  // another shard of the vocabulary holds the label

struct RowState {
  float max = -kInfinity;
  float sum = 0;  // over j != label of exp(z_j - max); of several labels the likeliest alone is left out
  float label_logit = -kInfinity;
  float entropy_sum = 0;
  float collision_sum = 0;
  float smoothing_sum = 0;
  std::int64_t argmax = -1;
};

// exp(from - to) for two maxima, to >= from: 0 for an empty state, so that -inf - -inf never arises.
TILELOSS_HOST_DEVICE inline double rescale_factor(float from, float to) {
  if (from == to) return 1;
  if (from == -kInfinity) return 0;
  return std::exp(static_cast<double>(from) - to);
}

// A state moved to the maximum `to` >= state.max. `weight` is the sum of c_j over the columns seen.
TILELOSS_HOST_DEVICE inline RowState rescale(const RowState& state, float to, double weight) {
  RowState r = state;
  const double factor = rescale_factor(state.max, to);
  r.max = to;
  r.sum = static_cast<float>(factor * state.sum);
  r.collision_sum = static_cast<float>(factor * factor * state.collision_sum);
  if (factor == 1) return r;
  if (state.max == -kInfinity) {
    // Nothing seen, or only -inf: every term of the entropy sum is 0, each term of the smoothing sum is -inf if there is one.
    // NaN already where a -inf has the weight 0.
    if (weight != 0 && !std::isnan(r.smoothing_sum)) r.smoothing_sum = static_cast<float>(weight) * -kInfinity;
    return r;
  }
  const double shift = static_cast<double>(state.max) - to;
  // All columns, the label's too: its term is exp(label_logit - max).
  const double all =
      state.sum + (state.label_logit == -kInfinity ? 0.0 : std::exp(static_cast<double>(state.label_logit) - state.max));
  r.entropy_sum = factor == 0 ? 0 : static_cast<float>(factor * (state.entropy_sum + shift * all));
  // Relative to +inf there would be nothing left to tell of the columns: their own z then, as of the ones that hold it.
  r.smoothing_sum = static_cast<float>(state.smoothing_sum + (std::isinf(to) ? state.max : shift) * weight);
  return r;
}

// The state of two disjoint sets of columns. A NaN in either survives.
TILELOSS_HOST_DEVICE inline RowState merge(const RowState& a, double weight_a, const RowState& b, double weight_b) {
  const bool has_nan = std::isnan(a.max) || std::isnan(b.max);
  const float max = has_nan ? std::numeric_limits<float>::quiet_NaN() : (a.max > b.max ? a.max : b.max);
  if (max == -kInfinity && a.argmax < 0 && weight_a == 0) return b;
  if (max == -kInfinity && b.argmax < 0 && weight_b == 0) return a;
  const RowState x = has_nan ? a : rescale(a, max, weight_a);
  const RowState y = has_nan ? b : rescale(b, max, weight_b);
  RowState r;
  r.max = max;
  r.sum = has_nan ? max : x.sum + y.sum;
  r.label_logit = a.label_logit == -kInfinity ? b.label_logit : a.label_logit;
  if (a.label_logit > -kInfinity && b.label_logit > -kInfinity) {  // of several labels: the less likely one is as other columns
    const bool is_a = a.label_logit > b.label_logit;
    r.label_logit = is_a ? a.label_logit : b.label_logit;
    r.sum = static_cast<float>(r.sum + rescale_factor(is_a ? b.label_logit : a.label_logit, max));
  }
  r.entropy_sum = x.entropy_sum + y.entropy_sum;
  r.collision_sum = x.collision_sum + y.collision_sum;
  r.smoothing_sum = x.smoothing_sum + y.smoothing_sum;
  if (has_nan) {
    r.label_logit = r.entropy_sum = r.collision_sum = r.smoothing_sum = max;
    r.argmax = -1;
  } else if (a.max == b.max) {
    r.argmax = a.argmax < 0 ? b.argmax : (b.argmax < 0 || a.argmax < b.argmax ? a.argmax : b.argmax);
  } else {
    r.argmax = a.max > b.max ? a.argmax : b.argmax;
  }
  return r;
}

}  // namespace tileloss::impl
