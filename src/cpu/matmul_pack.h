// Packing for cpu/matmul.h, for one Simd and one panel height. The unit is a block of kLanes rows by kLanes k, held in registers
// as slices: vector s has the rows' elements at k + s. Where k is contiguous a block is read by rows and transposed, log2(kLanes)
// shuffles a vector; where the rows are contiguous its slices are read as they are; any other layout is gathered one by one.
//
// Measured, Zen 4, one core, ns an element from cache (left and right operand) / from memory, 256 x 1536: avx512_bf16, bfloat16
// to pairs 0.07 and 0.06 / 0.15; with contiguous rows 0.11 and 0.09 / 0.28, thanks to the prefetch, 0.56 without: a line a page
// is more than the hardware follows. avx2 0.09 and 0.11, float16 0.15 and 0.13, gathered 0.6. A packed element is worth 2 * 2048
// flops at 2048 tokens, 17 ns.
#ifndef TILELOSS_CPU_MATMUL_PACK_H_
#define TILELOSS_CPU_MATMUL_PACK_H_

#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/number_formats.h"
#include "cpu/matmul.h"

namespace tileloss::cpu {

// A Simd that multiplies pairs of bfloat16 and adds both products to a float.
template <class Simd>
concept MultipliesPairs = requires(typename Simd::F x) {
  Simd::add_pair_products(x, x, x);
};

template <class Simd, int kPanel>
struct MatmulPacking {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr int kLanes = Simd::kLanes, kPair = Simd::kPair;
  static_assert(kPanel % kLanes == 0 || kLanes % kPanel == 0);

  static void pack(const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t depth, Compute compute,
                   float* dst) {
    switch (x.storage) {
      case kStorageBfloat16: return pack_as(static_cast<const Bfloat16*>(x.data), x, row, rows, k, depth, compute, dst);
      case kStorageFloat16: return pack_as(static_cast<const Float16*>(x.data), x, row, rows, k, depth, compute, dst);
      default: return pack_as(static_cast<const float*>(x.data), x, row, rows, k, depth, compute, dst);
    }
  }

 private:
  enum class Words { kFloats, kRoundedFloats, kPairs };
  enum class Contiguous { kAlongK, kAlongRows, kNone };

  template <class T>
  struct Source {
    const T* data;  // element (row, k) of the call
    std::int64_t row_stride, k_stride;
    std::int64_t rows, depth;
    const T* at(std::int64_t row, std::int64_t k) const { return data + row * row_stride + k * k_stride; }
  };

  // Where the words of kLanes rows from `row` on go.
  struct Target {
    float* dst;
    std::int64_t all_rows, depth, row;

    [[gnu::always_inline]] void store(std::int64_t step, std::int64_t steps, F x) const {
      if constexpr (kPanel >= kLanes) {
        Simd::store(dst + row / kPanel * (steps * kPanel) + step * kPanel + row % kPanel, x);
      } else {
        float lanes[kLanes];
        Simd::store(lanes, x);
        float* p = dst + row * steps + step * kPanel;
#pragma GCC unroll 16
        for (int first = 0; first < kLanes; first += kPanel) {
          if (row + first < all_rows) __builtin_memcpy(p, lanes + first, kPanel * sizeof(float));
          p += steps * kPanel;
        }
      }
    }
  };

  template <class T>
  static void pack_as(const T* data, const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t depth,
                      Compute compute, float* dst) {
    const T* const first = data + row * x.row_stride + k * x.k_stride;
    const Source<T> source{first, x.row_stride, x.k_stride, rows, depth};
    if (compute == Compute::kFloat32) return pack_words<Words::kFloats>(source, dst);
    if constexpr (MultipliesPairs<Simd>) {
      pack_words<Words::kPairs>(source, dst);
    } else {
      pack_words<std::is_same_v<T, Bfloat16> ? Words::kFloats : Words::kRoundedFloats>(source, dst);
    }
  }

  template <Words words, class T>
  static void pack_words(const Source<T>& x, float* dst) {
    if (x.k_stride == 1) return pack_blocks<words, Contiguous::kAlongK>(x, dst);
    if (x.row_stride == 1) return pack_blocks<words, Contiguous::kAlongRows>(x, dst);
    pack_blocks<words, Contiguous::kNone>(x, dst);
  }

