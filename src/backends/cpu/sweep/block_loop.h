// The loop over one block of columns, written once for every instruction set (Simd), storage type (T) and logit transform.
//
// Cost model, bfloat16, AVX-512, 16 elements, where backends/cpu/sweep/table_linear.h does not apply: the exponent 1 fma, exp 5
// fma and 5 on the adder's side, sum, maximum and unpacking 2; backward from the stash 1 fma and 1.3 for the conversion. Zen 4
// starts at most one 512-bit operation a cycle on each side, so 6 to 7 cycles. A row's chain of 11 dependent operations takes 45
// cycles, more than the schedulers' 64 entries can look ahead: hence the software pipeline, which reduces the exponents of one
// pair of vectors while the polynomial of the pair before is evaluated. Timed: docs/measurements/amd-zen4-2-cores.md.
//
// Everything here is a template over Simd, so that no symbol is shared between instruction sets.
#pragma once

#include <cstdint>

#include "backends/cpu/simd/exp2.h"
#include "backends/cpu/simd/transforms.h"
#include "core/logit_transform.h"
#include "core/row_state.h"

namespace tileloss::impl::cpu {

// What the loop body does; every combination in use is its own instantiation.
struct Features {
  bool forward = false;
  bool write_stash = false;
  bool entropy = false;
  bool collision = false;
  bool backward = false;
  bool read_stash = false;
  bool general = false;  // backward with prob_logp, or a uniform part that differs from column to column
  bool stream = false;
  bool uniform = true;  // false: the uniform part is known to be 0; an fma would hold up the adder for it
};

template <class Simd, class T>
struct BlockLoop {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr std::int64_t kPair = Simd::kPair;
  static constexpr std::int64_t kStep = 2 * kPair;  // 4 vectors
  // float32 results are held to 4 + |z - m| ULP, so exp is computed with more care; 16-bit ones would not show it.
  static constexpr bool kFine = sizeof(T) == 4;
  // Bytes ahead in the row that is read from memory: fewer are slower, more are no faster.
  static constexpr std::int64_t kPrefetchBytes = 8192;
  // The same for a backward, which writes as much as it reads: further ahead Zen 4 loses what Intel gains.
  static constexpr std::int64_t kBackwardPrefetchBytes = 4096;
  // Or else the first pair of a step has fetched it.
  static constexpr bool kSecondPairHasALine = kPair * sizeof(T) >= 64;
  static constexpr const T* kType = nullptr;  // names T in an overload

  static Pair load(const T* p) { return Simd::unpack(Simd::load_raw(p), kType); }
  static Pair load_partial(const T* p, int n, float fill) { return Simd::unpack(Simd::load_raw_partial(p, n, fill), kType); }

  // One block's sums: even vectors in the first accumulator, odd ones in the second. Two are enough, with 14 cycles between two
  // additions to one, and leave registers to the pipeline.
  struct Accumulators {
    F sum[2], entropy[2], collision[2];
    // Of the raw logits; the lowest only with Transform::kNeedsLowest.
    decltype(Simd::max_start(kType)) max, lowest;
    Accumulators() : max(Simd::max_start(kType)), lowest(max) {}
    template <Features kF>
    void clear_sums() {
      for (int i = 0; i < 2; ++i) {
        sum[i] = Simd::set(0);
        if constexpr (kF.entropy) entropy[i] = sum[i];
        if constexpr (kF.collision) collision[i] = sum[i];
      }
    }
    // `kFinite`: t is never -inf, and not cut off: a fast path's may have any unit.
    template <Features kF, bool kFinite>
    [[gnu::always_inline]] void add(int k, [[maybe_unused]] F t, F e) {
      sum[k] = Simd::add(sum[k], e);
      // 0 * -inf must not arise: exp2 is 0 from -150 on.
      if constexpr (kF.entropy) entropy[k] = Simd::fma(kFinite ? t : Simd::max(Simd::set(-200), t), e, entropy[k]);
      if constexpr (kF.collision) collision[k] = Simd::fma(e, e, collision[k]);
    }
    // The sums so far go to `upper`. Beside a maximum's 1 a lane would drop whatever is below 2^-24, always the same way.
    template <Features kF>
    [[gnu::always_inline]] void move_sums_to(Accumulators& upper) {
      for (int i = 0; i < 2; ++i) {
        upper.sum[i] = Simd::add(upper.sum[i], sum[i]);
        if constexpr (kF.entropy) upper.entropy[i] = Simd::add(upper.entropy[i], entropy[i]);
        if constexpr (kF.collision) upper.collision[i] = Simd::add(upper.collision[i], collision[i]);
      }
      clear_sums<kF>();
    }
    static float total(const F* v) { return Simd::reduce_add(Simd::add(v[0], v[1])); }
    float total_max() const { return Simd::max_value(max, kType); }
  };

