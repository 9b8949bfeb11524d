// What packing (backends/cpu/matmul/matmul_pack.h, backends/cpu/amx/matmul_pack_tiles.h) reads operands with: blocks of kLanes
// rows by kLanes k, in registers, as slices: vector s has the rows' elements at k + s.
#pragma once

#include <cstdint>
#include <utility>

#include "backends/cpu/matmul/matmul.h"
#include "core/number_formats.h"

namespace tileloss::impl::cpu {

template <class Simd>
struct PackBlocks {
  using F = typename Simd::F;
  using Pair = typename Simd::Pair;
  static constexpr int kLanes = Simd::kLanes, kPair = Simd::kPair;

  enum class Contiguous { kAlongK, kAlongRows, kNone };

  template <class T>
  struct Source {
    const T* data;  // element (row, k) of the call
    std::int64_t row_stride, k_stride;
    std::int64_t rows, depth;
    const T* at(std::int64_t row, std::int64_t k) const { return data + row * row_stride + k * k_stride; }
  };

  template <class T>
  static Source<T> source(const T* data, const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k,
                          std::int64_t depth) {
    return {data + row * x.row_stride + k * x.k_stride, x.row_stride, x.k_stride, rows, depth};
  }
  // pack(Source) of what x says that it is.
  template <class Pack>
  static void with_source(const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t depth, Pack pack) {
    switch (x.storage) {
      case kStorageBfloat16: return pack(source(static_cast<const Bfloat16*>(x.data), x, row, rows, k, depth));
      case kStorageFloat16: return pack(source(static_cast<const Float16*>(x.data), x, row, rows, k, depth));
      case kStorageFloat32: return pack(source(static_cast<const float*>(x.data), x, row, rows, k, depth));
    }
  }

  static int part(std::int64_t left, int whole) { return left >= whole ? whole : left <= 0 ? 0 : static_cast<int>(left); }

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

  // The first n <= kPair words from p on, 0 in the others.
  using WholeVector [[gnu::vector_size(sizeof(F))]] = std::uint16_t;
  static WholeVector load_whole(const Bfloat16* p, int n) {
    return reinterpret_cast<WholeVector>(n == kPair ? Simd::load_raw(p) : Simd::load_raw_partial(p, n, 0));
  }
  // Pairs of a word of `low` and one of `high`, in their order.
  static Pair interleave_words(WholeVector low, WholeVector high) {
    return interleave_words(low, high, std::make_integer_sequence<int, kPair>{});
  }
  template <int... word>
  static Pair interleave_words(WholeVector low, WholeVector high, std::integer_sequence<int, word...>) {
    return {reinterpret_cast<F>(__builtin_shufflevector(low, high, (word / 2 + word % 2 * kPair)...)),
            reinterpret_cast<F>(__builtin_shufflevector(low, high, (kLanes + word / 2 + word % 2 * kPair)...))};
  }

  template <Contiguous contiguous, class T>
  [[gnu::always_inline]] static void load_slices(const Source<T>& x, std::int64_t r, std::int64_t k, int rows, int steps,
                                                 F (&slices)[kLanes]) {
    if constexpr (contiguous == Contiguous::kAlongK) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        slices[i] = i < rows ? load_run(x.at(r + i, k), steps) : Simd::set(0);
        prefetch_below(x, r + i, k);
      }
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

  // What the next kLanes rows will need, a line of each: they are too many streams for the hardware to follow.
  template <class T>
  [[gnu::always_inline]] static void prefetch_below(const Source<T>& x, std::int64_t row, std::int64_t k) {
    if (row + kLanes < x.rows) Simd::prefetch(x.at(row + kLanes, k));
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
      prefetch_below(x, r + i, k);
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

  // Rounding takes NaNs only with nothing in their lower bits.
  static F quiet(F x) { return Simd::select_abs_at_most(x, __builtin_inff(), x, Simd::set(__builtin_nanf(""))); }
};

}  // namespace tileloss::impl::cpu
