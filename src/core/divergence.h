// The divergences D of a student's distribution p from a teacher's q, column by column: losses.md, "Distillation: two inputs a
// row". A formula stands here once, and is compiled for vectors of float (core/vector_arithmetic.h), for one double
// at a time (Scalar), and for devices.
//
// A divergence is a class that gets a column and gives its share of D and p (g - what g is shifted by), dD/dz_j = p_j (g_j -
// mean) with mean = sum_k p_k g_k: g is known but for a number that all columns share. It is chosen such that p = q gives 0 in
// every digit. slope() is p dD/dp, where p need not sum to 1.
#pragma once

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
};

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

// A column's share of D, and p (g - what g is shifted by).
template <class N>
struct DivergenceTerm {
  N value{}, form{};
};

// The arithmetic A of one double. A column is p, q, p - q, log p - log q (infinite where one of the two is 0, NaN where both are)
// and the two logarithms; of a row's label also what both leave to the other columns, and p = q is then exact.
struct Scalar {
  using N = double;
  struct Column {
    double p, q, difference, log_ratio, log_p, log_q;
    bool has_others = false;
    double others_p = 0, others_q = 0;
  };

  TILELOSS_HOST_DEVICE static double set(double x) { return x; }
  TILELOSS_HOST_DEVICE static double negate(double x) { return -x; }
  TILELOSS_HOST_DEVICE static double abs(double x) { return std::fabs(x); }
  TILELOSS_HOST_DEVICE static double add(double x, double y) { return x + y; }
  TILELOSS_HOST_DEVICE static double sub(double x, double y) { return x - y; }
  TILELOSS_HOST_DEVICE static double mul(double x, double y) { return x * y; }
  TILELOSS_HOST_DEVICE static double fma(double x, double y, double z) { return x * y + z; }
  // weight * log, 0 where the weight is: 0 log 0 = 0.
  TILELOSS_HOST_DEVICE static double times(double weight, double log) { return weight == 0 ? 0.0 : weight * log; }
  // x >= 0 with the sign of `like`, and 0 where that is 0.
  TILELOSS_HOST_DEVICE static double sign_as(double x, double like) { return like == 0 ? 0.0 : std::copysign(x, like); }
  TILELOSS_HOST_DEVICE static double difference(const Column& c) { return c.difference; }

  // m = share_of_p p + share_of_q q, and the logarithms of p/m and q/m. Of the two, a vector's arithmetic calls the one with the
  // larger share near and the other far; here near is the student.
  struct Mixture {
    double share_of_p, share_of_q;
    struct Parts {
      double near, far, m, log_near, log_far;  // near and far times their shares
    };
    TILELOSS_HOST_DEVICE static bool swaps() { return false; }
    TILELOSS_HOST_DEVICE static double students(double near, double) { return near; }
    TILELOSS_HOST_DEVICE static double teachers(double, double far) { return far; }
    TILELOSS_HOST_DEVICE static double student(const Column& c) { return c.p; }
    TILELOSS_HOST_DEVICE static double teacher(const Column& c) { return c.q; }
    TILELOSS_HOST_DEVICE static double difference(const Column& c) { return c.difference; }
    // shift p - q
    TILELOSS_HOST_DEVICE static double shifted(const Column& c, double shift) { return shift == 0 ? -c.q : c.difference; }
    TILELOSS_HOST_DEVICE static double over(double x, double m) { return m == 0 ? 0.0 : x / m; }
    TILELOSS_HOST_DEVICE double m(const Column& c) const { return c.p - share_of_q * c.difference; }
    TILELOSS_HOST_DEVICE Parts parts(const Column& c) const {
      Parts r{share_of_p * c.p, share_of_q * c.q, m(c), 0, 0};
      if (c.has_others && c.p == c.q) return r;
      const bool is_near_1 = c.has_others && r.m > 0.5;
      const double log_m = is_near_1 ? std::log1p(-((1 - share_of_q) * c.others_p + share_of_q * c.others_q)) : std::log(r.m);
      r.log_near = c.log_p - log_m;
      r.log_far = c.log_q - log_m;
      return r;
    }
  };
};

template <class A>
using NumberOf = typename A::N;
template <class A>
using ColumnOf = typename A::Column;
template <class A>
using TermOf = DivergenceTerm<typename A::N>;

struct DivergenceForm {
  static constexpr bool kHasMean = true;      // whether sum_j p_j g_j may differ from 0
  static constexpr bool kHasMixture = false;  // whether it is made of m, and so of beta
  static constexpr bool kHasShift = false;    // whether it looks at Divergence::shift
  // Whether a column is to have p and q, and log q - log p, in each other's place.
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static bool swaps() { return false; }
};

