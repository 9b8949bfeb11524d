// The two sweeps over a row, block by block: what happens between blocks, the backward's side in
// backends/cpu/sweep/backward_sweep.h. The loop inside a block is backends/cpu/sweep/block_loop.h.
//
// Memory, bfloat16: 2 bytes read and 2 written an element; the stash (4 bytes, written and read) stays in the L2 cache. With the
// next row's forward in the same loop as a row's backward from its stash, DRAM and arithmetic overlap. Measured:
// docs/measurements/amd-zen4-2-cores.md.
#pragma once

#include <type_traits>

#include "backends/cpu/sweep/backward_sweep.h"

namespace tileloss::impl::cpu {

template <class Simd, class T>
class Sweeps : BackwardSweep<Simd, T> {
  using Base = BackwardSweep<Simd, T>;
  using typename Base::Accumulators;
  using typename Base::F;
  using typename Base::Loop;
  using typename Base::Pair;
  using typename Base::Running;
  using BlockSums = typename Running::Block;
  template <class Transform>
  using Block = typename Base::template Block<Transform>;
  template <class Transform>
  using Operands = typename Base::template Operands<Transform>;
  template <class Transform>
  using FastPath = typename Base::template FastPath<Transform>;
  using Base::block_max;
  using Base::is_aligned;
  using Base::is_extreme;
  using Base::is_general;
  using Base::kMaxExactOffset;
  using Base::kPair;
  using Base::set_backward;
  // Columns that give a row's first idea of its maximum. With float32 storage a whole block: what the reference is off by is
  // rounded into every exponent.
  static constexpr std::int64_t kFirstLook = Loop::kFine ? kMaxVocabBlock : 1024;

  // ------------------------------------------------------------------------------------------------------------- forward

  // sum_j c_j (z_j log2(e) - reference) of a block, and the sum of its c_j. A loop of its own, over logits that lie in L1: the
  // target is in here, and -inf must stay -inf. Terms of one sign are rounded the same way: lanes are added up after a few.
  template <class Transform>
  static void smoothing_block(const Block<Transform>& b, const float* weights, std::int64_t n, Running& r) {
    const T* x = b.x;
    const F offset = b.offset, zero = Simd::set(0);
    F sum0 = zero, sum1 = zero, w0 = zero, w1 = zero;
    double sum = 0, weight = 0;
    const auto add_up = [&] {
      sum += Simd::reduce_add(Simd::add(sum0, sum1));
      weight += Simd::reduce_add(Simd::add(w0, w1));
      sum0 = sum1 = w0 = w1 = zero;
    };
    for (std::int64_t i = 0; i < n; i += kPair) {
      if (i % (16 * kPair) == 0) add_up();
      const int count = static_cast<int>(n - i < kPair ? n - i : kPair);
      const bool partial = count < kPair;
      const Pair v = partial ? Loop::load_partial(x + i, count, 0) : Loop::load(x + i);
      Pair d;
      if constexpr (Transform::kIsFastPath) {
        d = b.transform.exponents(v);
      } else if constexpr (Transform::kHasSlope) {
        d = Loop::exponents(b, Loop::load_floats(b.operands + i), offset);
      } else {
        d = Loop::exponents(b, b.transform.operands(v), offset);
      }
      if (partial) d = Simd::keep(d, count, -1, x);
      if (weights == nullptr) {
        sum0 = Simd::add(sum0, d.a);
        sum1 = Simd::add(sum1, d.b);
      } else {
        const Pair w = Simd::load_weights(weights + i, count, x);
        sum0 = Simd::fma(d.a, w.a, sum0);
        sum1 = Simd::fma(d.b, w.b, sum1);
        w0 = Simd::add(w0, w.a);
        w1 = Simd::add(w1, w.b);
      }
    }
    add_up();
    r.smoothing += sum;
    r.smoothing_weight += weights == nullptr ? static_cast<double>(n) : weight;
  }

  struct Extremes {
    float max = -kInfinity;  // see Simd::max_raw
    float lowest = 0;        // magnitude of the most negative one; only with Transform::kNeedsLowest
  };

