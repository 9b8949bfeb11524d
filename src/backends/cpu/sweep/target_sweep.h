// The target sweep of a row, after its forward and its target's: the divergence of the student's distribution p from the
// teacher's q, or the sums over class probabilities, and their gradient; both but for the label's column, whose p and q the
// stashes leave out and the driver knows to more digits.
//
// Cost model, bfloat16: each row's forward reads 2 bytes and takes an exp an element, as always. Then all is in the caches: the
// divergence reads both rows' exps and logits once more, 12 bytes, and takes a logarithm where it has a mixture; the gradient is
// a linear combination of the student's exps and of what the divergence has left of the teacher's, 8 bytes read and 2 written.
//
// With a softcap a stash holds slopes, so that exps are made again, into arrays in L1. A label with a temperature of its own
// takes an exp an element more, in the gradient.
#pragma once

#include <cstdint>

#include "backends/cpu/sweep/backward_sweep.h"
#include "core/vector_arithmetic.h"

namespace tileloss::impl::cpu {

template <class Simd, class T>
class TargetSweep : BackwardSweep<Simd, T> {
  using Base = BackwardSweep<Simd, T>;
  using typename Base::F;
  using typename Base::Loop;
  using typename Base::Pair;
  using typename Base::Running;
  template <class Transform>
  using Block = typename Base::template Block<Transform>;
  template <class Transform>
  using Operands = typename Base::template Operands<Transform>;
  using Base::is_aligned;
  using Base::kPair;
  using Arithmetic = VectorArithmetic<Simd>;

  // -------------------------------------------------------------------------------------------------------------- one side

  // What turns a side's exponents t, relative to `offset`, into logarithms of probabilities: log p = t / log2e + constant.
  struct Side {
    const RowSide& row;
    double log2e;
    double own = 0, max = 0;  // what the offset subtracts, and the row's maximum, in units of log 2
    double constant = 0;
    F offset;
    Block<Linear<Simd>> block;
    explicit Side(const RowSide& side) : row(side), log2e(Running::log2e(side.transform)), block(side.transform) {
      max = log2e * side.max;
      const float nearest = Simd::offset_for(max, side.transform.exponent_scale);
      own = Running::effective_offset(side.transform, nearest);
      constant = (own - max) / log2e - side.log_sum;
      offset = Simd::set(nearest);
    }
    const T* x() const { return static_cast<const T*>(row.x); }
    // What a stash is relative to: a block of -inf alone, before any other, has a reference of its own.
    double reference(std::int64_t vocab_block) const {
      const double stored = row.references[vocab_block];
      return stored > max + 1 ? max : stored;
    }
    double share_of(double relative_to) const { return __builtin_exp2(relative_to - max) / row.sum; }
    // What turns a block's exps into probabilities.
    double share(std::int64_t vocab_block) const { return share_of(reference(vocab_block)); }
  };

  static F set(double x) { return Simd::set(static_cast<float>(x)); }

  // What all columns are multiplied by. Of float32 rows it is not rounded itself: what every column has lost would come on top of
  // all that one may lose.
  struct Constant {
    F high, low;
    explicit Constant(double x) : high(Base::coefficient(x)), low(Simd::set(0)) {
      const double rounded = static_cast<float>(x);
      if (Loop::kFine && __builtin_isfinite(rounded)) low = set(x - rounded);
    }
    [[gnu::always_inline]] F times(F v) const { return Loop::kFine ? Simd::fma(v, high, Simd::mul(v, low)) : Simd::mul(v, high); }
    [[gnu::always_inline]] Pair times(Pair v) const { return {times(v.a), times(v.b)}; }
  };

  static bool is_capped(const RowSide& side) { return side.transform.softcap > 0; }
  // Whether the exps become probabilities before anything else is done. A divergence without a mean writes its gradient at once,
  // but for a label's temperature.
  static bool has_probabilities(const TargetRow& row) {
    return is_capped(row.own) || is_capped(row.teacher) || (row.label != nullptr && !row.has_mean);
  }

