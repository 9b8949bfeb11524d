// A row's columns one at a time, in double: the label's own in every sweep, and all of them where a device does no better.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/logit_transform.h"
#include "core/row_coefficients.h"
#include "core/target.h"

namespace tileloss::impl {

// What is wider than double where there is such a type.
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
using Wide = double;
#else
using Wide = long double;
#endif

// A row's logits, logit(j) in float32, as its columns: in double, and relative to the very element that the maximum came from.
template <class Logit>
class Columns {
 public:
  // `label`: its column, or less than 0.
  TILELOSS_HOST_DEVICE Columns(const Logit& logit, const LogitTransform& transform, std::int64_t count, std::int64_t label)
      : logit_(logit), transform_(transform), count_(count), label_(label) {}

  // The row's statistics are known, its maximum is `max`.
  TILELOSS_HOST_DEVICE void set_max(double max) {
    max_ = max;
    for (std::int64_t j = 0; j < count_; ++j) {
      if (static_cast<double>(transform_.value(logit_(j))) == max) max_ = transform_.exact_value(logit_(j));
    }
  }
  TILELOSS_HOST_DEVICE double shifted(std::int64_t j) const {
    const double z = transform_.exact_value(logit_(j));
    return z == max_ ? 0 : z - max_;
  }
  // What there is to know of a column; of the label's from the row's own statistics.
  TILELOSS_HOST_DEVICE RowStats stats(std::int64_t j, const RowStats& row) const {
    if (j == label_) return row;
    RowStats c;
    c.logp = shifted(j) - row.log_sum;
    c.p = std::exp(c.logp);
    c.one_minus_p = 1 - c.p;
    return c;
  }
  TILELOSS_HOST_DEVICE double derivative(std::int64_t j) const { return transform_.derivative(logit_(j)); }

  // The row's state, with all its sums; weight(j): the class weights. Sets the maximum.
  template <class Weight>
  TILELOSS_HOST_DEVICE RowState gather(std::int64_t first_column, const Weight& weight) {
    RowState s;
    for (std::int64_t j = 0; j < count_; ++j) {
      const float z = transform_.value(logit_(j)), nan = std::numeric_limits<float>::quiet_NaN();
      if (std::isnan(z)) return {nan, nan, nan, nan, nan, nan, -1};
      if (!(z > s.max) && s.argmax >= 0) continue;
      s.max = z;
      s.argmax = first_column + j;
    }
    if (label_ >= 0) s.label_logit = transform_.value(logit_(label_));
    set_max(s.max);
    double sum = 0, entropy = 0, collision = 0, smoothing = 0;
    for (std::int64_t j = 0; j < count_; ++j) {
      const double z = shifted(j), e = std::exp(z);
      if (j != label_) sum += e;
      if (e != 0) entropy += z * e;
      collision += e * e;
      smoothing += (std::isinf(s.max) ? transform_.exact_value(logit_(j)) : z) * weight(j);
    }
    s.sum = static_cast<float>(sum);
    s.entropy_sum = static_cast<float>(entropy);
    s.collision_sum = static_cast<float>(collision);
    s.smoothing_sum = static_cast<float>(smoothing);
    return s;
  }

 private:
  Logit logit_;
  LogitTransform transform_;
  std::int64_t count_, label_;
  double max_ = 0;
};

// dL/dz_y of the label's column, target (1 - p_y) + p_y (prob + target + prob_logp logp) + uniform c_y, so that it keeps its
// digits when p_y is near 1; and dL/dz_j of another, p_j (prob + prob_logp logp) + uniform c_j.
TILELOSS_HOST_DEVICE inline double column_gradient(const RowCoefficients& c, const RowStats& column, bool is_label,
                                                   double class_weight) {
  double dz = (is_label ? c.target * column.one_minus_p : 0.0) + c.uniform * class_weight;
  const double prob = is_label ? c.prob_plus_target : c.prob();
  if (column.p != 0) dz += column.p * (prob + (c.prob_logp == 0 ? 0.0 : c.prob_logp * column.logp));
  return dz;
}

// p (g - mean) of a divergence's column: the mean's own part is taken together with g, as of a certain column they all but
// cancel.
TILELOSS_HOST_DEVICE inline double divergence_slope(const DivergenceTerm<double>& term, const RowStats& column, double mean,
                                                    bool has_mean) {
  return has_mean ? term.form * column.one_minus_p - column.p * (mean - term.form) : term.form;
}

// A class's share of sum q (-log p), and its part of the gradient, of class probabilities: `weight` is q times the class weight.
TILELOSS_HOST_DEVICE inline DivergenceTerm<double> probability_term(double weight, double logp) {
  Scalar::Column c{};
  c.q = weight;
  c.log_ratio = logp;
  return ClassProbabilities<Scalar>{}(c);
}
// Of classes that the row has not, and whose p is 0; `weight`: theirs together.
TILELOSS_HOST_DEVICE inline TargetSums sums_outside(double weight) {
  if (weight == 0) return {};
  const DivergenceTerm<double> term = probability_term(weight, -kInfinity);
  return {term.value, term.form};
}
// So that it keeps its digits where the class has all the weight, and p is near 1.
TILELOSS_HOST_DEVICE inline double probability_slope(double weight, double p, double one_minus_p, double mean) {
  return (-mean - weight) * p - weight * one_minus_p;
}

// A column that a sparse teacher knows.
struct KnownColumn {
  std::int64_t column = 0;
  double z = 0, derivative = 0;               // of the row: the transformed logit, and dz/dx
  double p = 0, q = 0, log_p = 0, log_q = 0;  // as the divergence sees them
  double slope = 0;                           // p dD/dp
};

// Those of a row, and the divergence from them.
class KnownColumns {
 public:
  KnownColumns() = default;
  // Of columns whose z and log q are there.
  TILELOSS_HOST_DEVICE KnownColumns(KnownColumn* columns, std::int64_t count) : columns_(columns), count_(count) {}