  // A block's share of a ForwardRow and a BackwardRow.
  template <class Transform>
  struct Block {
    Transform transform;
    typename Simd::Scale scale;  // exponent = scale * u - offset
    const T* x = nullptr;        // forward
    // With Transform::kHasSlope, computed before the loop, in pair order: the forward's, or those of a backward without stash.
    const float* operands = nullptr;
    const float* slopes = nullptr;
    const float* operands_lost = nullptr;  // with kFine, what rounding the operands lost
    std::int64_t excluded = -1;            // forward: the target's column, which counts for the maximum only
    float* stash = nullptr;
    F offset;
    const T* previous_x = nullptr;
    T* dx = nullptr;
    const float* previous_stash = nullptr;
    const float* class_weights = nullptr;
    F max_offset, prob, prob_logp, uniform;
    double previous_reference = __builtin_nan("");  // the backward's, which the coefficients are relative to

    explicit Block(const LogitTransform& t) : transform(t), scale(t.exponent_scale, t.exact_exponent_scale) {
      offset = max_offset = prob = prob_logp = uniform = Simd::set(0);
    }
  };

  // ------------------------------------------------------------------------------------------------------------- exponents

  // A pair on its way to exp: t = n + r, n an integer.
  struct Reduced {
    Pair t, n, r, slope;
  };

  // What the software pipeline carries of a pair.
  template <class Transform>
  static auto nothing_carried() {
    if constexpr (Transform::kIsFastPath) {
      return typename Transform::Started{};
    } else {
      return Reduced{};
    }
  }
  template <class Transform>
  using Carried = decltype(nothing_carried<Transform>());

  static Pair load_floats(const float* p) { return {Simd::load(p), Simd::load(p + Simd::kLanes)}; }

  template <class Transform>
  [[gnu::always_inline]] static Pair exponents(const Block<Transform>& b, Pair u, F offset) {
    return {Simd::scale_minus(u.a, b.scale, offset), Simd::scale_minus(u.b, b.scale, offset)};
  }

  template <class Transform>
  [[gnu::always_inline]] static void reduce(const Block<Transform>& b, std::int64_t i, Pair x, F offset, Reduced& out) {
    Pair u;
    if constexpr (Transform::kHasSlope) {
      u = load_floats(b.operands + i);
      if constexpr (Transform::kSlopeFromOperand) {
        out.slope = b.transform.slopes(u);
      } else {
        out.slope = load_floats(b.slopes + i);
      }
    } else {
      u = b.transform.operands(x);
    }
    out.t = exponents(b, u, offset);
    out.n = {Simd::round(out.t.a), Simd::round(out.t.b)};
    if constexpr (kFine) {
      out.r = {Simd::fine_remainder(u.a, b.scale, offset, out.t.a, out.n.a),
               Simd::fine_remainder(u.b, b.scale, offset, out.t.b, out.n.b)};
      if constexpr (Transform::kHasSlope) {
        const Pair lost = load_floats(b.operands_lost + i);
        out.r = {Simd::fma(lost.a, b.scale.scale, out.r.a), Simd::fma(lost.b, b.scale.scale, out.r.b)};
      }
    } else {
      out.r = {Simd::remainder(out.t.a, out.n.a), Simd::remainder(out.t.b, out.n.b)};
    }
  }

  [[gnu::always_inline]] static Pair exp2(const Reduced& in) { return exp2_scaled<Simd, kFine>(in.r, in.n); }

  // ------------------------------------------------------------------------------------------------------- the loop's halves

  // Loads logits, looks at their maximum, reduces their exponents.
  template <Features kF, bool kMasked, bool kPrefetch = !kMasked, class Transform>
  [[gnu::always_inline]] static void prepare(const Block<Transform>& b, std::int64_t i, int n, Accumulators& acc,
                                             Carried<Transform>& out) {
    const T* p = b.x + i;
    if constexpr (kPrefetch) Simd::prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes);
    // A maximum of 0 that is none is found out like a negative one.
    constexpr float kFill = Transform::kIsFastPath ? 0 : -kInfinity;
    const auto raw = kMasked && n < kPair ? Simd::load_raw_partial(p, n, kFill) : Simd::load_raw(p);
    acc.max = Simd::max_raw(acc.max, raw);
    if constexpr (Transform::kIsFastPath) {
      if constexpr (Transform::kNeedsLowest) acc.lowest = Simd::lowest_raw(acc.lowest, raw);
      out = b.transform.start(Simd::unpack(raw, kType));
    } else {
      reduce(b, i, Simd::unpack(raw, kType), b.offset, out);
    }
  }