  // What a form needs of a pair of columns: p, q and t of p's side less that of q's, in the units of p's; p is the student's,
  // or where the form swaps them the teacher's.
  struct Columns {
    Pair p, q, d;
  };
  [[gnu::always_inline]] static Pair difference(Pair of_p, Pair of_q, F ratio) {
    return {Simd::negative_fma(of_q.a, ratio, of_p.a), Simd::negative_fma(of_q.b, ratio, of_p.b)};
  }
  [[gnu::always_inline]] static Pair times(Pair v, F factor) { return {Simd::mul(v.a, factor), Simd::mul(v.b, factor)}; }
  [[gnu::always_inline]] static Pair times(Pair v, Pair w) { return {Simd::mul(v.a, w.a), Simd::mul(v.b, w.b)}; }

  // From logits and stashes, where there is no softcap.
  struct FromLogits {
    const Side &of_p, &of_q;
    std::int64_t start;
    Constant p_share, q_share;
    F ratio;
    FromLogits(const Side& p, const Side& q, std::int64_t begin, std::int64_t block, F unit_ratio)
        : of_p(p), of_q(q), start(begin), p_share(p.share(begin / block)), q_share(q.share(begin / block)), ratio(unit_ratio) {}
    [[gnu::always_inline]] static Pair exponents(const Side& side, std::int64_t at, int count) {
      const T* x = side.x() + at;
      return Loop::exponents(side.block, count < kPair ? Loop::load_partial(x, count, 0) : Loop::load(x), side.offset);
    }
    [[gnu::always_inline]] Columns operator()(std::int64_t i, int count) const {
      const std::int64_t at = start + i;
      return {p_share.times(Loop::load_floats(of_p.row.exps + at)), q_share.times(Loop::load_floats(of_q.row.exps + at)),
              difference(exponents(of_p, at, count), exponents(of_q, at, count), ratio)};
    }
  };

  // From what `probabilities` has made of either side.
  struct FromArrays {
    const float *p, *q, *t_of_p, *t_of_q;
    F ratio;
    [[gnu::always_inline]] Columns operator()(std::int64_t i, int) const {
      return {Loop::load_floats(p + i), Loop::load_floats(q + i),
              difference(Loop::load_floats(t_of_p + i), Loop::load_floats(t_of_q + i), ratio)};
    }
  };

  // The columns [start, start + n): probabilities for exps, 0 beyond the row's end, and their exponents.
  template <class Transform>
  static void probabilities(const TargetRow& row, const Side& side, std::int64_t start, std::int64_t n, float* exponents) {
    Block<Transform> b(side.row.transform);
    const T* x = side.x() + start;
    float* p = side.row.exps + start;
    Operands<Transform> operands(side.row.operands, row.vocab_block);
    operands.compute(b, x, n);
    const Constant share(Transform::kHasSlope ? side.share_of(side.own) : side.share(start / row.vocab_block));
    for (std::int64_t i = 0; i < n; i += kPair) {
      const int count = static_cast<int>(n - i < kPair ? n - i : kPair);
      const Pair v = count < kPair ? Loop::load_partial(x + i, count, 0) : Loop::load(x + i);
      Pair e, t;
      if constexpr (Transform::kHasSlope) {
        typename Loop::Reduced reduced;
        Loop::reduce(b, i, v, side.offset, reduced);
        e = Loop::exp2(reduced);
        t = reduced.t;
      } else {
        e = Loop::load_floats(p + i);
        t = Loop::exponents(b, b.transform.operands(v), side.offset);
      }
      const std::int64_t excluded = row.label_column - start - i;
      const bool has_target = excluded >= 0 && excluded < kPair;
      if (count < kPair || has_target) e = Simd::keep(e, count, has_target ? static_cast<int>(excluded) : -1, x);
      store_floats(p + i, share.times(e));
      store_floats(exponents + i, t);
    }
  }

  static void probabilities(const TargetRow& row, const Side& side, std::int64_t start, std::int64_t n, float* exponents) {
    if (is_capped(side.row)) {
      probabilities<Softcap<Simd, Loop::kFine>>(row, side, start, n, exponents);
    } else {
      probabilities<Linear<Simd>>(row, side, start, n, exponents);
    }
  }

  static void store_floats(float* p, Pair v) {
    Simd::store(p, v.a);
    Simd::store(p + Simd::kLanes, v.b);
  }

  // --------------------------------------------------------------------------------------------------------------- gradient