  // Blocks follow each other in the direction in which the lines of memory lie.
  template <Words words, Contiguous contiguous, class T>
  static void pack_blocks(const Source<T>& x, float* dst) {
    constexpr bool kRaw = std::is_same_v<T, Bfloat16> && contiguous == Contiguous::kAlongK;
    constexpr int kSteps = kRaw ? kPair : kLanes;
    const std::int64_t all_rows = (x.rows + kPanel - 1) / kPanel * kPanel;
    if constexpr (contiguous == Contiguous::kAlongRows) {
      for (std::int64_t k = 0; k < x.depth; k += kSteps) {
        for (std::int64_t r = 0; r < all_rows; r += kLanes) {
          pack_block<words, contiguous>(x, k, part(x.depth - k, kSteps), Target{dst, all_rows, x.depth, r});
        }
      }
    } else {
      for (std::int64_t r = 0; r < all_rows; r += kLanes) {
        for (std::int64_t k = 0; k < x.depth; k += kSteps) {
          pack_block<words, contiguous>(x, k, part(x.depth - k, kSteps), Target{dst, all_rows, x.depth, r});
        }
      }
    }
  }

  template <Words words, Contiguous contiguous, class T>
  [[gnu::always_inline]] static void pack_block(const Source<T>& x, std::int64_t k, int steps, const Target& target) {
    const int rows = part(x.rows - target.row, kLanes);
    F vectors[kLanes];
    if constexpr (std::is_same_v<T, Bfloat16> && contiguous == Contiguous::kAlongK) {
      raw_pairs(x, target.row, k, rows, steps, vectors);
      store_raw_pairs<words>(vectors, k, steps, target);
    } else {
      load_slices<contiguous>(x, target.row, k, rows, steps, vectors);
      store_slices<words>(vectors, k, steps, target);
    }
  }

  static int part(std::int64_t left, int whole) { return left >= whole ? whole : left <= 0 ? 0 : static_cast<int>(left); }

  // ---------------------------------------------------------------------------------------------------------------- reading
  // The first n <= kLanes elements from p on, 0 in the other lanes.
  static F load_run(const float* p, int n) { return n == kLanes ? Simd::load(p) : Simd::load_raw_partial(p, n, 0).a; }
  static F load_run(const Float16* p, int n) {
    using Raw = decltype(Simd::load_raw(p));
    if (n == kLanes) return Simd::unpack(reinterpret_cast<Raw>(twice(load_words(p), EveryLane{})), p).a;
    return Simd::unpack(Simd::load_raw_partial(p, n, 0), p).a;
  }
  static F load_run(const Bfloat16* p, int n) {
    if (n == kLanes) return reinterpret_cast<F>(above_zeros(load_words(p), std::make_integer_sequence<int, kPair>{}));
    return interleave(Simd::unpack(Simd::load_raw_partial(p, n, 0), p), EveryLane{});
  }

  using EveryLane = std::make_integer_sequence<int, kLanes>;
  using HalfVector [[gnu::vector_size(sizeof(F) / 2)]] = std::uint16_t;
  template <class T>
  static HalfVector load_words(const T* p) {
    HalfVector words;
    __builtin_memcpy(&words, p, sizeof words);
    return words;
  }
  template <int... lane>
  static auto twice(HalfVector x, std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(x, x, lane..., lane...);
  }
  // Each word as the upper half of a float's bits.
  template <int... lane>
  static auto above_zeros(HalfVector x, std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(HalfVector{}, x, (lane / 2 + lane % 2 * kLanes)...);
  }
  template <int... lane>
  static F interleave(Pair even_odd, std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(even_odd.a, even_odd.b, (lane / 2 + lane % 2 * kLanes)...);
  }