  template <Features kF, class Transform>
  static BlockSums run_block(const Block<Transform>& b, std::int64_t n, Extremes* extremes) {
    // float32 results show the rounding of long sums: there a lane adds 16 terms before the sums move on to double.
    const std::int64_t chunk = Loop::kFine ? 16 * Loop::kStep / 2 : n;
    Accumulators acc;
    BlockSums sums;
    for (std::int64_t start = 0; start < n; start += chunk) {
      acc.template clear_sums<kF>();
      Loop::template run<kF>(b, start, start + chunk < n ? start + chunk : n, acc);
      if constexpr (kF.forward) {
        const float sum = Accumulators::total(acc.sum);
        sums.sum += sum;
        if constexpr (kF.entropy) {
          const float moment = Accumulators::total(acc.entropy);
          if constexpr (Transform::kIsFastPath) {
            sums.entropy += b.transform.entropy(moment, sum);
          } else {
            sums.entropy += moment;
          }
        }
        if constexpr (kF.collision) sums.collision += Accumulators::total(acc.collision);
      }
    }
    if (extremes == nullptr) return sums;
    extremes->max = acc.total_max();
    if constexpr (Transform::kIsFastPath) {
      if constexpr (Transform::kNeedsLowest) extremes->lowest = Simd::lowest_magnitude(acc.lowest, Loop::kType);
    }
    return sums;
  }

  template <bool kStash, class Transform>
  static BlockSums forward_only(const Block<Transform>& b, std::int64_t n, std::uint32_t sums, Extremes* extremes) {
    if (sums & kCollisionSum) {
      return run_block<Features{.forward = true, .write_stash = kStash, .entropy = true, .collision = true}>(b, n, extremes);
    }
    if (sums & kEntropySum) {
      return run_block<Features{.forward = true, .write_stash = kStash, .entropy = true}>(b, n, extremes);
    }
    return run_block<Features{.forward = true, .write_stash = kStash}>(b, n, extremes);
  }

  template <bool kStream, bool kUniform, class Transform>
  static BlockSums interleaved(const Block<Transform>& b, std::int64_t n, std::uint32_t sums, Extremes* extremes) {
    constexpr Features kPlain{
        .forward = true, .write_stash = true, .backward = true, .read_stash = true, .stream = kStream, .uniform = kUniform};
    constexpr Features kEntropy{.forward = true,
                                .write_stash = true,
                                .entropy = true,
                                .backward = true,
                                .read_stash = true,
                                .stream = kStream,
                                .uniform = kUniform};
    return sums & kEntropySum ? run_block<kEntropy>(b, n, extremes) : run_block<kPlain>(b, n, extremes);
  }

  template <class Transform>
  static BlockSums interleaved(const Block<Transform>& b, const BackwardRow& previous, std::int64_t n, std::uint32_t sums,
                               Extremes* extremes) {
    const bool stream = previous.stream && is_aligned(b.dx);
    if (previous.uniform != 0) {
      return stream ? interleaved<true, true>(b, n, sums, extremes) : interleaved<false, true>(b, n, sums, extremes);
    }
    return stream ? interleaved<true, false>(b, n, sums, extremes) : interleaved<false, false>(b, n, sums, extremes);
  }

  // Does the block once with the reference as it is and, if its maximum turns out to exceed that by more than it may stay behind,
  // again (forward only: the backward half has been done) with the maximum as the reference. False, and nothing done but perhaps
  // the backward half (`previous` is null then), if the block's logits are too large for the transform.
  template <class Transform>
  static bool forward_block(Block<Transform>& b, const ForwardRow& row, const BackwardRow*& previous, std::int64_t start,
                            std::int64_t n, Running& r) {
    const T* x = static_cast<const T*>(row.x) + start;
    b.x = x;
    b.excluded = row.label_column >= start && row.label_column < start + n ? row.label_column - start : -1;
    Operands<Transform> operands(row.operands, row.vocab_block);
    if (!operands.compute(b, x, n)) return false;
    // Should it be too low, the block is done again like any other.
    if (start == 0) look_at_maximum(row, block_max(x, n < kFirstLook ? n : kFirstLook), start, r);
    if (start == 0 || !may_stay_behind<Transform>(row, r)) r.catch_up();
    if (!set_offset(b, r.offset)) return false;
    if (row.stash != nullptr) b.stash = row.stash + start;
    BlockSums sums;
    Extremes found;
    if (previous != nullptr) {
      set_backward(b, *previous, start);
      sums = interleaved(b, *previous, n, row.sums, &found);
      previous = nullptr;
    } else {
      sums = forward_only(b, n, row, &found);
    }
    if constexpr (Transform::kIsFastPath) {
      if (!b.transform.was_right(found.max, found.lowest, sums.sum)) return false;
    }
    if (!(found.max > 0)) found.max = block_max(x, n);  // 16-bit formats: see Simd::max_raw
    if (look_at_maximum(row, found.max, start, r) && !may_stay_behind<Transform>(row, r)) {
      r.catch_up();
      if (!set_offset(b, r.offset)) return false;
      sums = forward_only(b, n, row, &found);
    }
    r.add(sums);
    if (row.sums & kSmoothingSum) {
      const float* weights = row.class_weights == nullptr ? nullptr : row.class_weights + start;
      smoothing_block(b, weights, n, r);
    }
    return true;
  }

