// The divergences, column by column: losses.md, "Distillation: two inputs a row". A form gets p, q and log p - log q (infinite
// where one of the two is 0, NaN where both are), or the two in turn where it swaps them, and gives a column's share of the
// divergence and p (g - what g is shifted by). g is chosen such that p = q gives 0 in every digit.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_DIVERGENCE_FORMS_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_DIVERGENCE_FORMS_H_

#include "core/divergence.h"

namespace tileloss::impl::cpu {

template <class Simd>
struct DivergenceColumn {
  typename Simd::F value, form;
};

template <class Simd>
struct DivergenceForm {
  using F = typename Simd::F;
  using Column = DivergenceColumn<Simd>;
  // Whether sum_j p_j g_j may differ from 0.
  static constexpr bool kHasMean = true;
  // Whether it wants q, p and log q - log p.
  bool swaps() const { return false; }
  // weight * log, 0 where the weight is: 0 log 0 = 0.
  [[gnu::always_inline]] static F times(F weight, F log) { return Simd::multiply_where_nonzero(weight, log); }
};

// g = 1 - q/p
template <class Simd>
struct ForwardKl : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  static constexpr bool kHasMean = false;
  explicit ForwardKl(const Divergence&) {}
  [[gnu::always_inline]] Column operator()(F p, F q, F r) const { return {Simd::negate(this->times(q, r)), Simd::sub(p, q)}; }
};

// g = log p - log q
template <class Simd>
struct ReverseKl : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  explicit ReverseKl(const Divergence&) {}
  [[gnu::always_inline]] Column operator()(F p, F, F r) const {
    const F value = this->times(p, r);
    return {value, value};
  }
};

template <class Simd>
struct Jeffreys : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  explicit Jeffreys(const Divergence&) {}
  [[gnu::always_inline]] Column operator()(F p, F q, F r) const {
    const F reverse = this->times(p, r);
    return {Simd::sub(reverse, this->times(q, r)), Simd::add(reverse, Simd::sub(p, q))};
  }
};

// What those with a mixture m = share q + (1 - share) p need of it. The one of p and q of which m has the larger share is near,
// the other, of which it has w <= 1/2, is far: near m, what is far is a correction, so that no digit is lost however small w is.
template <class Simd>
struct Mixture : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  bool student_is_near;
  F w, rest, base, is_student_near;
  Mixture(double share_of_p, double share_of_q) : student_is_near(share_of_p >= share_of_q) {
    constexpr double kLeast = 0x1p-100;  // its inverse stays in float32's range
    const double of_far = student_is_near ? share_of_q : share_of_p, exact = of_far < kLeast ? kLeast : of_far;
    w = Simd::set(static_cast<float>(exact));
    rest = Simd::set(static_cast<float>(1 - exact));
    base = Simd::set(static_cast<float>(-__builtin_log(exact)));
    is_student_near = Simd::set(student_is_near ? 1 : 0);
  }
  bool swaps() const { return student_is_near; }
  // The student's of two, the teacher's of two.
  [[gnu::always_inline]] F students(F near, F far) const { return Simd::select_less(Simd::set(0), is_student_near, near, far); }
  [[gnu::always_inline]] F teachers(F near, F far) const { return Simd::select_less(Simd::set(0), is_student_near, far, near); }

  // The parts of m, m, log(near/m) and log(far/m); r = log far - log near. Of the larger of two summands and m,
  // log(m / a) = 2 atanh((m - a) / (m + a)): a is near itself, with w (far - near) to be added, unless far's part is more.
  struct Parts {
    F near, far, m, log_near, log_far;
  };
  [[gnu::always_inline]] Parts parts(F far, F near, F r) const {
    Parts m;
    m.far = Simd::mul(w, far);
    m.near = Simd::mul(rest, near);
    const auto choose = [&](F if_near, F if_far) { return Simd::select_less(m.far, near, if_near, if_far); };
    const F a = choose(near, m.far), b = choose(Simd::mul(w, Simd::sub(far, near)), m.near);
    m.m = Simd::add(a, b);
    const F log_of_m = twice_atanh(Simd::mul(b, inverse(Simd::add(m.m, a))));
    m.log_near = Simd::sub(choose(Simd::set(0), Simd::sub(base, r)), log_of_m);
    m.log_far = Simd::sub(choose(r, base), log_of_m);
    return m;
  }
  // Of 0, too.
  [[gnu::always_inline]] static F inverse(F x) { return Simd::reciprocal(Simd::max(x, Simd::set(0x1p-126f))); }

 private:
  // For |t| <= 1/3: 2 t + t^3 P(t^2), P minimax, relative error 5e-9.
  [[gnu::always_inline]] static F twice_atanh(F t) {
    const F square = Simd::mul(t, t);
    F p = Simd::set(0x1.203ca2p-2f);
    p = Simd::fma(p, square, Simd::set(0x1.1e79b4p-2f));
    p = Simd::fma(p, square, Simd::set(0x1.99d5cap-2f));
    p = Simd::fma(p, square, Simd::set(0x1.5554fap-1f));
    return Simd::fma(Simd::mul(t, square), p, Simd::add(t, t));
  }
};