  // dx = p_factor p + form_factor (p g - what g is shifted by). p = q gives 0 where there is no cross-entropy: then the second
  // term is 0, and so is the first factor; with g = 1 - q/p the factors are of p and -q, and are equal.
  struct Factors {
    double p = 0, form = 0;
    Factors(const TargetRow& row, double slope) {
      p = (row.form * (row.has_mean ? -row.sums.mean : 1) - (row.label == nullptr ? row.target : 0)) * slope;
      form = row.form * slope;
    }
  };

  enum class Write { kNothing, kStore, kStream };
  template <Write kWrite>
  [[gnu::always_inline]] static void write(T* dx, Pair g, int count) {
    if constexpr (kWrite == Write::kStream) {
      if (count == kPair) return Simd::stream_pair(dx, g);
    }
    if (count < kPair) return Simd::store_pair_partial(dx, g, count);
    Simd::store_pair(dx, g);
  }

  static Write way(const TargetRow& row, std::int64_t start) {
    return row.stream && is_aligned(static_cast<const T*>(row.dx) + start) ? Write::kStream : Write::kStore;
  }

  // The first factor takes in what turns the block's exps into probabilities. kIsDifference: the other is of q, else of p g.
  template <bool kIsDifference, Write kWrite, class Transform>
  static void gradient_block(const TargetRow& row, Block<Transform>& b, std::int64_t start, std::int64_t n,
                             const Constant& p_factor, const Constant& other_factor) {
    const T* x = static_cast<const T*>(row.own.x) + start;
    T* dx = static_cast<T*>(row.dx) + start;
    Operands<Transform> operands(row.own.operands, row.vocab_block);
    operands.compute(b, x, n);
    const float *exps = row.own.exps + start, *others = row.teacher.exps + start;
    const auto at = [&](std::int64_t k) {
      const F p = Simd::load(exps + k), other = Simd::load(others + k);
      if constexpr (kIsDifference) return Simd::sub(p_factor.times(p), other_factor.times(other));
      if constexpr (!Loop::kFine) return Simd::fma(p, p_factor.high, Simd::mul(other, other_factor.high));
      const F low = Simd::fma(p, p_factor.low, Simd::mul(other, other_factor.low));
      return Simd::fma(p, p_factor.high, Simd::fma(other, other_factor.high, low));
    };
    for (std::int64_t i = 0; i < n; i += kPair) {
      Pair g = {at(i), at(i + Simd::kLanes)};
      if constexpr (Transform::kHasSlope) {
        const Pair slope = Loop::load_floats(b.slopes + i);
        g = {Simd::mul(g.a, slope.a), Simd::mul(g.b, slope.b)};
      }
      write<kWrite>(dx + i, g, static_cast<int>(n - i < kPair ? n - i : kPair));
    }
  }

  // The label's own cross-entropy, -target p of its temperature: exps from logits once more, and what they are multiplied by.
  template <class Transform>
  struct LabelTerm {
    Block<Transform> block;
    F offset, factor;
    // `slope_unit`: of the slopes that the term is multiplied by.
    LabelTerm(const TargetRow& row, double slope_unit) : block(row.label->transform) {
      const Side side(*row.label);
      offset = side.offset;
      double share = side.share_of(side.own);
      if constexpr (Transform::kIsCentered) {
        const float largest = Base::block_max(side.x(), row.columns);
        block.transform.center = Simd::set(largest > -kInfinity ? largest : 0);
        offset = Simd::set(0);
        share = __builtin_exp(static_cast<double>(row.label->transform.value(largest)) - row.label->max) / row.label->sum;
      }
      factor = Base::coefficient(-row.target * share * row.label->transform.scale / slope_unit);
    }
    // For dx of a block whose operands and slopes are the student's: they do not depend on a temperature.
    template <class Own>
    void start(const Block<Own>& student) {
      block.operands = student.operands;
      block.operands_lost = student.operands_lost;
      block.slopes = student.slopes;
    }
    [[gnu::always_inline]] Pair operator()(const T* x, std::int64_t i, int count) const {
      typename Loop::Reduced reduced;
      Loop::reduce(block, i, count < kPair ? Loop::load_partial(x + i, count, 0) : Loop::load(x + i), offset, reduced);
      return Loop::exp2(reduced);
    }
  };