  template <Features kF, bool kMasked, class Transform>
  [[gnu::always_inline]] static void complete(const Block<Transform>& b, std::int64_t i, int n, const Carried<Transform>& in,
                                              Accumulators& acc) {
    Pair e, t;
    [[maybe_unused]] Pair slope;
    if constexpr (Transform::kIsFastPath) {
      e = b.transform.finish(in, t, slope);
    } else {
      e = exp2(in);
      t = in.t;
      if constexpr (Transform::kHasSlope) slope = in.slope;
    }
    if constexpr (kMasked) {
      const int excluded = static_cast<int>(b.excluded - i);
      e = Simd::keep(e, n, excluded, b.x);
      if constexpr (Transform::kIsFastPath && kF.entropy) t = Simd::keep(t, n, excluded, b.x);  // its may be -inf
    }
    acc.template add<kF, Transform::kIsFastPath>(0, t.a, e.a);
    acc.template add<kF, Transform::kIsFastPath>(1, t.b, e.b);
    if constexpr (kF.write_stash) {
      // With the slope in the stash, a backward without a uniform part never looks at x.
      if constexpr (Transform::kHasSlope) e = {Simd::mul(e.a, slope.a), Simd::mul(e.b, slope.b)};
      Simd::store(b.stash + i, e.a);
      Simd::store(b.stash + i + Simd::kLanes, e.b);
    }
  }

  // A pair of the gradient. `e` holds p S 2^reference, and the slope if the transform has one.
  template <Features kF, bool kMasked, bool kPrefetch = !kMasked, class Transform>
  [[gnu::always_inline]] static Pair backward(const Block<Transform>& b, std::int64_t i, [[maybe_unused]] int n) {
    Pair e;
    [[maybe_unused]] Reduced reduced;
    if constexpr (kF.general || !kF.read_stash) {
      const T* p = b.previous_x + i;
      // Without a stash no forward has just read the row.
      if constexpr (kPrefetch && !kF.read_stash) Simd::prefetch(reinterpret_cast<const char*>(p) + kBackwardPrefetchBytes);
      reduce(b, i, kMasked && n < kPair ? load_partial(p, n, 0) : load(p), b.max_offset, reduced);
    }
    if constexpr (kF.read_stash) {
      e = load_floats(b.previous_stash + i);
    } else {
      e = exp2(reduced);
      if constexpr (Transform::kHasSlope) e = {Simd::mul(e.a, reduced.slope.a), Simd::mul(e.b, reduced.slope.b)};
    }
    if constexpr (!kF.uniform) return {Simd::mul(e.a, b.prob), Simd::mul(e.b, b.prob)};
    if constexpr (!kF.general) return {Simd::fma(e.a, b.prob, b.uniform), Simd::fma(e.b, b.prob, b.uniform)};
    Pair u = {b.uniform, b.uniform};
    if (b.class_weights != nullptr) {
      const Pair w = Simd::load_weights(b.class_weights + i, n, b.dx);
      u = {Simd::mul(u.a, w.a), Simd::mul(u.b, w.b)};
    }
    if constexpr (Transform::kHasSlope) u = {Simd::mul(u.a, reduced.slope.a), Simd::mul(u.b, reduced.slope.b)};
    return {Simd::fma(e.a, general_factor(b, reduced.t.a), u.a), Simd::fma(e.b, general_factor(b, reduced.t.b), u.b)};
  }
  // prob_logp log p = prob_logp t + (the rest, which is in prob); t is cut off where p is 0.
  template <class Transform>
  [[gnu::always_inline]] static F general_factor(const Block<Transform>& b, F t) {
    return Simd::fma(b.prob_logp, Simd::max(Simd::set(-200), t), b.prob);
  }

  template <Features kF>
  [[gnu::always_inline]] static void store_gradient(T* p, Pair g) {
    if constexpr (kF.stream) {
      Simd::stream_pair(p, g);
    } else {
      Simd::store_pair(p, g);
    }
  }

  // ------------------------------------------------------------------------------------------------------------- the loops

  // The pair at i: the backward half, then the forward half, whose exponents were reduced before. The old stash is read before
  // the new one is written.
  template <Features kF, bool kPrefetch = true, class Transform>
  [[gnu::always_inline]] static void finish_pair(const Block<Transform>& b, std::int64_t i,
                                                 [[maybe_unused]] const Carried<Transform>& carried, Accumulators& acc) {
    [[maybe_unused]] Pair g;
    if constexpr (kF.backward) g = backward<kF, false, kPrefetch>(b, i, kPair);
    if constexpr (kF.forward) complete<kF, false>(b, i, kPair, carried, acc);
    if constexpr (kF.backward) store_gradient<kF>(b.dx + i, g);
  }

