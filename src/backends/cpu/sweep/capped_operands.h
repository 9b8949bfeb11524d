// tanh of a block's logits and its slope, computed before the main loop.
#pragma once

#include <cstdint>

#include "backends/cpu/sweep/block_loop.h"

namespace tileloss::impl::cpu {

// A loop of its own, over logits that lie in L1: in the main loop the polynomial would lengthen the chain and take the registers
// that keep it full. SmallSoftcap, with fewer operations, does without.
template <class Simd, class T>
struct CappedOperands {
  using Loop = BlockLoop<Simd, T>;
  using Pair = typename Simd::Pair;
  static constexpr std::int64_t kPair = Simd::kPair;
  float *operands, *slopes, *lost;  // lost: by rounding the operands; with kFine

  // `room`: operand_floats() of them.
  CappedOperands(float* room, std::int64_t vocab_block)
      : operands(room), slopes(room + vocab_block), lost(slopes + vocab_block) {}

  // False, and nothing to be used, if the transform is for small logits and some are not.
  template <class Transform>
  bool compute(typename Loop::template Block<Transform>& b, const T* x, std::int64_t n) {
    auto largest = Simd::abs_max_start(Loop::kType);
    for (std::int64_t i = 0; i < n; i += Loop::kStep) {
      Pair v[2], t[2], rest[2], slope[2];
      for (int k = 0; k < 2; ++k) {
        const auto raw = load_raw(x, i + k * kPair, n);
        if constexpr (Transform::kSlopeFromOperand) largest = Simd::abs_max_raw(largest, raw);
        v[k] = Simd::unpack(raw, Loop::kType);
      }
      b.transform.operands(v, t, rest, slope);
      for (int k = 0; k < 2; ++k) {
        store(operands + i + k * kPair, t[k]);
        if constexpr (Loop::kFine) store(lost + i + k * kPair, rest[k]);
        if constexpr (!Transform::kSlopeFromOperand) store(slopes + i + k * kPair, slope[k]);
      }
    }
    b.operands = operands;
    b.slopes = slopes;
    b.operands_lost = lost;
    return !Transform::kSlopeFromOperand || b.transform.is_small(Simd::max_value(largest, Loop::kType));
  }

 private:
  [[gnu::always_inline]] static auto load_raw(const T* x, std::int64_t i, std::int64_t n) {
    if (n - i >= kPair) return Simd::load_raw(x + i);
    return n > i ? Simd::load_raw_partial(x + i, static_cast<int>(n - i), 0) : Simd::load_raw_partial(x, 0, 0);
  }
  static void store(float* p, Pair v) {
    Simd::store(p, v.a);
    Simd::store(p + Simd::kLanes, v.b);
  }
};

template <class Simd, class T>
struct NoOperands {
  NoOperands(float*, std::int64_t) {}
  template <class Block>
  bool compute(Block&, const T*, std::int64_t) {
    return true;
  }
};

}  // namespace tileloss::impl::cpu
