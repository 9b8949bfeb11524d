// The products of backends/cpu/matmul/matmul.h for one Simd: kRows broadcast words of a panel of A times kVectors vectors of a
// panel of B, summed in kRows * kVectors registers over the whole depth; a sum touches memory once.
//
// Cost of a step along k, in 64-byte (AVX2: 32, SSE2: 16) registers:
//   AVX-512, 8 x 3: 24 FMA, 3 loads, 8 broadcasts; 24 + 3 + 1 of 32 registers. Two FMA a cycle: 12 cycles for 11 loads
//     (two a cycle), 224 bytes of L2, 19 a cycle. One a cycle (Zen 4): 24 cycles, 9 bytes a cycle.
//   AVX2, 4 x 3: 12 FMA, 3 loads, 4 broadcasts, all 16 registers; 6 cycles, 112 bytes, 19 a cycle.
//   SSE2, 4 x 3: 12 mulps, 12 addps, and the copies that two-operand instructions need; compute is the bound by far.
//   NEON, 8 x 3: 24 FMLA, 3 loads and 2 of A, whose words are taken out of a register; 24 + 3 + 2 of 32. Four a cycle (Neoverse
//     V2): 6 cycles for 5 loads (three a cycle), 80 bytes, 13 a cycle. BF16, two words: 24 BFMMLA of 16 multiply-adds each for
//     the same 24 registers, 6 + 4 loads: 6 cycles, 160 bytes, 27 a cycle.
// So both operands may come from L2, no panel has to stay in L1, and A may even come from L3: a panel of it is used for all of a
// panel of B. The chains of sums are as many as the registers, more than latency (4 to 6 cycles) times rate in a whole tile.
//
// No prefetch: the two streams are contiguous. Other shapes that were timed are no faster: docs/measurements/amd-zen4-2-cores.md.
//
// With few words a tile of c is soon done (64 tokens: 32 words, 800 cycles for 1.5 KB of dhead), and memory is the bound beside
// the products. Streamed and in long runs, c costs its bytes once instead of a read and a write. (Prefetching a
// c that is added to, a tile ahead of its use: no difference at 112 words.)
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "backends/cpu/matmul/matmul.h"
#include "backends/cpu/matmul/matmul_pack.h"
#include "backends/cpu/matmul/matmul_write.h"

namespace tileloss::impl::cpu {

// A Simd whose fma takes a factor out of any lane of a vector.
template <class Simd>
concept MultipliesByLanes = requires(typename Simd::F x) {
  Simd::template fma_by_lane<0>(x, x, x);
};

template <class Simd, int kRows, int kVectors>
struct MatmulKernels {
  using F = typename Simd::F;
  static constexpr int kLanes = Simd::kLanes, kWidth = kVectors * kLanes;
  static constexpr std::int64_t kBlockBytes = std::int64_t{256} << 10;

  static constexpr MatmulTable table() {
    return {kRows,
            kWidth,
            MultipliesPairs<Simd> || MultipliesQuads<Simd> ? 2 : 1,
            MultipliesQuads<Simd> ? 2 : 1,
            &MatmulPacking<Simd, kRows>::pack,
            &MatmulPacking<Simd, kWidth>::pack,
            &MatmulPacking<Simd, kRows>::pack_part,
            &MatmulPacking<Simd, kWidth>::pack_part,
            &multiply,
            &MatmulWriting<Simd>::write,
            &tile_loop};
  }

 private:
  struct Fma {
    static F apply(F a, F b, F sum) { return Simd::fma(a, b, sum); }
  };
  struct PairProducts {
    static F apply(F a, F b, F sum) { return Simd::add_pair_products(a, b, sum); }
  };
  struct QuadProducts {};

  static void multiply(const float* a, const float* b, std::int64_t m, std::int64_t n, std::int64_t depth, Compute compute,
                       float* c, std::int64_t c_stride, Store how) {
    if constexpr (MultipliesPairs<Simd>) {
      if (compute == Compute::kBfloat16) return multiply<PairProducts>(a, b, m, n, (depth + 1) / 2, c, c_stride, how);
    }
    if constexpr (MultipliesQuads<Simd>) {
      if (compute == Compute::kBfloat16) return multiply<QuadProducts>(a, b, m, n, (depth + 3) / 4 * 2, c, c_stride, how);
    }
    multiply<Fma>(a, b, m, n, depth, c, c_stride, how);
  }