  template <Contiguous contiguous, class T>
  [[gnu::always_inline]] static void load_slices(const Source<T>& x, std::int64_t r, std::int64_t k, int rows, int steps,
                                                 F (&slices)[kLanes]) {
    if constexpr (contiguous == Contiguous::kAlongK) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) slices[i] = i < rows ? load_run(x.at(r + i, k), steps) : Simd::set(0);
      transpose(slices);
    } else if constexpr (contiguous == Contiguous::kAlongRows) {
#pragma GCC unroll 16
      for (int s = 0; s < kLanes; ++s) {
        slices[s] = s < steps && rows > 0 ? load_run(x.at(r, k + s), rows) : Simd::set(0);
        if (k + s + kLanes < x.depth && rows > 0) Simd::prefetch(x.at(r, k + s + kLanes));
      }
    } else {
      float all[kLanes][kLanes] = {};
      for (int s = 0; s < steps; ++s) {
        for (int i = 0; i < rows; ++i) all[s][i] = Simd::to_float(*x.at(r + i, k + s));
      }
      for (int s = 0; s < kLanes; ++s) slices[s] = Simd::load(all[s]);
    }
  }

  // Neighbours along k stay together, as they lie in memory: kPair k of a row are one vector.
  [[gnu::always_inline]] static void raw_pairs(const Source<Bfloat16>& x, std::int64_t r, std::int64_t k, int rows, int steps,
                                               F (&pairs)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i >= rows) {
        pairs[i] = Simd::set(0);
        continue;
      }
      const Bfloat16* const p = x.at(r + i, k);
      pairs[i] = reinterpret_cast<F>(steps == kPair ? Simd::load_raw(p) : Simd::load_raw_partial(p, steps, 0));
    }
    transpose(pairs);
  }

  // Swaps the off-diagonal squares, of 1, 2, 4, ... lanes.
  static void transpose(F (&v)[kLanes]) { transpose_squares<1>(v, EveryLane{}); }
  template <int size, int... lane>
  [[gnu::always_inline]] static void transpose_squares(F (&v)[kLanes], std::integer_sequence<int, lane...> lanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & size) != 0) continue;
      const F a = v[i], b = v[i + size];
      v[i] = __builtin_shufflevector(a, b, ((lane & size) != 0 ? kLanes + lane - size : lane)...);
      v[i + size] = __builtin_shufflevector(a, b, ((lane & size) != 0 ? kLanes + lane : lane + size)...);
    }
    if constexpr (2 * size < kLanes) transpose_squares<2 * size>(v, lanes);
  }

  // ---------------------------------------------------------------------------------------------------------------- writing
  template <Words words>
  [[gnu::always_inline]] static void store_slices(const F (&slices)[kLanes], std::int64_t k, int steps, const Target& target) {
#pragma GCC unroll 16
    for (int s = 0; s < kLanes; s += 2) {
      if (s >= steps) break;
      if constexpr (words == Words::kFloats) {
        target.store(k + s, target.depth, slices[s]);
        if (s + 1 < steps) target.store(k + s + 1, target.depth, slices[s + 1]);
      } else {
        Bfloat16 rounded[kPair];  // as pairs: this step's and the next's
        Simd::store_pair(rounded, Pair{quiet(slices[s]), quiet(slices[s + 1])});
        const auto raw = Simd::load_raw(rounded);
        if constexpr (words == Words::kPairs) {
          target.store((k + s) / 2, (target.depth + 1) / 2, reinterpret_cast<F>(raw));
        } else {
          const Pair widened = Simd::unpack(raw, rounded);
          target.store(k + s, target.depth, widened.a);
          if (s + 1 < steps) target.store(k + s + 1, target.depth, widened.b);
        }
      }
    }
  }
  // Rounding takes NaNs only with nothing in their lower bits.
  static F quiet(F x) { return Simd::select_abs_at_most(x, __builtin_inff(), x, Simd::set(__builtin_nanf(""))); }

  template <Words words>
  [[gnu::always_inline]] static void store_raw_pairs(const F (&pairs)[kLanes], std::int64_t k, int steps, const Target& target) {
#pragma GCC unroll 16
    for (int s = 0; s < kLanes; ++s) {
      if (2 * s >= steps) break;
      if constexpr (words == Words::kPairs) {
        target.store(k / 2 + s, (target.depth + 1) / 2, pairs[s]);
      } else {
        Bfloat16 raw[kPair];
        __builtin_memcpy(raw, &pairs[s], sizeof raw);
        const Pair widened = Simd::unpack(Simd::load_raw(raw), raw);
        target.store(k + 2 * s, target.depth, widened.a);
        if (2 * s + 1 < steps) target.store(k + 2 * s + 1, target.depth, widened.b);
      }
    }
  }
};

}  // namespace tileloss::cpu

#endif  // TILELOSS_CPU_MATMUL_PACK_H_