// g = (1 - beta) log(p/m)
template <class Simd>
struct JensenShannon : Mixture<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  explicit JensenShannon(const Divergence& d) : Mixture<Simd>(1 - d.beta, d.beta) {}
  [[gnu::always_inline]] Column operator()(F far, F near, F r) const {
    const auto m = this->parts(far, near, r);
    const F of_near = this->times(m.near, m.log_near), of_far = this->times(m.far, m.log_far);
    return {Simd::add(of_near, of_far), this->students(of_near, of_far)};
  }
};

// The same at beta = 1/2, where no mixture is formed: with v = (larger - smaller) / larger and h = log(m / larger) =
// log(1 - v/2), D is -(h (p + q) + |r| smaller) / 2.
template <class Simd>
struct SymmetricJensenShannon : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  explicit SymmetricJensenShannon(const Divergence&) {}
  [[gnu::always_inline]] Column operator()(F p, F q, F r) const {
    const F larger = Simd::max(p, q), smaller = Simd::min(p, q), half = Simd::set(0.5f);
    const F inverse = Simd::reciprocal(Simd::max(larger, Simd::set(0x1p-126f)));
    const F h = log_one_minus_half(Simd::mul(Simd::sub(larger, smaller), inverse));
    const F log_p = Simd::sub(Simd::min(r, Simd::set(0)), h);
    const F value = Simd::fma(h, Simd::add(p, q), this->times(smaller, Simd::abs(r)));
    return {Simd::mul(value, Simd::negate(half)), this->times(Simd::mul(half, p), log_p)};
  }

 private:
  // log(1 - v/2) on [0, 1]: minimax for log(1 - v/2) / v, relative error 1.6e-7.
  [[gnu::always_inline]] static F log_one_minus_half(F v) {
    constexpr float kP[] = {-0x1.70ec6ep-9f, 0x1.b220bp-8f,   -0x1.41f69ep-7f, 0x1.a0d8ecp-9f, -0x1.14155ap-7f,
                            -0x1.f143cap-7f, -0x1.55b59ep-5f, -0x1.fffe2p-4f,  -0.5f};
    F p = Simd::set(kP[0]);
    for (int j = 1; j < static_cast<int>(sizeof kP / sizeof *kP); ++j) p = Simd::fma(p, v, Simd::set(kP[j]));
    return Simd::mul(p, v);
  }
};

// g = (1 - beta) (shift - q/m), which is (1 - beta)^2 (p - q)/m where shift is 1. Where it is 0, -(1 - beta) q/m.
template <class Simd>
struct SkewForwardKl : Mixture<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  F factor, shift;
  explicit SkewForwardKl(const Divergence& d)
      : Mixture<Simd>(1 - d.beta, d.beta),
        factor(Simd::set(static_cast<float>(d.shift == 0 ? 1 - d.beta : (1 - d.beta) * (1 - d.beta)))),
        shift(Simd::set(static_cast<float>(d.shift))) {}
  [[gnu::always_inline]] Column operator()(F far, F near, F r) const {
    const auto m = this->parts(far, near, r);
    const F p = this->students(near, far), q = this->teachers(near, far);
    const F g = Simd::mul(factor, Simd::mul(Simd::sub(Simd::mul(shift, p), q), this->inverse(m.m)));
    return {this->times(q, this->teachers(m.log_near, m.log_far)), this->times(p, g)};
  }
};

// g = log(p/m) + beta (1 - p/m) = log(p/m) + beta (1 - beta) (q - p)/m
template <class Simd>
struct SkewReverseKl : Mixture<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  F factor;
  explicit SkewReverseKl(const Divergence& d)
      : Mixture<Simd>(d.beta, 1 - d.beta), factor(Simd::set(static_cast<float>(d.beta * (1 - d.beta)))) {}
  [[gnu::always_inline]] Column operator()(F far, F near, F r) const {
    const auto m = this->parts(far, near, r);
    const F p = this->students(near, far), q = this->teachers(near, far), log_p = this->students(m.log_near, m.log_far);
    const F g = Simd::fma(factor, Simd::mul(Simd::sub(q, p), this->inverse(m.m)), log_p);
    return {this->times(p, log_p), this->times(p, g)};
  }
};

// g = sign(p - q) / 2
template <class Simd>
struct TotalVariation : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  explicit TotalVariation(const Divergence&) {}
  [[gnu::always_inline]] Column operator()(F p, F q, F) const {
    const F difference = Simd::sub(p, q), half = Simd::set(0.5f);
    const F form = Simd::flip_sign(Simd::mul(half, p), difference);
    return {Simd::mul(half, Simd::abs(difference)), Simd::select_abs_at_most(difference, 0, Simd::set(0), form)};
  }
};

// Of class probabilities, which need not sum to 1: q (-log p), and -q, whose sum is the factor of p in the gradient. Gets log p.
template <class Simd>
struct SoftLabels : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  explicit SoftLabels(const Divergence&) {}
  [[gnu::always_inline]] Column operator()(F, F q, F log_p) const {
    return {Simd::negate(this->times(q, log_p)), Simd::negate(q)};
  }
};

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_DIVERGENCE_FORMS_H_
