// Packing for backends/cpu/matmul/matmul.h, for one Simd and one panel height. The unit is a block of kLanes rows by kLanes k,
// held in registers as slices: vector s has the rows' elements at k + s. Where k is contiguous a block is read by rows and
// transposed, log2(kLanes) shuffles a vector; where the rows are contiguous its slices are read as they are; any other layout is
// gathered one by one.
//
// bfloat16 that goes into pairs across its lines is interleaved as it lies, two lines at a time, without a block.
//
// A packed element is worth 2 * N flops: much at 2048 tokens, little at 64. Timed: docs/measurements/amd-zen4-2-cores.md.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cpu/matmul/matmul.h"
#include "backends/cpu/matmul/pack_blocks.h"
#include "core/number_formats.h"

namespace tileloss::impl::cpu {

// A Simd that multiplies pairs of bfloat16 and adds both products to a float.
template <class Simd>
concept MultipliesPairs = requires(typename Simd::F x) {
  Simd::add_pair_products(x, x, x);
};

// A Simd that multiplies rows of four bfloat16, of two rows each of a vector (backends/cpu/simd/simd_neon_bf16.h).
template <class Simd>
concept MultipliesQuads = requires(typename Simd::F x) {
  Simd::add_quad_products(x, x, x);
};

// kWholePairs: bfloat16 is packed as pairs along k, of which there are zeros up to a multiple of this; 0: not as pairs. With
// quads two pairs of a row lie side by side.
template <class Simd, int kPanel,
          int kWholePairs = MultipliesQuads<Simd>   ? 2
                            : MultipliesPairs<Simd> ? 1
                                                    : 0>
struct MatmulPacking : private PackBlocks<Simd> {
  using Blocks = PackBlocks<Simd>;
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr int kLanes = Simd::kLanes, kPair = Simd::kPair;
  static constexpr bool kQuads = MultipliesQuads<Simd>;
  static_assert(kQuads ? kPanel % kLanes == 0 && kLanes == 4 : kPanel % kLanes == 0 || kLanes % kPanel == 0);

  static void pack(const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t depth, Compute compute,
                   float* dst) {
    pack_part(x, row, rows, k, depth, compute, dst, 0, 0);
  }
  // panel_words 0: no more than these k.
  static void pack_part(const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t depth,
                        Compute compute, float* dst,  // NOLINT(readability-non-const-parameter): a Block writes there
                        std::int64_t first_word, std::int64_t panel_words) {
    Blocks::with_source(x, row, rows, k, depth, [&](const auto& source) {
      pack_source(source, compute, Block{dst + first_word * kPanel, panel_words});
    });
  }

 private:
  static constexpr std::int64_t kStepsAhead = 16;  // of rows that lie side by side, fetched

  enum class Words { kFloats, kRoundedFloats, kPairs };

  struct Block {
    float* dst;
    std::int64_t panel_words;
  };

  // Where the words of kLanes rows from `row` on go.
  struct Target {
    float* dst;
    std::int64_t all_rows, panel_words, row;

    Target after(int rows) const { return {dst, all_rows, panel_words, row + rows}; }
    [[gnu::always_inline]] void store(std::int64_t step, F x) const {
      if constexpr (kPanel >= kLanes) {
        Simd::store(dst + row / kPanel * (panel_words * kPanel) + step * kPanel + row % kPanel, x);
      } else {
        float lanes[kLanes];
        Simd::store(lanes, x);
        float* p = dst + row * panel_words + step * kPanel;
#pragma GCC unroll 16
        for (int first = 0; first < kLanes; first += kPanel) {
          if (row + first < all_rows) __builtin_memcpy(p, lanes + first, kPanel * sizeof(float));
          p += panel_words * kPanel;
        }
      }
    }
    // Quads: the pairs of an even step and of the next.
    [[gnu::always_inline]] void store_quads(std::int64_t step, F even, F odd) const {
      float* const p = dst + row / kPanel * (panel_words * kPanel) + step * kPanel + row % kPanel * 2;
      Simd::store(p, __builtin_shufflevector(even, odd, 0, 4, 1, 5));
      Simd::store(p + kLanes, __builtin_shufflevector(even, odd, 2, 6, 3, 7));
    }
  };

