// What the sweeps over a pair of rows (a student's logits and a teacher's) compute, and what losses make of it. losses.md,
// "Distillation: two inputs a row".
#ifndef TILELOSS_CORE_DIVERGENCE_H_
#define TILELOSS_CORE_DIVERGENCE_H_

#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "core/row_stats.h"

namespace tileloss::impl {

// tileloss_divergence has the formulas.
enum class DivergenceKind : std::int32_t {
  kForwardKl,
  kReverseKl,
  kJsd,
  kJeffreys,
  kSkewForwardKl,
  kSkewReverseKl,
  kTotalVariation,
  kSoftLabels,  // no divergence: sum q (-log p), of a q that need not sum to 1
};
inline constexpr int kDivergenceKinds = 7;

// What says what is wanted of a row, beside or instead of its label: a teacher's logits, class probabilities, or a teacher's
// logarithms of probabilities of some columns.
enum class Teacher { kNone, kLogits, kProbabilities, kColumns };

// What a teacher of which some columns are known says of the others: tileloss_tail.
enum class Tail : std::int32_t { kLump, kIgnore, kRenormalise };

// Whether the g that a sweep chooses has a mean: the forward KL's is 1 - q/p.
TILELOSS_HOST_DEVICE inline bool has_mean(DivergenceKind kind) { return kind != DivergenceKind::kForwardKl; }

struct Divergence {
  DivergenceKind kind = DivergenceKind::kForwardKl;
  double beta = 0.5;
  // Of the skewed forward KL, whose g is (1 - beta) (shift - q/m): 1, so that p = q gives 0 in every digit, or 0 in rows where
  // that keeps more.
  double shift = 1;

  // What a row's g is to be shifted by, from p and q of its largest p: if that is near 1, g has to be small there, as its column
  // is all but the mean.
  TILELOSS_HOST_DEVICE void shift_for(double p, double q) { shift = 2 * q > (1 - beta) * p + beta * q ? 1 : 0; }
};

// The divergence D, and the mean in its gradient dD/dz_j = p_j (g_j - mean), mean = sum_k p_k g_k, for whatever g the sweep has
// chosen: it is known but for a number that all its columns share.
struct PairSums {
  double divergence = 0;
  double mean = 0;
};

struct PairStats {
  RowStats student, teacher;
  RowStats label;  // the student's at the temperature of its label's cross-entropy
  PairSums sums;
};

// A column's share of D, and p (g - what the sweep's g is shifted by).
struct DivergenceTerm {
  double value = 0;
  double form = 0;
};

// Of the label's column, in double: of a confident model it is what the row's divergence is made of.
TILELOSS_HOST_DEVICE inline DivergenceTerm label_term(const Divergence& d, const RowStats& student, const RowStats& teacher) {
  const double p = student.p, q = teacher.p;
  const auto times = [](double weight, double log) { return weight == 0 ? 0.0 : weight * log; };  // 0 log 0 = 0
  const double difference = p > 0.5 && q > 0.5 ? teacher.one_minus_p - student.one_minus_p : p - q;
  const double log_ratio = p == q ? 0.0 : student.logp - teacher.logp;
  const double forward = times(q, -log_ratio), reverse = times(p, log_ratio);
  switch (d.kind) {
    case DivergenceKind::kForwardKl: return {forward, difference};
    case DivergenceKind::kReverseKl: return {reverse, reverse};
    case DivergenceKind::kJeffreys: return {forward + reverse, reverse + difference};
    case DivergenceKind::kTotalVariation:
      return {std::fabs(difference) / 2, difference == 0 ? 0.0 : std::copysign(p, difference) / 2};
    case DivergenceKind::kSoftLabels: return {};
    default: break;
  }
  // m = p + share (q - p)
  const double share = d.kind == DivergenceKind::kSkewReverseKl ? 1 - d.beta : d.beta;
  const double m = p - share * difference, rest = (1 - share) * student.one_minus_p + share * teacher.one_minus_p;
  const double log_m = m > 0.5 ? std::log1p(-rest) : std::log(m);
  const double log_p = p == q ? 0.0 : student.logp - log_m, log_q = p == q ? 0.0 : teacher.logp - log_m;
  const double by_mixture = m == 0 ? 0.0 : difference / m;
  if (d.kind == DivergenceKind::kJsd) {
    const double form = times((1 - d.beta) * p, log_p);
    return {form + times(d.beta * q, log_q), form};
  }
  if (d.kind == DivergenceKind::kSkewForwardKl) {
    const double g = d.shift == 0 ? (m == 0 ? 0.0 : -q / m) : (1 - d.beta) * by_mixture;
    return {times(q, log_q), p * (1 - d.beta) * g};
  }
  return {times(p, log_p), times(p, log_p) - p * d.beta * (1 - d.beta) * by_mixture};
}

// A class's share of D, and p dD/dp: of classes whose p need not sum to 1, as those that a sparse teacher knows.
TILELOSS_HOST_DEVICE inline DivergenceTerm class_term(const Divergence& d, double p, double q, double log_p, double log_q) {
  const auto times = [](double weight, double log) { return weight == 0 ? 0.0 : weight * log; };
  const double forward = times(q, log_q - log_p), reverse = times(p, log_p - log_q);
  switch (d.kind) {
    case DivergenceKind::kForwardKl: return {forward, -q};
    case DivergenceKind::kReverseKl: return {reverse, reverse + p};
    case DivergenceKind::kJeffreys: return {forward + reverse, reverse + p - q};
    case DivergenceKind::kTotalVariation: return {std::fabs(p - q) / 2, p == q ? 0.0 : std::copysign(p, p - q) / 2};
    case DivergenceKind::kSoftLabels: return {times(q, -log_p), -q};
    default: break;
  }
  const double share = d.kind == DivergenceKind::kSkewReverseKl ? 1 - d.beta : d.beta;
  const double m = p + share * (q - p), log_m = std::log(m);
  const double log_p_m = times(p, log_p - log_m), log_q_m = times(q, log_q - log_m);
  if (d.kind == DivergenceKind::kJsd) return {(1 - d.beta) * log_p_m + d.beta * log_q_m, (1 - d.beta) * log_p_m};
  const double p_over_m = m == 0 ? 0.0 : p / m;
  if (d.kind == DivergenceKind::kSkewForwardKl) return {log_q_m, -(1 - d.beta) * q * p_over_m};
  return {log_p_m, log_p_m + p - d.beta * p * p_over_m};
}

// A row's backward: dL/dz_j = form p_j (g_j - mean) + target ([j = y] - p_j), the latter's p and z at the label's temperature.
struct PairCoefficients {
  double form = 0;
  double target = 0;
  bool has_divergence = true;  // false: none is wanted of it, also where it is infinite; form is 0
};

}  // namespace tileloss::impl

#endif  // TILELOSS_CORE_DIVERGENCE_H_