  // gradient_block with a LabelTerm; `other_factor` is of what has been left of the teacher's exps, whatever it is.
  template <Write kWrite, class Transform, class Label>
  static void gradient_block_with_label(const TargetRow& row, Block<Transform>& b, Label& label, std::int64_t start,
                                        std::int64_t n, F p_factor, F other_factor) {
    const T* x = static_cast<const T*>(row.own.x) + start;
    T* dx = static_cast<T*>(row.dx) + start;
    Operands<Transform> operands(row.own.operands, row.vocab_block);
    operands.compute(b, x, n);
    label.start(b);
    const float *exps = row.own.exps + start, *others = row.teacher.exps + start;
    for (std::int64_t i = 0; i < n; i += kPair) {
      const int count = static_cast<int>(n - i < kPair ? n - i : kPair);
      Pair p = Loop::load_floats(exps + i), other = Loop::load_floats(others + i), own = label(x, i, count);
      if constexpr (Transform::kHasSlope) {  // which is in the factors' way if it is large: they are divided by its unit
        const Pair slope = Loop::load_floats(b.slopes + i);
        p = times(p, slope);
        other = times(other, slope);
        own = times(own, slope);
      }
      const Pair g = {Simd::fma(p.a, p_factor, Simd::fma(other.a, other_factor, Simd::mul(own.a, label.factor))),
                      Simd::fma(p.b, p_factor, Simd::fma(other.b, other_factor, Simd::mul(own.b, label.factor)))};
      write<kWrite>(dx + i, g, count);
    }
  }

  template <class Transform, class LabelTransform>
  static void gradient_row_with_label(const TargetRow& row) {
    const LogitTransform& transform = row.own.transform;
    const Side student(row.own);
    const double slope_unit = Transform::slope_unit(transform);
    const Factors factors(row, transform.scale / slope_unit);
    const F other = Base::coefficient(row.has_mean ? factors.form : -factors.form);
    Block<Transform> b(transform);
    LabelTerm<LabelTransform> label(row, slope_unit);
    for (std::int64_t start = 0; start < row.columns; start += row.vocab_block) {
      const std::int64_t n = row.columns - start < row.vocab_block ? row.columns - start : row.vocab_block;
      const F p = Base::coefficient(factors.p * (has_probabilities(row) ? 1 : student.share(start / row.vocab_block)));
      if (way(row, start) == Write::kStream) {
        gradient_block_with_label<Write::kStream>(row, b, label, start, n, p, other);
      } else {
        gradient_block_with_label<Write::kStore>(row, b, label, start, n, p, other);
      }
    }
    if (row.stream) Simd::fence();
  }

  template <class Transform>
  static void gradient_row(const TargetRow& row) {
    const LogitTransform& transform = row.own.transform;
    const Side student(row.own);
    const Factors factors(row, transform.scale / Transform::slope_unit(transform));
    const Constant other(factors.form);
    // Without a softcap a divergence without a mean has written dx already: the teacher's exps here are probabilities.
    const bool is_difference = !row.has_mean;
    Block<Transform> b(transform);
    for (std::int64_t start = 0; start < row.columns; start += row.vocab_block) {
      const std::int64_t n = row.columns - start < row.vocab_block ? row.columns - start : row.vocab_block;
      const std::int64_t block = start / row.vocab_block;
      const Constant p(factors.p * (has_probabilities(row) ? 1 : student.share(block)));
      const bool stream = way(row, start) == Write::kStream;
      if (is_difference) {
        stream ? gradient_block<true, Write::kStream>(row, b, start, n, p, other)
               : gradient_block<true, Write::kStore>(row, b, start, n, p, other);
      } else {
        stream ? gradient_block<false, Write::kStream>(row, b, start, n, p, other)
               : gradient_block<false, Write::kStore>(row, b, start, n, p, other);
      }
    }
    if (row.stream) Simd::fence();
  }

  // ------------------------------------------------------------------------------------------------------------- divergence

  // Where dx is written in the same loop.
  struct Gradient {
    T* dx = nullptr;
    F p_factor, form_factor;
  };