  using typename Blocks::Contiguous;
  template <class T>
  using Source = typename Blocks::template Source<T>;

  template <class T>
  static void pack_source(const Source<T>& source, Compute compute, const Block& to) {
    if (compute == Compute::kFloat32) return pack_words<Words::kFloats>(source, to);
    if constexpr (kWholePairs > 0) {
      pack_words<Words::kPairs>(source, to);
    } else {
      pack_words<std::is_same_v<T, Bfloat16> ? Words::kFloats : Words::kRoundedFloats>(source, to);
    }
  }

  template <Words words, class T>
  static void pack_words(const Source<T>& x, const Block& to) {
    if (x.k_stride == 1) return pack_blocks<words, Contiguous::kAlongK>(x, to);
    if (x.row_stride == 1) return pack_blocks<words, Contiguous::kAlongRows>(x, to);
    pack_blocks<words, Contiguous::kNone>(x, to);
  }

  // Blocks follow each other in the direction in which the lines of memory lie.
  template <Words words, Contiguous contiguous, class T>
  static void pack_blocks(const Source<T>& x, const Block& to) {
    constexpr bool kRaw = std::is_same_v<T, Bfloat16> && contiguous == Contiguous::kAlongK;
    constexpr int kSteps = kRaw ? kPair : kLanes;
    // NOLINTNEXTLINE(bugprone-branch-clone): kWholePairs is 1 but for quads and tiles
    constexpr std::int64_t kWhole = words == Words::kPairs ? kWholePairs : 1;
    const std::int64_t all_rows = (x.rows + kPanel - 1) / kPanel * kPanel;
    const std::int64_t filled = words == Words::kPairs ? (x.depth + 1) / 2 : x.depth;
    const std::int64_t steps = (filled + kWhole - 1) / kWhole * kWhole;
    const std::int64_t panel_words = to.panel_words > 0 ? to.panel_words : steps;
    if constexpr (contiguous == Contiguous::kAlongRows && words == Words::kPairs && std::is_same_v<T, Bfloat16>) {
      for (std::int64_t k = 0; k < x.depth; k += kQuads ? 4 : 2) {
        for (std::int64_t r = 0; r < all_rows; r += kPair) interleave_block(x, k, Target{to.dst, all_rows, panel_words, r});
      }
    } else if constexpr (contiguous == Contiguous::kAlongRows) {
      for (std::int64_t k = 0; k < x.depth; k += kSteps) {
        for (std::int64_t r = 0; r < all_rows; r += kLanes) {
          pack_block<words, contiguous>(x, k, Blocks::part(x.depth - k, kSteps), Target{to.dst, all_rows, panel_words, r});
        }
      }
    } else {
      for (std::int64_t r = 0; r < all_rows; r += kLanes) {
        for (std::int64_t k = 0; k < x.depth; k += kSteps) {
          pack_block<words, contiguous>(x, k, Blocks::part(x.depth - k, kSteps), Target{to.dst, all_rows, panel_words, r});
        }
      }
    }
    if constexpr (kWhole > 1 && !kQuads) {  // quads are stored whole
      for (std::int64_t r = 0; r < all_rows; r += kPanel) {
        for (std::int64_t i = filled * kPanel; i < steps * kPanel; ++i) to.dst[r * panel_words + i] = 0;
      }
    }
  }