  template <class Transform>
  static bool set_offset(Block<Transform>& b, float offset) {
    b.offset = Simd::set(offset);
    if constexpr (Transform::kIsFastPath) return b.transform.set_offset(offset);
    return true;
  }

  template <class Transform>
  static BlockSums forward_only(const Block<Transform>& b, std::int64_t n, const ForwardRow& row, Extremes* extremes) {
    return row.stash != nullptr ? forward_only<true>(b, n, row.sums, extremes) : forward_only<false>(b, n, row.sums, extremes);
  }

  // Whether the reference may stay behind the one that is due: a fast path rounds no exponent relative to it. The sums have
  // the same bits then, but for a power of 2, as with those that may not.
  template <class Transform>
  static bool may_stay_behind(const ForwardRow& row, const Running& r) {
    if constexpr (Transform::kIsFastPath) {
      const double limit =
          r.reference + kMaxExactGap < Transform::kMaxOffset ? r.reference + kMaxExactGap : Transform::kMaxOffset;
      // Below the reference only where nothing above -inf was seen before: exps would vanish.
      return !(row.sums & (kEntropySum | kCollisionSum)) && r.reference <= r.due_reference && r.due_reference <= limit;
    }
    return false;
  }

  // Takes note of a block's maximum; true if the reference has to move.
  static bool look_at_maximum(const ForwardRow& row, float max, std::int64_t start, Running& r) {
    const bool begins_capped = !r.is_started && row.transform.softcap > 0 && max == -kInfinity;  // z is -cap there
    if (!(max > r.raw_max) && !begins_capped) return false;
    r.raw_max = max;
    r.max_start = start;
    const double exponent = Running::log2e(row.transform) * row.transform.value(max);
    if (r.is_started && !(exponent > r.due_reference + kMaxGap)) return false;
    // A block that is masked with -1e30 throughout, before others: its exps vanish against any of these. Larger offsets would
    // round by more than exp can take.
    r.choose_reference(row.transform, exponent < -kMaxExactOffset ? -kMaxExactOffset : exponent);
    return true;
  }

  // A look at the beginning of the block from `start` on, after one that was not small: a loop in vain would cost more.
  template <class Small>
  static bool begins_small(const ForwardRow& row, std::int64_t start) {
    const T* x = static_cast<const T*>(row.x) + start;
    auto largest = Simd::abs_max_start(Loop::kType);
    for (std::int64_t i = 0; i + kPair <= row.columns - start && i < row.vocab_block; i += kPair) {
      largest = Simd::abs_max_raw(largest, Simd::load_raw(x + i));
    }
    return Small(row.transform).is_small(Simd::max_value(largest, Loop::kType));
  }

  template <class Transform>
  static void forward_row(ForwardRow& row, const BackwardRow* previous) {
    Running r;
    std::int64_t index = 0;
    using Small = FastPath<Transform>;
    bool expect_small = true;
    Block<Small> block(row.transform);
    const typename Base::StashRange range(previous);
    for (std::int64_t start = 0; start < row.columns; start += row.vocab_block, ++index) {
      const std::int64_t n = row.columns - start < row.vocab_block ? row.columns - start : row.vocab_block;
      const BackwardRow* pending = previous;
      if (previous != nullptr && Base::template is_lost<Transform>(*previous, range, start)) {
        Base::template backward_again<Transform>(*previous, start, n);
        pending = nullptr;
      }
      bool is_done = false;
      if (expect_small) is_done = forward_block<Small>(block, row, pending, start, n, r);
      if constexpr (!std::is_same_v<Small, Transform>) {
        if (!is_done) {
          Block<Transform> general(row.transform);
          forward_block<Transform>(general, row, pending, start, n, r);
        }
      }
      if constexpr (Small::kIsFastPath) {
        expect_small = is_done || (set_offset(block, r.offset) && begins_small<Small>(row, start + n));
      }
      if (row.references != nullptr) row.references[index] = r.reference;
    }
    if (is_extreme(row.transform, static_cast<double>(row.transform.exponent_scale) * r.raw_max)) {
      forward_extreme(row, r);
      return;
    }
    if (may_have_flushed(row, r)) add_up_others<Transform>(row, r);
    finish(row, r);
  }