  // Adds up the divergence of n columns; what the gradient needs of them goes over the teacher's exps, or is made at once.
  template <Write kWrite, class Form, class Source>
  static void diverge(const Form& form, const Source& source, F unit, F constant, std::int64_t n, float* forms,
                      const Gradient& gradient, TargetSums& sums) {
    F value0 = Simd::set(0), value1 = value0, mean0 = value0, mean1 = value0;
    for (std::int64_t i = 0; i < n; i += kPair) {
      const int count = static_cast<int>(n - i < kPair ? n - i : kPair);
      const Columns c = source(i, count);
      const auto a = form({c.p.a, c.q.a, Simd::fma(c.d.a, unit, constant)});
      const auto b = form({c.p.b, c.q.b, Simd::fma(c.d.b, unit, constant)});
      value0 = Simd::add(value0, a.value);
      value1 = Simd::add(value1, b.value);
      if constexpr (Form::kHasMean) {
        store_floats(forms + i, {a.form, b.form});
        mean0 = Simd::add(mean0, a.form);
        mean1 = Simd::add(mean1, b.form);
      }
      if constexpr (kWrite != Write::kNothing) {
        const Pair p = times(c.p, gradient.p_factor), q = times(c.q, gradient.form_factor);
        write<kWrite>(gradient.dx + i, {Simd::sub(p.a, q.a), Simd::sub(p.b, q.b)}, count);
      }
    }
    sums.divergence += Simd::reduce_add(Simd::add(value0, value1));
    if constexpr (Form::kHasMean) sums.mean += Simd::reduce_add(Simd::add(mean0, mean1));
  }

  template <class Form>
  static void diverge_row(const Form& form, TargetRow& row) {
    const Side student(row.own), teacher(row.teacher);
    const bool swaps = form.swaps();
    const Side &of_p = swaps ? teacher : student, &of_q = swaps ? student : teacher;
    const F constant = set(of_p.constant - of_q.constant);
    const F unit = set(1 / of_p.log2e);
    const F ratio = set(of_p.log2e / of_q.log2e);
    const bool from_arrays = has_probabilities(row);
    float *const t_student = row.exponents, *const t_teacher = row.exponents + kTargetBlock;
    row.sums = {};
    row.has_gradient = !Form::kHasMean && !from_arrays && row.dx != nullptr;
    const Factors factors(row, row.own.transform.scale);
    Gradient gradient{nullptr, Base::coefficient(factors.p), Base::coefficient(factors.form)};
    for (std::int64_t block = 0; block < row.columns; block += row.vocab_block) {
      const std::int64_t end = block + row.vocab_block < row.columns ? block + row.vocab_block : row.columns;
      for (std::int64_t start = block; start < end; start += kTargetBlock) {
        const std::int64_t n = end - start < kTargetBlock ? end - start : kTargetBlock;
        float *const p = row.own.exps + start, *const q = row.teacher.exps + start;
        if (from_arrays) {
          probabilities(row, student, start, n, t_student);
          probabilities(row, teacher, start, n, t_teacher);
          const FromArrays source =
              swaps ? FromArrays{q, p, t_teacher, t_student, ratio} : FromArrays{p, q, t_student, t_teacher, ratio};
          diverge<Write::kNothing>(form, source, unit, constant, n, q, gradient, row.sums);
          continue;
        }
        const FromLogits source(of_p, of_q, start, row.vocab_block, ratio);
        if constexpr (!Form::kHasMean) {
          gradient.dx = static_cast<T*>(row.dx) + start;
          if (row.has_gradient && way(row, start) == Write::kStream) {
            diverge<Write::kStream>(form, source, unit, constant, n, q, gradient, row.sums);
            continue;
          }
          if (row.has_gradient) {
            diverge<Write::kStore>(form, source, unit, constant, n, q, gradient, row.sums);
            continue;
          }
        }
        diverge<Write::kNothing>(form, source, unit, constant, n, q, gradient, row.sums);
      }
    }
    if (row.has_gradient && row.stream) Simd::fence();
  }

  static void diverge(TargetRow& row) {
    if (row.divergence.kind == DivergenceKind::kJsd && row.divergence.beta == 0.5)
      return diverge_row(SymmetricJensenShannon<Simd>{}, row);
    visit_divergence<Arithmetic>(row.divergence, [&](const auto& form) { diverge_row(form, row); });
  }

  // ---------------------------------------------------------------------------------------------------- class probabilities