  // Two pairs take turns: one is reduced while the other is finished. (Two groups of 4 vectors need more than 32 registers: 32.8
  // ms for a step against 27.2.)
  template <Features kF, class Transform>
  [[gnu::always_inline]] static void two_pairs(const Block<Transform>& b, std::int64_t begin, std::int64_t end, Accumulators& acc,
                                               Accumulators& upper) {
    [[maybe_unused]] Carried<Transform> even, odd;
    if constexpr (kF.forward) prepare<kF, false>(b, begin, kPair, acc, even);
    for (std::int64_t i = begin; i < end;) {
      const std::int64_t stop = stretch_end<kF>(i, end);
      for (; i < stop; i += kStep) {
        if constexpr (kF.forward) prepare<kF, false, kSecondPairHasALine>(b, i + kPair, kPair, acc, odd);
        finish_pair<kF>(b, i, even, acc);
        // At the end it reduces once more what is done already, and drops it.
        if constexpr (kF.forward) prepare<kF, false>(b, i + kStep < end ? i + kStep : i, kPair, acc, even);
        finish_pair<kF, kSecondPairHasALine>(b, i + kPair, odd, acc);
      }
      if constexpr (kF.forward) acc.template move_sums_to<kF>(upper);
    }
  }

  // The same with one pair an iteration: as SmallSoftcap's pairs have more to be done, GCC schedules two of them badly.
  template <Features kF, class Transform>
  [[gnu::always_inline]] static void pair_by_pair(const Block<Transform>& b, std::int64_t begin, std::int64_t end,
                                                  Accumulators& acc, Accumulators& upper) {
    Carried<Transform> now, next;
    prepare<kF, false>(b, begin, kPair, acc, now);
    for (std::int64_t i = begin; i < end;) {
      const std::int64_t stop = stretch_end<kF>(i, end);
      for (; i < stop; i += kPair) {
        prepare<kF, false>(b, i + kPair < end ? i + kPair : i, kPair, acc, next);
        finish_pair<kF>(b, i, now, acc);
        now = next;
      }
      acc.template move_sums_to<kF>(upper);
    }
  }

  // A lane adds up this many columns' terms, 32 of its own, before they move on.
  static constexpr std::int64_t kStretch = 32 * kPair;
  template <Features kF>
  static std::int64_t stretch_end(std::int64_t begin, std::int64_t end) {
    return kF.forward && end - begin > kStretch ? begin + kStretch : end;
  }

  // Columns [begin, end), a multiple of kStep.
  template <Features kF, class Transform>
  [[gnu::noinline]] static void full_steps(const Block<Transform>& block, std::int64_t begin, std::int64_t end,
                                           Accumulators& out) {
    if (begin >= end) return;
    const Block<Transform> b = block;
    Accumulators acc;
    acc.max = out.max;
    acc.lowest = out.lowest;
    acc.template clear_sums<kF>();
    if constexpr (kF.forward && Transform::kIsFastPath && Transform::kHasSlope) {
      pair_by_pair<kF>(b, begin, end, acc, out);
    } else {
      two_pairs<kF>(b, begin, end, acc, out);
    }
    if constexpr (!kF.forward) return;
    out.max = acc.max;
    out.lowest = acc.lowest;
  }

  // The same for the target's step and for what is left of a block: n < kPair elements at its end, the target left out of the
  // sums.
  template <Features kF, class Transform>
  [[gnu::noinline]] static void masked_steps(const Block<Transform>& b, std::int64_t begin, std::int64_t end, Accumulators& acc) {
    for (std::int64_t i = begin; i < end; i += kPair) {
      const int n = static_cast<int>(end - i < kPair ? end - i : kPair);
      if constexpr (kF.backward) {
        const Pair g = backward<kF, true>(b, i, n);
        if (n < kPair) {
          Simd::store_pair_partial(b.dx + i, g, n);
        } else {
          store_gradient<kF>(b.dx + i, g);
        }
      }
      if constexpr (kF.forward) {
        Carried<Transform> carried;
        prepare<kF, true>(b, i, n, acc, carried);
        complete<kF, true>(b, i, n, carried, acc);
      }
    }
  }

  // Columns [begin, end) of the block, begin a multiple of kStep.
  template <Features kF, class Transform>
  static void run(const Block<Transform>& b, std::int64_t begin, std::int64_t end, Accumulators& acc) {
    const std::int64_t full = end - (end - begin) % kStep, excluded = b.excluded - b.excluded % kStep;
    if (kF.forward && b.excluded >= begin && excluded < full) {
      full_steps<kF>(b, begin, excluded, acc);
      masked_steps<kF>(b, excluded, excluded + kStep, acc);
      full_steps<kF>(b, excluded + kStep, full, acc);
    } else {
      full_steps<kF>(b, begin, full, acc);
    }
    if (full < end) masked_steps<kF>(b, full, end, acc);
  }
};

}  // namespace tileloss::impl::cpu
