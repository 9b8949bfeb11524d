// Logits of a row's tile in 16 bits, between the LM head's forward and its backward: how far below the tile's maximum they lie,
// in steps of 2^-9 of an exponent. exp then has a relative error of at most 2^-10, a quarter of what rounding the gradient to
// bfloat16 may cost; the root mean square of both together is 6 % more than that alone. What lies 128 or more below the maximum,
// or is -inf, comes back as -inf: in float32, exp is 0 from 88 below the row's maximum on, so that nothing gets lost.
//
// 65535 stands for the maximum, 0 for -inf. A tile of -inf alone comes back as such; with a NaN or +inf in it the row's
// coefficients are NaN, and what comes back does not matter. Where the maximum is so large that its neighbours are further away
// than a step, all that is not -inf comes back exactly.
#pragma once

#include <cstdint>

#include "backends/cpu/sweep/row_kernel.h"
#include "core/row_state.h"

namespace tileloss::impl::cpu {

template <class Simd>
class KeptLogits {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr int kLanes = Simd::kLanes, kPair = Simd::kPair;
  static constexpr float kTop = 65535;

  static Pair load(const float* z, std::int64_t left) {
    return left < kPair ? Simd::load_raw_partial(z, static_cast<int>(left), -kInfinity) : Simd::load_raw(z);
  }

  // max returns its second argument for NaN, which -inf - -inf and inf - inf give.
  static void store(std::uint16_t* to, F z, F max, F steps_per_unit) {
    const F steps = Simd::max(Simd::fma(Simd::sub(z, max), steps_per_unit, Simd::set(kTop)), Simd::set(0));
    Simd::store_words(to, Simd::add(steps, Simd::set(0.5f)));
  }

  static F load(const std::uint16_t* from, F max, F unit_of_step) {
    const F steps = Simd::load_words(from);
    const F z = Simd::fma(Simd::sub(steps, Simd::set(kTop)), unit_of_step, max);
    return Simd::select_abs_at_most(steps, 0, Simd::set(-kInfinity), z);
  }

  static float keep(const float* z, std::int64_t columns, float steps_per_unit, std::uint16_t* to) {
    F max = Simd::set(-kInfinity);
    for (std::int64_t j = 0; j < columns; j += kPair) max = Simd::max_raw(max, load(z + j, columns - j));
    const float tile_max = Simd::reduce_max(max);
    const F all_max = Simd::set(tile_max), scale = Simd::set(steps_per_unit);
    for (std::int64_t j = 0; j < columns; j += kPair) {
      const Pair v = load(z + j, columns - j);
      store(to + j, v.a, all_max, scale);
      store(to + j + kLanes, v.b, all_max, scale);
    }
    return tile_max;
  }

  static void restore(const std::uint16_t* from, std::int64_t columns, float tile_max, float steps_per_unit, float* z) {
    const F max = Simd::set(tile_max), unit_of_step = Simd::set(1 / steps_per_unit);
    for (std::int64_t j = 0; j < columns; j += kPair) {
      const Pair v = {load(from + j, max, unit_of_step), load(from + j + kLanes, max, unit_of_step)};
      if (columns - j < kPair) {
        Simd::store_pair_partial(z + j, v, static_cast<int>(columns - j));
      } else {
        Simd::store_pair(z + j, v);
      }
    }
  }

 public:
  static constexpr KeptLogitsTable table() { return {&keep, &restore}; }
};

}  // namespace tileloss::impl::cpu
