// The divergences, column by column: losses.md, "Distillation: two inputs a row". A form gets p, q and log p - log q (infinite
// where one of the two is 0, NaN where both are) and gives a column's share of the divergence and p (g - what g is shifted by).
// g is chosen such that p = q gives 0 in every digit.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_DIVERGENCE_FORMS_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_DIVERGENCE_FORMS_H_

#include "backends/cpu/simd/log.h"
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
  // weight * log, 0 where the weight is: 0 log 0 = 0.
  [[gnu::always_inline]] static F times(F weight, F log) { return Simd::multiply_where_nonzero(weight, log); }
};

// g = 1 - q/p
template <class Simd>
struct ForwardKl : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  static constexpr bool kHasMean = false;
  explicit ForwardKl(double) {}
  [[gnu::always_inline]] Column operator()(F p, F q, F r) const { return {Simd::negate(this->times(q, r)), Simd::sub(p, q)}; }
};

// g = log p - log q
template <class Simd>
struct ReverseKl : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  explicit ReverseKl(double) {}
  [[gnu::always_inline]] Column operator()(F p, F, F r) const {
    const F value = this->times(p, r);
    return {value, value};
  }
};

template <class Simd>
struct Jeffreys : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  explicit Jeffreys(double) {}
  [[gnu::always_inline]] Column operator()(F p, F q, F r) const {
    const F reverse = this->times(p, r);
    return {Simd::sub(reverse, this->times(q, r)), Simd::add(reverse, Simd::sub(p, q))};
  }
};

// What those with a mixture m = (1 - share) p + share q need of it, relative to the larger of p and q, so that nothing
// overflows: log(p/m), log(q/m), and (q - p)/m.
template <class Simd>
struct Mixture : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  F share;
  explicit Mixture(double share_of_q) : share(Simd::set(static_cast<float>(share_of_q))) {}
  struct Parts {
    F larger, inverse, ratio, log_p, log_q;
  };
  [[gnu::always_inline]] Parts parts(F p, F q, F r) const {
    Parts m;
    m.larger = Simd::max(p, q);
    m.inverse = Simd::reciprocal(m.larger);
    const F mixed = Simd::fma(share, Simd::sub(q, p), p);
    // 1 where p = q, whatever the reciprocal rounds.
    m.ratio = Simd::fma(Simd::sub(mixed, m.larger), m.inverse, Simd::set(1));
    const F log_ratio = log<Simd>(m.ratio), none = Simd::set(0);
    m.log_p = Simd::sub(Simd::min(r, none), log_ratio);
    m.log_q = Simd::sub(Simd::min(Simd::negate(r), none), log_ratio);
    return m;
  }
  [[gnu::always_inline]] F difference_over_mixture(const Parts& m, F p, F q) const {
    return Simd::mul(Simd::mul(Simd::sub(q, p), m.inverse), Simd::reciprocal(m.ratio));
  }
};

// g = (1 - beta) log(p/m)
template <class Simd>
struct JensenShannon : Mixture<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  F rest;
  explicit JensenShannon(double beta) : Mixture<Simd>(beta), rest(Simd::set(static_cast<float>(1 - beta))) {}
  [[gnu::always_inline]] Column operator()(F p, F q, F r) const {
    const auto m = this->parts(p, q, r);
    const F form = this->times(Simd::mul(rest, p), m.log_p);
    return {Simd::add(form, this->times(Simd::mul(this->share, q), m.log_q)), form};
  }
};

// The same at beta = 1/2, where no mixture is formed: with v = (larger - smaller) / larger and h = log(m / larger) =
// log(1 - v/2), D is -(h (p + q) + |r| smaller) / 2.
template <class Simd>
struct SymmetricJensenShannon : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  explicit SymmetricJensenShannon(double) {}
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

// g = (1 - beta) (1 - q/m) = (1 - beta)^2 (p - q)/m
template <class Simd>
struct SkewForwardKl : Mixture<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  F factor;
  explicit SkewForwardKl(double beta) : Mixture<Simd>(beta), factor(Simd::set(static_cast<float>(-(1 - beta) * (1 - beta)))) {}
  [[gnu::always_inline]] Column operator()(F p, F q, F r) const {
    const auto m = this->parts(p, q, r);
    const F g = Simd::mul(factor, this->difference_over_mixture(m, p, q));
    return {this->times(q, m.log_q), this->times(p, g)};
  }
};

// g = log(p/m) + beta (1 - p/m) = log(p/m) + beta (1 - beta) (q - p)/m
template <class Simd>
struct SkewReverseKl : Mixture<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  F factor;
  explicit SkewReverseKl(double beta) : Mixture<Simd>(1 - beta), factor(Simd::set(static_cast<float>(beta * (1 - beta)))) {}
  [[gnu::always_inline]] Column operator()(F p, F q, F r) const {
    const auto m = this->parts(p, q, r);
    const F g = Simd::fma(factor, this->difference_over_mixture(m, p, q), m.log_p);
    return {this->times(p, m.log_p), this->times(p, g)};
  }
};

// g = sign(p - q) / 2
template <class Simd>
struct TotalVariation : DivergenceForm<Simd> {
  using typename DivergenceForm<Simd>::F;
  using typename DivergenceForm<Simd>::Column;
  explicit TotalVariation(double) {}
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
  explicit SoftLabels(double) {}
  [[gnu::always_inline]] Column operator()(F, F q, F log_p) const {
    return {Simd::negate(this->times(q, log_p)), Simd::negate(q)};
  }
};

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_DIVERGENCE_FORMS_H_