// sum q log(q/p), g = 1 - q/p
template <class A>
struct ForwardKl : DivergenceForm {
  static constexpr bool kHasMean = false;
  TILELOSS_HOST_DEVICE explicit ForwardKl(const Divergence&) {}
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE TermOf<A> operator()(const ColumnOf<A>& c) const {
    return {A::negate(A::times(c.q, c.log_ratio)), A::difference(c)};
  }
  TILELOSS_HOST_DEVICE double slope(const Scalar::Column& c) const { return -c.q; }
};

// sum p log(p/q), g = log p - log q
template <class A>
struct ReverseKl : DivergenceForm {
  TILELOSS_HOST_DEVICE explicit ReverseKl(const Divergence&) {}
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE TermOf<A> operator()(const ColumnOf<A>& c) const {
    const NumberOf<A> value = A::times(c.p, c.log_ratio);
    return {value, value};
  }
  TILELOSS_HOST_DEVICE double slope(const Scalar::Column& c) const { return (*this)(c).form + c.p; }
};

// The sum of both.
template <class A>
struct Jeffreys : DivergenceForm {
  TILELOSS_HOST_DEVICE explicit Jeffreys(const Divergence&) {}
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE TermOf<A> operator()(const ColumnOf<A>& c) const {
    const NumberOf<A> reverse = A::times(c.p, c.log_ratio);
    return {A::sub(reverse, A::times(c.q, c.log_ratio)), A::add(reverse, A::difference(c))};
  }
  TILELOSS_HOST_DEVICE double slope(const Scalar::Column& c) const { return Scalar::times(c.p, c.log_ratio) + c.p - c.q; }
};

// (1 - beta) sum p log(p/m) + beta sum q log(q/m), m = (1 - beta) p + beta q; g = (1 - beta) log(p/m)
template <class A>
struct JensenShannon : DivergenceForm {
  static constexpr bool kHasMixture = true;
  typename A::Mixture mixture;
  TILELOSS_HOST_DEVICE explicit JensenShannon(const Divergence& d) : mixture{1 - d.beta, d.beta} {}
  TILELOSS_HOST_DEVICE bool swaps() const { return mixture.swaps(); }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE TermOf<A> operator()(const ColumnOf<A>& c) const {
    const auto m = mixture.parts(c);
    const NumberOf<A> near = A::times(m.near, m.log_near), far = A::times(m.far, m.log_far);
    return {A::add(near, far), mixture.students(near, far)};
  }
  TILELOSS_HOST_DEVICE double slope(const Scalar::Column& c) const { return (*this)(c).form; }
};

// sum q log(q/m), the same m; g = (1 - beta) (shift - q/m), which is (1 - beta)^2 (p - q)/m where shift is 1
template <class A>
struct SkewForwardKl : DivergenceForm {
  static constexpr bool kHasMixture = true;
  static constexpr bool kHasShift = true;
  typename A::Mixture mixture;
  double rest;
  NumberOf<A> factor, shift;
  TILELOSS_HOST_DEVICE explicit SkewForwardKl(const Divergence& d)
      : mixture{1 - d.beta, d.beta},
        rest(1 - d.beta),
        factor(A::set(d.shift == 0 ? rest : rest * rest)),
        shift(A::set(d.shift)) {}
  TILELOSS_HOST_DEVICE bool swaps() const { return mixture.swaps(); }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE TermOf<A> operator()(const ColumnOf<A>& c) const {
    const auto m = mixture.parts(c);
    const NumberOf<A> g = A::mul(factor, mixture.over(mixture.shifted(c, shift), m.m));
    return {A::times(mixture.teacher(c), mixture.teachers(m.log_near, m.log_far)), A::times(mixture.student(c), g)};
  }
  TILELOSS_HOST_DEVICE double slope(const Scalar::Column& c) const { return -rest * c.q * mixture.over(c.p, mixture.m(c)); }
};

