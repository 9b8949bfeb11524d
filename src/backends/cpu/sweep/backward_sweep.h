// The backward sweep over a row, block by block, and what it shares with the forward sweep (backends/cpu/sweep/sweeps.h).
#pragma once

#include <type_traits>

#include "backends/cpu/sweep/block_loop.h"
#include "backends/cpu/sweep/capped_operands.h"
#include "backends/cpu/sweep/row_kernel.h"
#include "backends/cpu/sweep/running_sums.h"
#include "backends/cpu/sweep/small_softcap.h"
#include "backends/cpu/sweep/table_linear.h"

namespace tileloss::impl::cpu {

template <class Simd, class T>
class BackwardSweep {
 protected:
  using Loop = BlockLoop<Simd, T>;
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  using Accumulators = typename Loop::Accumulators;
  using Running = RunningSums<Simd, Loop::kFine>;
  template <class Transform>
  using Block = typename Loop::template Block<Transform>;
  static constexpr std::int64_t kPair = Simd::kPair;

  // In units of log 2; beyond it offsets are not exact.
  static constexpr double kMaxExactOffset = 0x1p24;

  template <class Transform>
  using Operands =
      std::conditional_t<Transform::kHasSlope && !Transform::kIsFastPath, CappedOperands<Simd, T>, NoOperands<Simd, T>>;
  // What is tried first for a block; Transform itself if there is nothing quicker.
  static constexpr bool kHasFastPath = !Loop::kFine && Simd::kHasTable;
  template <class Transform>
  using FastPath = std::conditional_t<Transform::kHasSlope,
                                      std::conditional_t<kHasFastPath, SmallSoftcap<Simd>, Softcap<Simd, Loop::kFine, true>>,
                                      std::conditional_t<kHasFastPath, TableLinear<Simd>, Transform>>;

  static float block_max(const T* x, std::int64_t n) {
    F m0 = Simd::set(-kInfinity), m1 = m0;
    std::int64_t i = 0;
    for (; i + kPair <= n; i += kPair) {
      const Pair v = Loop::load(x + i);
      m0 = Simd::max(v.a, m0);
      m1 = Simd::max(v.b, m1);
    }
    if (i < n) {
      const Pair v = Loop::load_partial(x + i, static_cast<int>(n - i), -kInfinity);
      m0 = Simd::max(v.a, m0);
      m1 = Simd::max(v.b, m1);
    }
    return Simd::reduce_max(Simd::max(m0, m1));
  }

  static bool is_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 64 == 0; }

  // A maximum, in units of log 2, beyond which offsets are no longer exact (and from 2^126 on exponents overflow): such as of a
  // row that is masked with -1e9 or the lowest finite number throughout.
  static bool is_extreme(const LogitTransform& t, double exponent) {
    return !(t.softcap > 0) && __builtin_isfinite(exponent) && __builtin_fabs(exponent) > kMaxExactOffset;
  }

  // NaN without a payload: rounded to bfloat16, one of all ones would become 0.
  static F coefficient(double x) { return Simd::set(x == x ? static_cast<float>(x) : __builtin_nanf("")); }

  // A block's stash is relative to that block's reference, exponents computed again are relative to one near the maximum: the
  // factor to the maximum itself goes into the coefficients.
  template <class Transform>
  static void set_backward(Block<Transform>& b, const BackwardRow& row, std::int64_t start) {
    const LogitTransform& t = row.transform;
    const double slope = t.scale / Transform::slope_unit(t);
    const double max = Running::log2e(t) * row.max;
    const float offset = Simd::offset_for(max, t.exponent_scale);
    const double own = Running::effective_offset(t, offset);
    const double reference = row.stash == nullptr ? own : row.references[start / row.vocab_block];
    b.previous_x = static_cast<const T*>(row.x) + start;
    b.dx = static_cast<T*>(row.dx) + start;
    b.previous_stash = row.stash + start;
    b.class_weights = row.class_weights == nullptr ? nullptr : row.class_weights + start;
    if (reference == b.previous_reference) return;
    b.previous_reference = reference;
    // A block of -inf alone, before any other: its stash is 0 whatever the factor.
    const double factor = __builtin_exp2(reference > max + 1 ? 0 : reference - max) * slope;
    // prob_logp (z - max - log_sum) = prob_logp / log2e * (exponent + own - max) - prob_logp * log_sum
    const double rest = row.prob_logp == 0 ? 0 : row.prob_logp * ((own - max) / Running::log2e(t) - row.log_sum);
    b.max_offset = Simd::set(offset);
    b.prob = coefficient((row.prob + rest) * factor);
    b.prob_logp = coefficient(row.prob_logp / Running::log2e(t) * factor);
    b.uniform = coefficient(row.uniform * slope);
  }

  static bool is_general(const BackwardRow& row) {
    return row.prob_logp != 0 || (row.uniform != 0 && (row.class_weights != nullptr || row.transform.softcap > 0));
  }

