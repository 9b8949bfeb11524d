// The numbers that losses are made of, from one row's state. Double throughout: N of these, not N*V.
#pragma once

#include <cmath>
#include <limits>

#include "core/host_device.h"
#include "core/row_state.h"

namespace tileloss::impl {

// Over which classes a row's sums run, where it has a set of allowed ones; less than 0: over all.
struct RowClasses {
  double count = -1;
  double weight = -1;  // the sum of c_j

  TILELOSS_HOST_DEVICE double count_of(double all) const { return count < 0 ? all : count; }
};

struct RowStats {
  double max = 0;
  double sum = 0;      // S, the label's term included
  double log_sum = 0;  // log S
  double lse = 0;      // max + log S
  double logp = 0;     // of the label
  double p = 0;        // of the label
  double one_minus_p = 0;
  double entropy = 0;           // if kEntropySum was asked for
  double log_sum_sq_probs = 0;  // if kCollisionSum
  double smoothing_sum = 0;     // sum_j c_j (z_j - max), if kSmoothingSum; of z_j where the maximum is infinite
  std::int64_t argmax = -1;     // if kArgmax
  RowClasses classes;
};

// x / sum. On a device by way of 1 / sum, of which there is one a row.
TILELOSS_HOST_DEVICE inline double over_sum(double x, double sum) {
#if defined(__CUDA_ARCH__)
  return x * (1 / sum);
#else
  return x / sum;
#endif
}

// The rounding rules of losses.md: the label stays out of R, so 1 - p = R / S and logp = -log1p(R) keep their digits when p is
// near 1; max and log S stay apart, so a common offset costs nothing. Without `has_logs` these and what is made of them are NaN:
// they are most of the work.
TILELOSS_HOST_DEVICE inline RowStats make_row_stats(const RowState& state, bool has_logs = true) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  RowStats s;
  s.max = state.max;
  s.argmax = state.argmax;
  s.smoothing_sum = state.smoothing_sum;
  if (!std::isfinite(state.max)) {  // all -inf, some +inf, or NaN: lse says which, the rest is NaN
    s.lse = s.max;
    s.sum = s.log_sum = s.logp = s.p = s.one_minus_p = s.entropy = s.log_sum_sq_probs = kNan;
    return s;
  }
  const double shifted = static_cast<double>(state.label_logit) - state.max;
  const double label_term = std::exp(shifted);
  s.sum = state.sum + label_term;
  s.p = over_sum(label_term, s.sum);
  s.one_minus_p = over_sum(state.sum, s.sum);
  if (!has_logs) {
    s.log_sum = s.lse = s.logp = s.entropy = s.log_sum_sq_probs = kNan;
    return s;
  }
  s.log_sum = shifted == 0 ? std::log1p(static_cast<double>(state.sum)) : std::log(s.sum);
  s.lse = s.max + s.log_sum;
  s.logp = shifted - s.log_sum;
  s.entropy = s.log_sum - state.entropy_sum / s.sum;
  s.log_sum_sq_probs = std::log(static_cast<double>(state.collision_sum)) - 2 * s.log_sum;
  return s;
}

// A row without any class is as one of -inf, of which the first is the largest.
TILELOSS_HOST_DEVICE inline void set_classes(RowStats& s, const RowClasses& classes) {
  s.classes = classes;
  if (classes.count != 0) return;
  s.argmax = 0;
  s.smoothing_sum = -kInfinity;
}

}  // namespace tileloss::impl