  // Two steps of kPair rows, four of quads: nothing is converted or transposed, only interleaved.
  [[gnu::always_inline]] static void interleave_block(const Source<Bfloat16>& x, std::int64_t k, const Target& target) {
    const int rows = Blocks::part(x.rows - target.row, kPair);
    const auto step = [&](std::int64_t at) {
      if (at >= x.depth || rows == 0) return typename Blocks::WholeVector{};
      const Bfloat16* const p = x.at(target.row, at);
      if (at + kStepsAhead < x.depth) Simd::prefetch(p + kStepsAhead * x.k_stride);
      return Blocks::load_whole(p, rows);
    };
    const Pair words = Blocks::interleave_words(step(k), step(k + 1));
    const bool has_second = target.row + kLanes < target.all_rows;
    if constexpr (kQuads) {
      const Pair next = Blocks::interleave_words(step(k + 2), step(k + 3));
      target.store_quads(k / 2, words.a, next.a);
      if (has_second) target.after(kLanes).store_quads(k / 2, words.b, next.b);
    } else {
      target.store(k / 2, words.a);
      if (has_second) target.after(kLanes).store(k / 2, words.b);
    }
  }

  template <Words words, Contiguous contiguous, class T>
  [[gnu::always_inline]] static void pack_block(const Source<T>& x, std::int64_t k, int steps, const Target& target) {
    const int rows = Blocks::part(x.rows - target.row, kLanes);
    F vectors[kLanes];
    if constexpr (std::is_same_v<T, Bfloat16> && contiguous == Contiguous::kAlongK) {
      Blocks::raw_pairs(x, target.row, k, rows, steps, vectors);
      store_raw_pairs<words>(vectors, k, steps, target);
    } else {
      Blocks::template load_slices<contiguous>(x, target.row, k, rows, steps, vectors);
      store_slices<words>(vectors, k, steps, target);
    }
  }

  // Two steps as pairs of bfloat16.
  [[gnu::always_inline]] static auto rounded(F step, F next) {
    Bfloat16 pairs[kPair];
    Simd::store_pair(pairs, Pair{Blocks::quiet(step), Blocks::quiet(next)});
    return Simd::load_raw(pairs);
  }

  template <Words words>
  [[gnu::always_inline]] static void store_slices(const F (&slices)[kLanes], std::int64_t k, int steps, const Target& target) {
    if constexpr (words == Words::kPairs && kQuads) {
      const F even = reinterpret_cast<F>(rounded(slices[0], slices[1]));
      return target.store_quads(k / 2, even, reinterpret_cast<F>(rounded(slices[2], slices[3])));
    }
#pragma GCC unroll 16
    for (int s = 0; s < kLanes; s += 2) {
      if (s >= steps) break;
      if constexpr (words == Words::kFloats) {
        target.store(k + s, slices[s]);
        if (s + 1 < steps) target.store(k + s + 1, slices[s + 1]);
      } else {
        const auto raw = rounded(slices[s], slices[s + 1]);
        if constexpr (words == Words::kPairs) {
          target.store((k + s) / 2, reinterpret_cast<F>(raw));
        } else {
          const Pair widened = Simd::unpack(raw, static_cast<const Bfloat16*>(nullptr));
          target.store(k + s, widened.a);
          if (s + 1 < steps) target.store(k + s + 1, widened.b);
        }
      }
    }
  }
  template <Words words>
  [[gnu::always_inline]] static void store_raw_pairs(const F (&pairs)[kLanes], std::int64_t k, int steps, const Target& target) {
#pragma GCC unroll 16
    for (int s = 0; s < kLanes; ++s) {
      if (2 * s >= steps) break;
      if constexpr (words == Words::kPairs && kQuads) {
        if (s % 2 == 0) target.store_quads(k / 2 + s, pairs[s], pairs[s + 1]);
      } else if constexpr (words == Words::kPairs) {
        target.store(k / 2 + s, pairs[s]);
      } else {
        Bfloat16 raw[kPair];
        __builtin_memcpy(raw, &pairs[s], sizeof raw);
        const Pair widened = Simd::unpack(Simd::load_raw(raw), raw);
        target.store(k + 2 * s, widened.a);
        if (2 * s + 1 < steps) target.store(k + 2 * s + 1, widened.b);
      }
    }
  }
};

}  // namespace tileloss::impl::cpu