  template <bool kStash, bool kGeneral, bool kUniform = true, class Transform>
  static void backward_only(const Block<Transform>& b, std::int64_t n, bool stream) {
    Accumulators unused;
    if (stream) {
      Loop::template run<Features{
          .backward = true, .read_stash = kStash, .general = kGeneral, .stream = true, .uniform = kUniform}>(b, 0, n, unused);
    } else {
      Loop::template run<Features{.backward = true, .read_stash = kStash, .general = kGeneral, .uniform = kUniform}>(b, 0, n,
                                                                                                                     unused);
    }
  }

  // Exponents relative to the maximum of these columns, which in a tile or a shard lies `behind` the row's.
  [[gnu::cold]] static void backward_extreme(const BackwardRow& row) {
    const float max = block_max(static_cast<const T*>(row.x), row.columns);
    const double behind = static_cast<double>(row.transform.value(max)) - row.max;
    const double share = __builtin_exp(behind);
    for (std::int64_t start = 0; start < row.columns; start += row.vocab_block) {
      const std::int64_t n = row.columns - start < row.vocab_block ? row.columns - start : row.vocab_block;
      Block<Centered<Simd>> b(row.transform);
      set_backward(b, row, start);
      b.transform.center = Simd::set(max > -kInfinity ? max : 0);
      b.max_offset = Simd::set(0);
      const double all = share * row.transform.scale;
      b.prob = coefficient(all == 0 ? all * row.prob : (row.prob + row.prob_logp * (behind - row.log_sum)) * all);
      b.prob_logp = coefficient(row.prob_logp / Running::log2e(row.transform) * all);
      backward_only<false, true>(b, n, false);
    }
  }

  // Where a row's coefficient lies among the powers of 2, and its maximum in units of log 2.
  struct StashRange {
    double coefficient = 0, max = 0;
    explicit StashRange(const BackwardRow* row) {
      if (row == nullptr || row->stash == nullptr) return;
      coefficient = __builtin_logb(row->prob * row->transform.scale);
      max = Running::log2e(row->transform) * row->max;
    }
  };

  // Whether float32 would flush the coefficient of a block whose stash may hold up to 2^kMaxExactGap, and the gradient with it.
  template <class Transform>
  static bool is_lost(const BackwardRow& row, const StashRange& range, std::int64_t start) {
    if constexpr (!FastPath<Transform>::kIsFastPath) return false;
    constexpr double kSmallest = -120;  // 2^-126, and some room
    const double behind = row.references[start / row.vocab_block] - range.max, coefficient = range.coefficient + behind;
    const double stored = coefficient - __builtin_logb(Transform::slope_unit(row.transform));  // set_backward divides by it
    return behind < -kMaxGap && stored < kSmallest && coefficient > kSmallest - 1.5 * kMaxExactGap;
  }

  // Such a block's gradient, from its logits. They are still there: the block is the next to be written.
  template <class Transform>
  [[gnu::cold]] static void backward_again(const BackwardRow& row, std::int64_t start, std::int64_t n) {
    BackwardRow again = row;
    again.stash = nullptr;
    Block<Transform> b(row.transform);
    backward_block(b, again, start, n, is_general(row));
  }

  template <class Transform>
  static void backward_block(Block<Transform>& b, const BackwardRow& row, std::int64_t start, std::int64_t n, bool general) {
    set_backward(b, row, start);
    Operands<Transform> operands(row.operands, row.vocab_block);
    if (row.stash == nullptr || general) operands.compute(b, b.previous_x, n);
    const bool stream = row.stream && is_aligned(b.dx);
    if (row.stash != nullptr && general) {
      backward_only<true, true>(b, n, stream);
    } else if (row.stash != nullptr && row.uniform == 0) {
      backward_only<true, false, false>(b, n, stream);  // as in interleaved(): fma would turn -0 into 0
    } else if (row.stash != nullptr) {
      backward_only<true, false>(b, n, stream);
    } else if (general) {
      backward_only<false, true>(b, n, stream);
    } else {
      backward_only<false, false>(b, n, stream);
    }
  }

  template <class Transform>
  static void backward_row(const BackwardRow& row) {
    const bool general = is_general(row);
    if ((row.stash == nullptr || general) && is_extreme(row.transform, Running::log2e(row.transform) * row.max)) {
      backward_extreme(row);
      return;
    }
    const StashRange range(&row);
    Block<Transform> b(row.transform);
    for (std::int64_t start = 0; start < row.columns; start += row.vocab_block) {
      const std::int64_t n = row.columns - start < row.vocab_block ? row.columns - start : row.vocab_block;
      if (row.stash != nullptr && is_lost<Transform>(row, range, start)) {
        backward_again<Transform>(row, start, n);
      } else {
        backward_block(b, row, start, n, general);
      }
    }
  }
};

}  // namespace tileloss::impl::cpu