  // q from what `weigh` has made; in place of the ratio of p and q, p itself. What stands for p is of no use.
  struct LogProbs {
    const Side& student;
    const float *q, *exponents;  // of a capped student; null: from its logits
    std::int64_t start;
    [[gnu::always_inline]] Columns operator()(std::int64_t i, int count) const {
      const Pair weights = Loop::load_floats(q + i);
      if (exponents != nullptr) return {weights, weights, Loop::load_floats(exponents + i)};
      return {weights, weights, FromLogits::exponents(student, start + i, count)};
    }
  };

  // Of n columns in pair order, 0 behind them. In double, as it is a factor of the gradient: beside a heavy class float32 would
  // round it with every addition, and equal numbers all one way. The first addition, of two, costs half a unit at most, and saves
  // half of the conversions.
  static double sum_of(const float* v, std::int64_t n) {
    constexpr std::int64_t kLanes = Simd::kLanes;
    double lanes[kLanes] = {}, sum = 0;
    for (std::int64_t i = 0; i < n; i += kPair) {
      for (std::int64_t k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(v[i + k] + v[i + kLanes + k]);
    }
    for (const double lane : lanes) sum += lane;
    return sum;
  }

  static void add_probabilities(TargetRow& row) {
    const ClassProbabilities<Arithmetic> form;
    const Side student(row.own);
    const F constant = set(student.constant), unit = set(1 / student.log2e);
    float* const exponents = is_capped(row.own) ? row.exponents : nullptr;
    row.sums = {};
    for (std::int64_t block = 0; block < row.columns; block += row.vocab_block) {
      const std::int64_t end = block + row.vocab_block < row.columns ? block + row.vocab_block : row.columns;
      for (std::int64_t start = block; start < end; start += kTargetBlock) {
        const std::int64_t n = end - start < kTargetBlock ? end - start : kTargetBlock;
        if (exponents != nullptr) probabilities(row, student, start, n, exponents);
        float* const q = row.teacher.exps + start;
        TargetSums sums;
        diverge<Write::kNothing>(form, LogProbs{student, q, exponents, start}, unit, constant, n, q, Gradient{}, sums);
        row.sums.divergence += sums.divergence;
        row.sums.mean += sum_of(q, n);
      }
    }
  }

  static float weigh(const void* probs, std::int64_t columns, std::int64_t left_out, float factor, float added,
                     const float* class_weights, float* to) {
    const T* const q = static_cast<const T*>(probs);
    const F f = Simd::set(factor), a = Simd::set(added);
    F most = Simd::set(-std::numeric_limits<float>::infinity());
    for (std::int64_t i = 0; i < columns; i += kPair) {
      const int count = static_cast<int>(columns - i < kPair ? columns - i : kPair);
      Pair v = q == nullptr    ? Simd::load_weights(to + i, count, Loop::kType)
               : count < kPair ? Loop::load_partial(q + i, count, 0)
                               : Loop::load(q + i);
      v = {Simd::fma(v.a, f, a), Simd::fma(v.b, f, a)};
      if (class_weights != nullptr) {
        const Pair w = Simd::load_weights(class_weights + i, count, Loop::kType);
        v = {Simd::mul(v.a, w.a), Simd::mul(v.b, w.b)};
      }
      const int excluded = left_out >= i && left_out < i + kPair ? static_cast<int>(left_out - i) : -1;
      if (count < kPair || excluded >= 0) v = Simd::keep(v, count, excluded, Loop::kType);
      store_floats(to + i, v);
      most = Simd::max(Simd::max(most, v.a), v.b);
    }
    return Simd::reduce_max(most);
  }

  static void gradient(TargetRow& row) {
    if (row.label != nullptr) {
      if (is_capped(row.own)) return gradient_row_with_label<Softcap<Simd, Loop::kFine>, Softcap<Simd, Loop::kFine>>(row);
      const LogitTransform& transform = row.label->transform;
      if (Base::is_extreme(transform, Running::log2e(transform) * row.label->max)) {
        return gradient_row_with_label<Linear<Simd>, Centered<Simd>>(row);
      }
      return gradient_row_with_label<Linear<Simd>, Linear<Simd>>(row);
    }
    if (is_capped(row.own)) {
      gradient_row<Softcap<Simd, Loop::kFine>>(row);
    } else {
      gradient_row<Linear<Simd>>(row);
    }
  }

 public:
  static constexpr TargetTable table() { return {&diverge, &add_probabilities, &gradient, &weigh}; }
};

}  // namespace tileloss::impl::cpu
