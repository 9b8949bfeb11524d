// dz of 32 rows from logits kept in words, straight into the left operands of the two products made of it
// (backends/cpu/amx/tile_table.h): converted, an fma, an exp2 of degree 4, a product; for dhidden rows are stored as they are,
// for dhead 32 x 32 blocks are transposed, as two squares of 16 x 16 words of two neighbouring rows.
//
// Words come around the caches from memory: they are asked for a block of rows ahead. Timed:
// docs/measurements/intel-xeon-amx-2-cores.md.
#pragma once

#include <cstdint>

#include "backends/cpu/amx/tile_table.h"
#include "backends/cpu/matmul/pack_blocks.h"
#include "backends/cpu/simd/exp2.h"

namespace tileloss::impl::cpu {

template <class Simd>
class TileGradient {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr int kLanes = Simd::kLanes, kPair = Simd::kPair;
  static_assert(kLanes == kTileRows && kPair == kTileDepth, "a row of a tile is one vector");

 public:
  static void run(const GradientTiles& job) {
    const F unit = Simd::set(job.exponent_of_word);
    for (std::int64_t j = 0; j < job.columns; j += kTileDepth) {
      F low[kTileRows], high[kTileRows];  // of two rows each: columns 0-3, 8-11, ... and 4-7, 12-15, ...
      for (int i = 0; i < kTileRows; ++i) {
        const F even = row(job, 2 * i, j, unit), odd = row(job, 2 * i + 1, j, unit);
        if (job.along != nullptr) {
          float* const to = job.along + j * kTileRows + i * 2 * kLanes;
          Simd::store(to, even);
          Simd::store(to + kLanes, odd);
        }
        low[i] = Simd::interleave_low(even, odd);
        high[i] = Simd::interleave_high(even, odd);
      }
      if (job.down != nullptr) store_down(low, high, job.down + j / kTileDepth * job.down_stride);
    }
  }

 private:
  // 32 columns of a row as bfloat16; 0 in a row that is not there.
  [[gnu::always_inline]] static F row(const GradientTiles& job, int r, std::int64_t j, F unit) {
    if (r >= job.rows) return Simd::set(0);
    const std::uint16_t* const words = job.words[r] + j;
    Simd::prefetch_to_l1(words + kGradientRows * job.columns);
    const F factor = Simd::set(job.factor[r]), exponent = Simd::set(job.exponent[r]);
    return Simd::to_bfloat16({gradient(words, unit, factor, exponent), gradient(words + kLanes, unit, factor, exponent)});
  }
  [[gnu::always_inline]] static F gradient(const std::uint16_t* words, F unit, F factor, F exponent) {
    const F word = Simd::load_words(words), t = Simd::fma(word, unit, exponent), n = Simd::round(t);
    const F r = Simd::remainder(t, n), p = exp2_polynomial_of_words<Simd>(r);
    return Simd::product_where_not_zero(word, Simd::scale_by_power_of_two(p, n), factor);
  }

  [[gnu::always_inline]] static void store_down(F (&low)[kTileRows], F (&high)[kTileRows], float* to) {
    PackBlocks<Simd>::transpose(low);
    PackBlocks<Simd>::transpose(high);
    for (int i = 0; i < kTileRows; ++i) {
      const int column = i / 4 * 8 + i % 4;
      Simd::store(to + column * kLanes, low[i]);
      Simd::store(to + (column + 4) * kLanes, high[i]);
    }
  }
};

}  // namespace tileloss::impl::cpu