  static float tile_loop(const float* a, const float* b, std::int64_t depth, std::int64_t repeats, Compute compute) {
    if constexpr (MultipliesPairs<Simd>) {
      if (compute == Compute::kBfloat16) return tile_loop<PairProducts>(a, b, (depth + 1) / 2, repeats);
    }
    if constexpr (MultipliesQuads<Simd>) {
      if (compute == Compute::kBfloat16) return tile_loop<QuadProducts>(a, b, (depth + 3) / 4 * 2, repeats);
    }
    return tile_loop<Fma>(a, b, depth, repeats);
  }

  // One tile of c, at its place; the part of it that exists.
  struct Place {
    float* c;
    std::int64_t c_stride;
    std::int64_t rows, columns;
    Store how;
  };

  // Panels of B, kBlockBytes of them, stay in L2 while all of A passes by: with few words a row of c is written in long runs.
  template <class Op>
  static void multiply(const float* a, const float* b, std::int64_t m, std::int64_t n, std::int64_t words, float* c,
                       std::int64_t c_stride, Store how) {
    if (how == Store::kStream && !can_stream(c, c_stride)) how = Store::kReplace;
    const std::int64_t panel_bytes = kWidth * words * 4;
    const std::int64_t block = (panel_bytes < kBlockBytes ? kBlockBytes / panel_bytes : 1) * kWidth;
    for (std::int64_t first = 0; first < n; first += block) {
      const std::int64_t last = n - first < block ? n : first + block;
      for (std::int64_t i = 0; i < m; i += kRows) {
        for (std::int64_t j = first; j < last; j += kWidth) {
          const Place place{c + i * c_stride + j, c_stride, m - i < kRows ? m - i : kRows, n - j < kWidth ? n - j : kWidth, how};
          choose_vectors<Op, kVectors>(a + i * words, b + j * words, words, place);
        }
      }
    }
    if (how == Store::kStream) Simd::fence();
  }

  // A line that is streamed in parts costs reads of the memory: only vectors of a whole line.
  static constexpr bool kStreams = kLanes * sizeof(float) == 64;
  static bool can_stream(const float* c, std::int64_t c_stride) {
    return kStreams && reinterpret_cast<std::uintptr_t>(c) % 64 == 0 && c_stride % 16 == 0;
  }

  // The least tile that holds the part that exists: a few rows or columns do not cost a whole tile.
  template <class Op, int vectors>
  static void choose_vectors(const float* a, const float* b, std::int64_t words, const Place& place) {
    if constexpr (vectors > 1) {
      if (place.columns <= (vectors - 1) * kLanes) return choose_vectors<Op, vectors - 1>(a, b, words, place);
    }
    choose_rows<Op, vectors, kRows>(a, b, words, place);
  }
  template <class Op, int vectors, int rows>
  static void choose_rows(const float* a, const float* b, std::int64_t words, const Place& place) {
    if constexpr (rows > 1) {
      if (place.rows <= (rows + 1) / 2) return choose_rows<Op, vectors, (rows + 1) / 2>(a, b, words, place);
    }
    tile<Op, vectors, rows>(a, b, words, place);
  }

