// The arithmetic of vectors of float in which core/divergence.h is compiled. A column is p, q and log p - log q, or, where a form
// swaps them, q, p and log q - log p.
#pragma once

#include "core/divergence.h"

namespace tileloss::impl {

template <class Simd>
struct VectorArithmetic {
  using N = typename Simd::F;
  struct Column {
    N p, q, log_ratio;
  };

  TILELOSS_HOST_DEVICE static N set(double x) { return Simd::set(static_cast<float>(x)); }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N negate(N x) { return Simd::negate(x); }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N abs(N x) { return Simd::abs(x); }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N add(N x, N y) { return Simd::add(x, y); }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N sub(N x, N y) { return Simd::sub(x, y); }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N mul(N x, N y) { return Simd::mul(x, y); }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N fma(N x, N y, N z) { return Simd::fma(x, y, z); }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N times(N weight, N log) {
    return Simd::multiply_where_nonzero(weight, log);
  }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N sign_as(N x, N like) {
    return Simd::select_abs_at_most(like, 0, Simd::set(0), Simd::flip_sign(x, like));
  }
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N difference(const Column& c) { return Simd::sub(c.p, c.q); }
  // Of 0, too.
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N inverse(N x) {
    return Simd::reciprocal(Simd::max(x, Simd::set(0x1p-126f)));
  }

  // Of m = share_of_p p + share_of_q q. The one of p and q of which m has the larger share is near, the other, of which it has
  // w <= 1/2, is far: near m, what is far is a correction, so that no digit is lost however small w is. A column's p is far.
  class Mixture {
   public:
    TILELOSS_HOST_DEVICE Mixture(double share_of_p, double share_of_q) : student_is_near_(share_of_p >= share_of_q) {
      constexpr double kLeast = 0x1p-100;  // its inverse stays in float32's range
      const double of_far = student_is_near_ ? share_of_q : share_of_p, exact = of_far < kLeast ? kLeast : of_far;
      w_ = set(exact);
      rest_ = set(1 - exact);
      base_ = set(-std::log(exact));
      is_student_near_ = set(student_is_near_ ? 1 : 0);
    }
    TILELOSS_HOST_DEVICE bool swaps() const { return student_is_near_; }
    // The student's of two, the teacher's of two.
    [[gnu::always_inline]] TILELOSS_HOST_DEVICE N students(N near, N far) const {
      return Simd::select_less(Simd::set(0), is_student_near_, near, far);
    }
    [[gnu::always_inline]] TILELOSS_HOST_DEVICE N teachers(N near, N far) const {
      return Simd::select_less(Simd::set(0), is_student_near_, far, near);
    }
    [[gnu::always_inline]] TILELOSS_HOST_DEVICE N student(const Column& c) const { return students(c.q, c.p); }
    [[gnu::always_inline]] TILELOSS_HOST_DEVICE N teacher(const Column& c) const { return teachers(c.q, c.p); }
    [[gnu::always_inline]] TILELOSS_HOST_DEVICE N difference(const Column& c) const { return sub(student(c), teacher(c)); }
    // shift p - q
    [[gnu::always_inline]] TILELOSS_HOST_DEVICE N shifted(const Column& c, N shift) const {
      return sub(mul(shift, student(c)), teacher(c));
    }
    [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N over(N x, N m) { return mul(x, inverse(m)); }

    // The parts of m, m, log(near/m) and log(far/m). Of the larger of two summands and m,
    // log(m / a) = 2 atanh((m - a) / (m + a)): a is near itself, with w (far - near) to be added, unless far's part is more.
    struct Parts {
      N near, far, m, log_near, log_far;
    };
    [[gnu::always_inline]] TILELOSS_HOST_DEVICE Parts parts(const Column& c) const {
      const N far = c.p, near = c.q, r = c.log_ratio;
      Parts m;
      m.far = mul(w_, far);
      m.near = mul(rest_, near);
      const auto choose = [&](N if_near, N if_far) { return Simd::select_less(m.far, near, if_near, if_far); };
      const N a = choose(near, m.far), b = choose(mul(w_, sub(far, near)), m.near);
      m.m = add(a, b);
      const N log_of_m = twice_atanh(mul(b, inverse(add(m.m, a))));
      m.log_near = sub(choose(Simd::set(0), sub(base_, r)), log_of_m);
      m.log_far = sub(choose(r, base_), log_of_m);
      return m;
    }

   private:
    // For |t| <= 1/3: 2 t + t^3 P(t^2), P minimax, relative error 5e-9.
    [[gnu::always_inline]] TILELOSS_HOST_DEVICE static N twice_atanh(N t) {
      const N square = mul(t, t);
      N p = Simd::set(0x1.203ca2p-2f);
      p = fma(p, square, Simd::set(0x1.1e79b4p-2f));
      p = fma(p, square, Simd::set(0x1.99d5cap-2f));
      p = fma(p, square, Simd::set(0x1.5554fap-1f));
      return fma(mul(t, square), p, add(t, t));
    }

    bool student_is_near_;
    N w_, rest_, base_, is_student_near_;
  };
};

// JensenShannon at beta = 1/2, where no mixture is formed: with v = (larger - smaller) / larger and h = log(m / larger) =
// log(1 - v/2), D is -(h (p + q) + |r| smaller) / 2.
template <class Simd>
struct SymmetricJensenShannon : DivergenceForm {
  using A = VectorArithmetic<Simd>;
  using F = typename Simd::F;
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE TermOf<A> operator()(const ColumnOf<A>& c) const {
    const F larger = Simd::max(c.p, c.q), smaller = Simd::min(c.p, c.q), half = Simd::set(0.5f);
    const F h = log_one_minus_half(Simd::mul(Simd::sub(larger, smaller), A::inverse(larger)));
    const F log_p = Simd::sub(Simd::min(c.log_ratio, Simd::set(0)), h);
    const F value = Simd::fma(h, Simd::add(c.p, c.q), A::times(smaller, Simd::abs(c.log_ratio)));
    return {Simd::mul(value, Simd::negate(half)), A::times(Simd::mul(half, c.p), log_p)};
  }

 private:
  // log(1 - v/2) on [0, 1]: minimax for log(1 - v/2) / v, relative error 1.6e-7.
  [[gnu::always_inline]] TILELOSS_HOST_DEVICE static F log_one_minus_half(F v) {
    constexpr float kP[] = {-0x1.70ec6ep-9f, 0x1.b220bp-8f,   -0x1.41f69ep-7f, 0x1.a0d8ecp-9f, -0x1.14155ap-7f,
                            -0x1.f143cap-7f, -0x1.55b59ep-5f, -0x1.fffe2p-4f,  -0.5f};
    F p = Simd::set(kP[0]);
    for (int j = 1; j < static_cast<int>(sizeof kP / sizeof *kP); ++j) p = Simd::fma(p, v, Simd::set(kP[j]));
    return Simd::mul(p, v);
  }
};

}  // namespace tileloss::impl