  // Whether the label's logit lies so far above all others that exps below 2^-126, which are 0, may have been a part of their
  // sum. The gradient at the label is made of that sum.
  static bool may_have_flushed(const ForwardRow& row, const Running& r) {
    if (row.label_column < 0 || !(r.sum < static_cast<double>(row.columns) * 0x1p-102)) return false;
    return __builtin_isfinite(r.raw_max) && Simd::to_float(static_cast<const T*>(row.x)[row.label_column]) == r.raw_max;
  }

  // Such a row's sums once more, relative to the largest of the others. A fast path's exps vanish sooner than at 2^-126:
  // its stash is done again too.
  template <class Transform>
  [[gnu::cold]] static void add_up_others(const ForwardRow& row, Running& r) {
    const T* x = static_cast<const T*>(row.x);
    const float before = block_max(x, row.label_column),
                after = block_max(x + row.label_column + 1, row.columns - row.label_column - 1);
    const float max = before > after ? before : after;
    const double exponent = Running::log2e(row.transform) * row.transform.value(max);
    constexpr double kSmallestDouble = -1075;
    if (!(exponent - Running::log2e(row.transform) * row.transform.value(r.raw_max) > kSmallestDouble)) return;
    Running others;
    if constexpr (Transform::kIsCentered) {
      others.reference = others.due_reference = exponent;
    } else {
      others.choose_reference(row.transform, exponent);
      others.catch_up();
    }
    ForwardRow sums_only = row;
    sums_only.stash = nullptr;
    std::int64_t index = 0;
    for (std::int64_t start = 0; start < row.columns; start += row.vocab_block, ++index) {
      const std::int64_t n = row.columns - start < row.vocab_block ? row.columns - start : row.vocab_block;
      Block<Transform> b(row.transform);
      b.x = x + start;
      if (row.label_column >= start && row.label_column < start + n) b.excluded = row.label_column - start;
      if constexpr (Transform::kIsCentered) b.transform.center = Simd::set(max);
      Operands<Transform> operands(row.operands, row.vocab_block);
      operands.compute(b, b.x, n);
      b.offset = Simd::set(others.offset);
      others.add(forward_only(b, n, sums_only, nullptr));
      if constexpr (FastPath<Transform>::kIsFastPath && !Transform::kIsCentered) {
        if (row.stash == nullptr) continue;
        b.stash = row.stash + start;
        b.offset = Simd::set(Simd::offset_for(row.references[index], row.transform.exponent_scale));
        forward_only<true>(b, n, kNoSums, nullptr);
      }
    }
    others.move_reference(r.reference);
    r.sum = others.sum;
    r.entropy = others.entropy;
    r.collision = others.collision;
  }

  // The forward of such a row, whose maximum the usual one has found: once more, with exponents (x - maximum) * scale.
  [[gnu::cold]] static void forward_extreme(ForwardRow& row, const Running& seen) {
    Running r;
    r.raw_max = seen.raw_max;
    r.max_start = seen.max_start;
    r.reference = r.due_reference = Running::log2e(row.transform) * row.transform.value(r.raw_max);
    std::int64_t index = 0;
    for (std::int64_t start = 0; start < row.columns; start += row.vocab_block, ++index) {
      const std::int64_t n = row.columns - start < row.vocab_block ? row.columns - start : row.vocab_block;
      Block<Centered<Simd>> b(row.transform);
      b.transform.center = Simd::set(r.raw_max);
      b.x = static_cast<const T*>(row.x) + start;
      if (row.label_column >= start && row.label_column < start + n) b.excluded = row.label_column - start;
      if (row.stash != nullptr) {
        b.stash = row.stash + start;
        row.references[index] = r.reference;
      }
      r.add(forward_only(b, n, row, nullptr));
      if (row.sums & kSmoothingSum) smoothing_block(b, row.class_weights == nullptr ? nullptr : row.class_weights + start, n, r);
    }
    if (may_have_flushed(row, r)) add_up_others<Centered<Simd>>(row, r);
    finish(row, r);
  }