  template <class Op, int vectors, int rows>
  [[gnu::noinline]] static void tile(const float* a, const float* b, std::int64_t words, const Place& place) {
    F sum[rows][vectors];
#pragma GCC unroll 32
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sum[i][v] = Simd::set(0);
    }
    add_products<Op>(a, b, words, sum);
    if (place.rows == rows && place.columns == vectors * kLanes) {
#pragma GCC unroll 32
      for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
          float* const c = place.c + i * place.c_stride + v * kLanes;
          put(c, sum[i][v], place.how);
        }
      }
    } else {
      alignas(64) float all[rows][vectors * kLanes];
#pragma GCC unroll 32
      for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) Simd::store(all[i] + v * kLanes, sum[i][v]);
      }
      for (std::int64_t i = 0; i < place.rows; ++i) {
        float* const c = place.c + i * place.c_stride;
        for (std::int64_t j = 0; j < place.columns; ++j) c[j] = place.how == Store::kAdd ? c[j] + all[i][j] : all[i][j];
      }
    }
  }

  [[gnu::always_inline]] static void put(float* c, F sum, Store how) {
    if constexpr (kStreams) {
      if (how == Store::kStream) return Simd::stream(c, sum);
    }
    Simd::store(c, how == Store::kAdd ? Simd::add(Simd::load(c), sum) : sum);
  }

  template <class Op, int rows, int vectors>
  [[gnu::always_inline]] static void add_products(const float* a, const float* b, std::int64_t words, F (&sum)[rows][vectors]) {
    if constexpr (std::is_same_v<Op, QuadProducts>) {
      add_quads(a, b, words, sum);
    } else if constexpr (MultipliesByLanes<Simd>) {
      add_by_lanes(a, b, words, sum, std::make_integer_sequence<int, rows>{});
    } else {
      add_words<Op>(a, b, words, sum);
    }
  }

  template <class Op, int rows, int vectors>
  [[gnu::always_inline]] static void add_words(const float* a, const float* b, std::int64_t words, F (&sum)[rows][vectors]) {
    for (std::int64_t s = 0; s < words; ++s) {
      F right[vectors];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) right[v] = Simd::load(b + s * kWidth + v * kLanes);
#pragma GCC unroll 32
      for (int i = 0; i < rows; ++i) {
        const F left = Simd::set(a[s * kRows + i]);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sum[i][v] = Op::apply(left, right[v], sum[i][v]);
      }
    }
  }

  // The same with words of a taken out of vectors of them: a panel has whole ones of every step.
  template <int rows, int vectors, int... row>
  [[gnu::always_inline]] static void add_by_lanes(const float* a, const float* b, std::int64_t words, F (&sum)[rows][vectors],
                                                  std::integer_sequence<int, row...>) {
    static_assert(kRows % kLanes == 0);
    for (std::int64_t s = 0; s < words; ++s) {
      F left[kRows / kLanes];
#pragma GCC unroll 8
      for (int i = 0; i < (rows + kLanes - 1) / kLanes; ++i) left[i] = Simd::load(a + s * kRows + i * kLanes);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        const F right = Simd::load(b + s * kWidth + v * kLanes);
        ((sum[row][v] = Simd::template fma_by_lane<row % kLanes>(left[row / kLanes], right, sum[row][v])), ...);
      }
    }
  }

  // Two rows of a and two of b, four bfloat16 of each, make two rows of two sums. A row that is not there has zeros or whatever
  // the panel holds, and is dropped.
  template <int rows, int vectors>
  [[gnu::always_inline]] static void add_quads(const float* a, const float* b, std::int64_t words, F (&sum)[rows][vectors]) {
    constexpr int kTwos = (rows + 1) / 2;
    F twos[kTwos][2 * vectors];
#pragma GCC unroll 32
    for (int i = 0; i < kTwos; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        const F first = sum[2 * i][v], second = 2 * i + 1 < rows ? sum[2 * i + 1][v] : Simd::set(0);
        twos[i][2 * v] = Simd::lower_halves(first, second);
        twos[i][2 * v + 1] = Simd::upper_halves(first, second);
      }
    }
    for (std::int64_t s = 0; s < words; s += 2) {
      F left[kTwos];
#pragma GCC unroll 32
      for (int i = 0; i < kTwos; ++i) left[i] = Simd::load(a + s * kRows + i * kLanes);
#pragma GCC unroll 8
      for (int j = 0; j < 2 * vectors; ++j) {
        const F right = Simd::load(b + s * kWidth + j * kLanes);
#pragma GCC unroll 32
        for (int i = 0; i < kTwos; ++i) twos[i][j] = Simd::add_quad_products(left[i], right, twos[i][j]);
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        const F left = twos[i / 2][2 * v], right = twos[i / 2][2 * v + 1];
        sum[i][v] = i % 2 == 0 ? Simd::lower_halves(left, right) : Simd::upper_halves(left, right);
      }
    }
  }

  template <class Op>
  [[gnu::noinline]] static float tile_loop(const float* a, const float* b, std::int64_t words, std::int64_t repeats) {
    F sum[kRows][kVectors];
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[i][v] = Simd::set(0);
    }
    for (std::int64_t r = 0; r < repeats; ++r) add_products<Op>(a, b, words, sum);
    F all = Simd::set(0);
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) all = Simd::add(all, sum[i][v]);
    }
    return Simd::reduce_add(all);
  }
};

}  // namespace tileloss::impl::cpu