// sum p log(p/m), m = beta p + (1 - beta) q; g = log(p/m) + beta (1 - p/m) = log(p/m) - beta (1 - beta) (p - q)/m
template <class A>
struct SkewReverseKl : DivergenceForm {
  static constexpr bool kHasMixture = true;
  typename A::Mixture mixture;
  double beta;
  NumberOf<A> factor;
  TILELOSS_HOST_DEVICE explicit SkewReverseKl(const Divergence& d)
      : mixture{d.beta, 1 - d.beta}, beta(d.beta), factor(A::set(-(d.beta * (1 - d.beta)))) {}
  TILELOSS_HOST_DEVICE bool swaps() const { return mixture.swaps(); }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE TermOf<A> operator()(const ColumnOf<A>& c) const {
    const auto m = mixture.parts(c);
    const NumberOf<A> p = mixture.student(c), log_p = mixture.students(m.log_near, m.log_far);
    const NumberOf<A> g = A::fma(factor, mixture.over(mixture.difference(c), m.m), log_p);
    return {A::times(p, log_p), A::times(p, g)};
  }
  TILELOSS_HOST_DEVICE double slope(const Scalar::Column& c) const {
    return (*this)(c).value + c.p - beta * c.p * mixture.over(c.p, mixture.m(c));
  }
};

// sum |p - q| / 2, g = sign(p - q) / 2
template <class A>
struct TotalVariation : DivergenceForm {
  TILELOSS_HOST_DEVICE explicit TotalVariation(const Divergence&) {}
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE TermOf<A> operator()(const ColumnOf<A>& c) const {
    const NumberOf<A> difference = A::difference(c), half = A::set(0.5);
    return {A::mul(half, A::abs(difference)), A::sign_as(A::mul(half, c.p), difference)};
  }
  TILELOSS_HOST_DEVICE double slope(const Scalar::Column& c) const { return (*this)(c).form; }
};

// visit(form) for the one of that kind.
template <class A, class Visit>
TILELOSS_HOST_DEVICE inline auto visit_divergence(const Divergence& d, Visit&& visit) {
  switch (d.kind) {
    case DivergenceKind::kForwardKl: return visit(ForwardKl<A>(d));
    case DivergenceKind::kReverseKl: return visit(ReverseKl<A>(d));
    case DivergenceKind::kJsd: return visit(JensenShannon<A>(d));
    case DivergenceKind::kJeffreys: return visit(Jeffreys<A>(d));
    case DivergenceKind::kSkewForwardKl: return visit(SkewForwardKl<A>(d));
    case DivergenceKind::kSkewReverseKl: return visit(SkewReverseKl<A>(d));
    case DivergenceKind::kTotalVariation: break;
  }
  return visit(TotalVariation<A>(d));
}

TILELOSS_HOST_DEVICE inline bool has_mean(DivergenceKind kind) {
  return visit_divergence<Scalar>({kind}, [](const auto& form) { return form.kHasMean; });
}
inline bool has_mixture(DivergenceKind kind) {
  return visit_divergence<Scalar>({kind}, [](const auto& form) { return form.kHasMixture; });
}
inline bool has_shift(DivergenceKind kind) {
  return visit_divergence<Scalar>({kind}, [](const auto& form) { return form.kHasShift; });
}

// Of a label's column: of a confident model it is what the row's divergence is made of.
TILELOSS_HOST_DEVICE inline DivergenceTerm<double> label_term(const Divergence& d, const RowStats& student,
                                                              const RowStats& teacher) {
  const double p = student.p, q = teacher.p;
  Scalar::Column c;
  c.p = p;
  c.q = q;
  c.difference = p > 0.5 && q > 0.5 ? teacher.one_minus_p - student.one_minus_p : p - q;
  c.log_ratio = p == q ? 0.0 : student.logp - teacher.logp;
  c.log_p = student.logp;
  c.log_q = teacher.logp;
  c.has_others = true;
  c.others_p = student.one_minus_p;
  c.others_q = teacher.one_minus_p;
  return visit_divergence<Scalar>(d, [&](const auto& form) { return form(c); });
}

// Of a class whose p need not sum to 1 with the others', as one that a sparse teacher knows: its share of D, and p dD/dp.
struct ClassTerm {
  double value = 0, slope = 0;
};
TILELOSS_HOST_DEVICE inline ClassTerm class_term(const Divergence& d, double p, double q, double log_p, double log_q) {
  const Scalar::Column c{p, q, p - q, log_p - log_q, log_p, log_q};
  return visit_divergence<Scalar>(d, [&](const auto& form) { return ClassTerm{form(c).value, form.slope(c)}; });
}

// Of class probabilities, which need not sum to 1: q (-log p), and -q, whose sum is the factor of p in the gradient. A column's
// log_ratio is log p.
template <class A>
struct ClassProbabilities : DivergenceForm {
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE TermOf<A> operator()(const ColumnOf<A>& c) const {
    return {A::negate(A::times(c.q, c.log_ratio)), A::negate(c.q)};
  }
};

}  // namespace tileloss::impl
