// The exp of the general sweeps over an array in L1, software-pipelined as they have it: the roof that their time is compared
// with.
#pragma once

#include <cstdint>

#include "backends/cpu/sweep/block_loop.h"
#include "core/number_formats.h"

namespace tileloss::impl::cpu {

// See KernelTable::exp_sum.
template <class Simd>
float exp_sum(const float* x, std::int64_t count, std::int64_t repeats) {
  using Loop = BlockLoop<Simd, Bfloat16>;
  using Pair = typename Simd::Pair;
  const typename Loop::template Block<Linear<Simd>> b{LogitTransform{}};
  const auto prepare = [&](std::int64_t i, typename Loop::Reduced& out) {
    Loop::reduce(b, 0, Loop::load_floats(x + i), Simd::set(0), out);
  };
  Pair sum = {Simd::set(0), Simd::set(0)};
  for (std::int64_t r = 0; r < repeats; ++r) {
    typename Loop::Reduced even, odd;
    const auto add = [&](const typename Loop::Reduced& reduced) {
      const Pair e = Loop::exp2(reduced);
      sum = {Simd::add(sum.a, e.a), Simd::add(sum.b, e.b)};
    };
    prepare(0, even);
    for (std::int64_t i = 0; i + Loop::kStep <= count; i += Loop::kStep) {
      prepare(i + Loop::kPair, odd);
      add(even);
      prepare(i + 2 * Loop::kStep <= count ? i + Loop::kStep : i, even);
      add(odd);
    }
    asm volatile("" : : "r"(x) : "memory");  // the next repeat is not the same work
  }
  return Simd::reduce_add(Simd::add(sum.a, sum.b));
}

}  // namespace tileloss::impl::cpu