  // Running sums -> row state: from the reference to the true maximum, and the target's own terms where they belong.
  static void finish(ForwardRow& row, Running& r) {
    const T* x = static_cast<const T*>(row.x);
    RowState& s = row.state;
    s = RowState{};
    const float max = row.transform.value(r.raw_max);
    // The target is not in the sum, so a NaN there would not show.
    const bool is_finite = __builtin_isfinite(max) && __builtin_isfinite(r.sum);
    const bool has_finite_target = row.label_column < 0 || __builtin_isfinite(Simd::to_float(x[row.label_column]));
    if (!(is_finite && has_finite_target) && has_nan(x, row.columns)) {
      s.max = s.sum = s.label_logit = s.entropy_sum = s.collision_sum = s.smoothing_sum = __builtin_nanf("");
      return;
    }
    const double log2_of_e = Running::log2e(row.transform);
    if (row.label_column >= 0) s.label_logit = row.transform.value(Simd::to_float(x[row.label_column]));
    if (__builtin_isfinite(max)) {
      r.catch_up();
      r.move_reference(log2_of_e * max);
    } else if (row.sums & kSmoothingSum) {
      r.smoothing = infinite_sum(row) * log2_of_e;
    }
    s.max = max;
    s.sum = static_cast<float>(r.sum);
    if (row.sums & kArgmax) s.argmax = first_of(x + r.max_start, row.columns - r.max_start, r.raw_max) + r.max_start;
    if (row.sums & kSmoothingSum) s.smoothing_sum = static_cast<float>(r.smoothing / log2_of_e);
    const double d = static_cast<double>(s.label_logit) - max;
    const double e = s.label_logit == -kInfinity ? 0 : __builtin_exp(d);
    if (row.sums & kEntropySum) s.entropy_sum = static_cast<float>(r.entropy / log2_of_e + (e == 0 ? 0 : d * e));
    if (row.sums & kCollisionSum) s.collision_sum = static_cast<float>(r.collision + e * e);
  }

  static bool has_nan(const T* x, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      const float v = Simd::to_float(x[i]);
      if (v != v) return true;
    }
    return false;
  }

  // The sum of c_j z_j in a row with infinities: infinite, or NaN where both signs meet or a weight is 0.
  static double infinite_sum(const ForwardRow& row) {
    double sum = 0;
    for (std::int64_t i = 0; i < row.columns; ++i) {
      const double z = row.transform.value(Simd::to_float(static_cast<const T*>(row.x)[i]));
      sum += row.class_weights == nullptr ? z : static_cast<double>(row.class_weights[i]) * z;
    }
    return sum;
  }

  // The first index that holds `value`, which is known to be there and to be the maximum.
  static std::int64_t first_of(const T* x, std::int64_t n, float value) {
    std::int64_t i = 0;
    while (i + kPair <= n && block_max(x + i, kPair) != value) i += kPair;
    while (i + 1 < n && Simd::to_float(x[i]) != value) ++i;
    return i;
  }

  // ---------------------------------------------------------------------------------------------------------------- both

  template <class Transform>
  static void run_transformed(ForwardRow* next, const BackwardRow* previous) {
    const bool interleave = next != nullptr && previous != nullptr && next->stash != nullptr && previous->stash != nullptr &&
                            !is_general(*previous) && !(next->sums & kCollisionSum) && next->columns == previous->columns;
    if (interleave) {
      forward_row<Transform>(*next, previous);
    } else {
      if (previous != nullptr) Base::template backward_row<Transform>(*previous);
      if (next != nullptr) forward_row<Transform>(*next, nullptr);
    }
    if (previous != nullptr && previous->stream) Simd::fence();
  }

 public:
  static void run(ForwardRow* next, const BackwardRow* previous) {
    const LogitTransform& t = next != nullptr ? next->transform : previous->transform;
    if (t.softcap > 0) {
      run_transformed<Softcap<Simd, Loop::kFine>>(next, previous);
    } else {
      run_transformed<Linear<Simd>>(next, previous);
    }
  }
};

}  // namespace tileloss::impl::cpu