  TILELOSS_HOST_DEVICE KnownColumn* begin() const { return columns_; }
  TILELOSS_HOST_DEVICE KnownColumn* end() const { return columns_ + count_; }

  // Fills in the columns, and of `stats` the teacher's entropy and argmax and the divergence; NaN where there is none. `max`: the
  // row's maximum, to all digits. log_mass(): of the p of the other columns' sum, where it is not what the known ones leave of 1.
  template <class LogMass>
  TILELOSS_HOST_DEVICE void diverge(const TargetOptions& options, double max, TargetStats& stats, LogMass&& log_mass) {
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    tail_ = options.tail;
    bool has_p = true, has_q = true;
    for (KnownColumn& c : *this) {
      c.log_p = c.z - max - stats.log_sum;
      c.p = std::exp(c.log_p);
      c.q = std::exp(c.log_q);
      has_q = has_q && c.log_q < kInfinity;  // no NaN either
    }
    if (tail_ == Tail::kLump) lump_others(std::isfinite(stats.max), log_mass);
    if (tail_ == Tail::kRenormalise && count_ > 0) {
      has_p = renormalise(&KnownColumn::p, &KnownColumn::log_p);
      has_q = renormalise(&KnownColumn::q, &KnownColumn::log_q) && has_q;
    }
    slope_sum_ = 0;
    double divergence = 0, entropy = 0, largest = -kInfinity;
    const auto add = [&](KnownColumn& c) {
      const ClassTerm term = class_term(options.divergence, c.p, c.q, c.log_p, c.log_q);
      c.slope = term.slope;
      divergence += term.value;
      slope_sum_ += term.slope;
      if (c.q != 0) entropy -= c.q * c.log_q;
    };
    for (KnownColumn& c : *this) {
      add(c);
      if (c.log_q > largest || (c.log_q == largest && c.column < stats.teacher.argmax)) {
        largest = c.log_q;
        stats.teacher.argmax = c.column;
      }
    }
    if (tail_ == Tail::kLump) add(others_);
    stats.teacher.entropy = has_q ? entropy : kNan;
    stats.sums.divergence = std::isfinite(stats.max) && has_p && has_q ? divergence : kNan;
  }

  // dD/dz of a known column.
  TILELOSS_HOST_DEVICE double slope(const KnownColumn& c) const { return c.slope - c.p * slope_sum_; }
  // form dD/dz of a column that is not known, over its p.
  TILELOSS_HOST_DEVICE double slope_of_others(double form) const {
    if (tail_ == Tail::kRenormalise) return 0;
    double slope = -form * slope_sum_;
    if (tail_ == Tail::kLump && others_.p != 0) slope += form * others_.slope / others_.p;
    return slope;
  }

 private:
  static constexpr double kFewDigits = 1e-6;  // a difference from 1 that double leaves less than 10 of
  static constexpr double kRounding = 1e-2;   // by which a sum of q may miss 1

  // All other columns as one class.
  template <class LogMass>
  TILELOSS_HOST_DEVICE void lump_others(bool is_finite, LogMass&& log_mass) {
    others_ = {};
    double sum = 0, known = 0;
    for (const KnownColumn& c : *this) {
      sum += c.q;
      known += c.p;
    }
    // What is left of 1 where little is taken off it, so that all of them add up to 1; else the sum.
    others_.log_p = known < 0.5 ? std::log1p(-known) : log_mass();
    others_.p = known < 0.5 ? 1 - known : std::exp(others_.log_p);
    others_.q = std::isnan(sum) ? sum : 1 - sum;
    if (others_.q < kFewDigits) {
      Wide left = 1;
      for (const KnownColumn& c : *this) left -= std::exp(static_cast<Wide>(c.log_q));
      others_.q = left < 0 ? 0 : static_cast<double>(left);
    }
    // Where p has nothing left, every column known say, q may not have lost the rest by rounding.
    if (others_.p == 0 && others_.q < kRounding && is_finite) others_.q = 0;
    others_.log_q = std::log(others_.q);
  }

  // False where there is nothing to divide by.
  TILELOSS_HOST_DEVICE bool renormalise(double KnownColumn::*value, double KnownColumn::*log) {
    double largest = -kInfinity, sum = 0;
    for (const KnownColumn& c : *this) largest = std::fmax(largest, c.*log);
    if (largest == -kInfinity) return false;
    for (const KnownColumn& c : *this) sum += std::exp(c.*log - largest);
    const double log_sum = largest + std::log(sum);
    for (KnownColumn& c : *this) {
      c.*log -= log_sum;
      c.*value = std::exp(c.*log);
    }
    return true;
  }

  KnownColumn* columns_ = nullptr;
  std::int64_t count_ = 0;
  Tail tail_ = Tail::kLump;
  KnownColumn others_;  // with kLump
  double slope_sum_ = 0;
};

}  // namespace tileloss::impl
