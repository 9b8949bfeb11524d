// The products of backends/cpu/matmul/matmul.h in bfloat16 on tile registers (AMX): 2 x 3 tiles of sums of 16 x 16 floats, kept
// in six of the eight registers over the whole depth; one register goes through the left tiles and one through the right ones.
// float32 is multiplied by the FMA kernels. "Tile" is a tile register's content here.
//
// A product of two tiles is 16 rows x 16 columns x 32 k, 16384 flops, 16 cycles. Layouts, so that a tile is one load:
//   left   32 rows a panel, two tiles a step of 32 k; a tile is 16 rows of 64 bytes side by side (matmul_pack_tiles.h)
//   right  48 columns a panel, as for the vector kernels: words of two bfloat16 neighbours along k, 48 words a row, so that three
//          tiles lie beside each other at a stride of 192 bytes
// Both are filled with zeros to whole tiles along k. Parts of a tile are computed whole, and what exists of it is copied.
//
// Cost of a step: 6 products, 96 cycles; 7 loads of 16 lines: three right tiles, past L1, two left ones, and these once more from
// L1. Panels of the left operand are the outer loop, the next one is prefetched meanwhile; the right operand stays in L2. Sums go
// straight into c, and come from there where they are added to it. Beside the steps, in the vector unit, goes what would else
// wait for them: the softmax of the rows before, the rows of sums that go around the caches. Two instructions take and release
// the tiles, beside some 10^8 flops a call.
//
// A sum must not depend on its place, so k is not gone through in alternating order. Steps without arithmetic in 512-bit
// registers let the unit fall asleep: an addition a step keeps it awake. What a step takes, and what else was tried:
// docs/measurements/intel-xeon-amx-2-cores.md.
#pragma once

#include <cstdint>
#include <utility>

#include "backends/cpu/amx/matmul_pack_tiles.h"
#include "backends/cpu/amx/tile_softmax.h"
#include "backends/cpu/amx/tile_table.h"
#include "backends/cpu/matmul/matmul.h"
#include "backends/cpu/matmul/matmul_kernels.h"
#include "backends/cpu/matmul/matmul_pack.h"
#include "backends/cpu/matmul/matmul_write.h"

namespace tileloss::impl::cpu {

// Tiles: eight registers of 16 rows of 64 bytes. Its constructor takes them, its destructor gives them back; members with the
// register's number, which is part of the instruction, as a template argument:
//   zero<t>(), load<t>(p, stride), load_once<t>(p, stride) for what L1 need not keep, store<t>(p, stride), strides in bytes
//   add_products<sum, left, right>(): TDPBF16PS
//   keep_awake(Awake&): one addition in the widest vector registers
// Float32: a MatmulKernels of the same panels of the right operand.
template <class Simd, class Tiles, class Float32>
struct TileMatmul {
  static constexpr int kTilesHigh = 2, kTilesWide = 3;
  static constexpr int kPanelA = kTilesHigh * kTileRows, kPanelB = kTilesWide * kTileRows;
  static constexpr int kStepWords = kTileDepth / 2;
  static constexpr int kLeft = 6, kRight = 7;
  static_assert(Float32::table().b_panel == kPanelB && kPanelA % Float32::table().a_panel == 0);

  static constexpr MatmulTable table() {
    return {kPanelA,
            kPanelB,
            2,
            kStepWords,
            &pack_a,
            &MatmulPacking<Simd, kPanelB, kStepWords>::pack,
            &pack_a_part,
            &MatmulPacking<Simd, kPanelB, kStepWords>::pack_part,
            &multiply,
            &MatmulWriting<Simd>::write,
            &tile_loop};
  }

  // The rows of z of a block are done while the next block's products are made.
  static void multiply_softmax(const SoftmaxRows& job) {
    Tiles tiles;
    const std::int64_t steps = ceil_div(job.depth, kTileDepth), words = steps * kStepWords;
    const std::int64_t lines = ceil_div(2 * kTileRows, ceil_div(job.columns, kPanelB));
    TileSoftmax<Simd> softmax(job);
    int turn = 0;
    for (std::int64_t i = 0; i < job.rows; i += kPanelA) {
      Ahead ahead{job.a + (i + kPanelA) * words, lines};
      float* const z = job.z + turn * kPanelA * job.z_stride;
      for (std::int64_t j = 0; j < job.columns; j += kPanelB) {
        block<kTilesHigh, kTilesWide, false>(tiles, job.a + i * words, job.b + j * words, steps, z + j, job.z_stride, ahead,
                                             softmax);
      }
      softmax.finish();
      softmax.begin(z, i, job.rows - i < kPanelA ? job.rows - i : kPanelA);
      turn = 1 - turn;
    }
    softmax.finish();
    Simd::fence();
  }

 private:
  static constexpr std::int64_t ceil_div(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

  static void pack_a(const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t depth, Compute compute,
                     float* dst) {
    const bool is_float = compute == Compute::kFloat32;
    pack_a_part(x, row, rows, k, depth, compute, dst, 0, is_float ? depth : ceil_div(depth, kTileDepth) * kStepWords);
  }
  // The panels of float32 are lower: those that are missing in the last of ours are 0.
  static void pack_a_part(const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t depth,
                          Compute compute, float* dst, std::int64_t first_word, std::int64_t panel_words) {
    if (compute == Compute::kBfloat16) {
      float* const to = dst + first_word * kPanelA;
      return TilePacking<Simd, kTilesHigh>::pack(x, row, rows, k, depth, to, panel_words / kStepWords);
    }
    Float32::table().pack_a_part(x, row, rows, k, depth, compute, dst, first_word, panel_words);
    constexpr std::int64_t kLow = Float32::table().a_panel;
    for (std::int64_t low = ceil_div(rows, kLow); low < ceil_div(rows, kPanelA) * (kPanelA / kLow); ++low) {
      for (std::int64_t i = 0; i < kLow * depth; ++i) dst[kLow * (low * panel_words + first_word) + i] = 0;
    }
  }

  // A block of c, at its place; the part of it that exists.
  struct Place {
    float* c;
    std::int64_t c_stride;
    std::int64_t rows, columns;
    Store how;
    bool is_whole() const { return rows == kPanelA && columns == kPanelB; }
  };
  // Lines of the next left panel to fetch at every step.
  struct Ahead {
    const float* next = nullptr;
    std::int64_t lines = 0;
    [[gnu::always_inline]] void step() {
      for (std::int64_t line = 0; line < lines; ++line) Simd::prefetch(next + line * 16);
      next += lines * 16;
    }
  };

  // What is done beside the products of a block, a little at every step; TileSoftmax is one too. Hot is what of it the loop has
  // in registers.
  struct Aside {
    struct Hot {
      typename Tiles::Awake awake{};
    };
    [[gnu::always_inline]] Hot hot() const { return {}; }
    [[gnu::always_inline]] void put(const Hot&) {}
  };
  // Nothing but keeping the vector unit awake;
  struct Nothing : Aside {
    [[gnu::always_inline]] void step(typename Aside::Hot& h) { Tiles::keep_awake(h.awake); }
  };
  // fetching rows of c, which the next block adds to;
  struct Fetcher : Aside {
    const float* next;
    std::int64_t stride, left = kPanelA;
    Fetcher(const float* c, std::int64_t c_stride) : next(c), stride(c_stride) {}
    [[gnu::always_inline]] void step(typename Aside::Hot& h) {
      Tiles::keep_awake(h.awake);
      if (left <= 0) return;
#pragma GCC unroll 4
      for (int v = 0; v < kPanelB; v += Simd::kLanes) Simd::prefetch(next + v);
      next += stride;
      --left;
    }
  };
  // writing the sums of the block before around the caches, a row a step.
  struct Writer : Aside {
    const float* sums = nullptr;
    float* c = nullptr;
    std::int64_t stride = 0, left = 0;
    void begin(const float* from, float* to, std::int64_t to_stride) {
      sums = from;
      c = to;
      stride = to_stride;
      left = kPanelA;
    }
    [[gnu::always_inline]] void step(typename Aside::Hot& h) {
      if (left > 0) return write_row();
      Tiles::keep_awake(h.awake);
    }
    [[gnu::always_inline]] void write_row() {
#pragma GCC unroll 4
      for (int v = 0; v < kPanelB; v += Simd::kLanes) {
        if constexpr (kStreams) Simd::stream(c + v, Simd::load(sums + v));
      }
      sums += kPanelB;
      c += stride;
      --left;
    }
    void finish() {
      while (left > 0) write_row();
    }
  };
  static constexpr bool kStreams = Simd::kLanes * sizeof(float) == 64;

  // A left panel is used for all of the right operand, which stays in L2 and goes past L1; the next left panel is fetched
  // meanwhile.
  static void multiply(const float* a, const float* b, std::int64_t m, std::int64_t n, std::int64_t depth, Compute compute,
                       float* c, std::int64_t c_stride, Store how) {
    if (compute == Compute::kFloat32) return Float32::table().multiply(a, b, m, n, depth, compute, c, c_stride, how);
    Tiles tiles;
    const std::int64_t steps = ceil_div(depth, kTileDepth), words = steps * kStepWords;
    const std::int64_t lines = ceil_div(2 * kTileRows, ceil_div(n, kPanelB));
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(c) % 64 == 0 && c_stride % 16 == 0;
    if (how == Store::kStream && !(kStreams && is_aligned)) how = Store::kReplace;
    alignas(64) float sums[2][kPanelA * kPanelB];
    Writer writer;
    int turn = 0;
    for (std::int64_t i = 0; i < m; i += kPanelA) {
      Ahead ahead{a + (i + kPanelA) * words, lines};
      for (std::int64_t j = 0; j < n; j += kPanelB) {
        const Place place{c + i * c_stride + j, c_stride, m - i < kPanelA ? m - i : kPanelA, n - j < kPanelB ? n - j : kPanelB,
                          how};
        const float *left = a + i * words, *right = b + j * words;
        if (!place.is_whole()) {
          edge<kTilesWide>(tiles, left, right, steps, place, ahead);
        } else if (how == Store::kStream) {
          block<kTilesHigh, kTilesWide, false>(tiles, left, right, steps, sums[turn], kPanelB, ahead, writer);
          writer.finish();
          writer.begin(sums[turn], place.c, c_stride);
          turn = 1 - turn;
        } else if (how == Store::kAdd) {
          Fetcher fetcher(j + 2 * kPanelB <= n ? place.c + kPanelB : c + (i + kPanelA) * c_stride, c_stride);
          block<kTilesHigh, kTilesWide, true>(tiles, left, right, steps, place.c, c_stride, ahead, fetcher);
        } else {
          Nothing nothing;
          block<kTilesHigh, kTilesWide, false>(tiles, left, right, steps, place.c, c_stride, ahead, nothing);
        }
      }
    }
    writer.finish();
    if (how == Store::kStream) Simd::fence();
  }

  // A block that is there in part, in the fewest tiles that hold it. Its sums begin with c too, so that they do not depend on
  // where in a block they are.
  template <int columns>
  static void edge(Tiles& tiles, const float* a, const float* b, std::int64_t steps, const Place& place, Ahead& ahead) {
    if constexpr (columns > 1) {
      if (place.columns <= (columns - 1) * kTileRows) return edge<columns - 1>(tiles, a, b, steps, place, ahead);
    }
    constexpr std::int64_t kStride = columns * kTileRows;
    alignas(64) float sums[kPanelA * kStride] = {};
    const auto row_bytes = static_cast<std::size_t>(place.columns) * sizeof(float);
    if (place.how == Store::kAdd) {
      for (std::int64_t i = 0; i < place.rows; ++i) __builtin_memcpy(sums + i * kStride, place.c + i * place.c_stride, row_bytes);
    }
    Nothing nothing;
    if (place.rows <= kTileRows) {
      block<1, columns, true>(tiles, a, b, steps, sums, kStride, ahead, nothing);
    } else {
      block<kTilesHigh, columns, true>(tiles, a, b, steps, sums, kStride, ahead, nothing);
    }
    for (std::int64_t i = 0; i < place.rows; ++i) __builtin_memcpy(place.c + i * place.c_stride, sums + i * kStride, row_bytes);
  }

  // adds: to what is there. `What` goes on beside it.
  template <int rows, int columns, bool adds, class What>
  [[gnu::noinline]] static void block(Tiles& tiles, const float* a, const float* b, std::int64_t steps, float* to,
                                      std::int64_t stride, Ahead& all_ahead, What& all_aside) {
    constexpr std::make_integer_sequence<int, rows * columns> kSums{};
    if constexpr (adds) {
      load_sums<columns>(tiles, to, stride, kSums);
    } else {
      zero_sums(tiles, kSums);
    }
    typename What::Hot aside = all_aside.hot();
    Ahead ahead = all_ahead;
    for (std::int64_t s = 0; s < steps; ++s) {
      add_step<rows, columns>(tiles, a + s * (kTilesHigh * kTileWords), b + s * (kStepWords * kPanelB));
      all_aside.step(aside);
      ahead.step();
    }
    store_sums<columns>(tiles, to, stride, kSums);
    all_aside.put(aside);
    all_ahead = ahead;
  }

  template <int... sum>
  [[gnu::always_inline]] static void zero_sums(Tiles& tiles, std::integer_sequence<int, sum...>) {
    (tiles.template zero<sum>(), ...);
  }
  template <int columns, int... sum>
  [[gnu::always_inline]] static void load_sums(Tiles& tiles, const float* from, std::int64_t stride,
                                               std::integer_sequence<int, sum...>) {
    constexpr std::int64_t kFloat = sizeof(float);
    (tiles.template load<sum>(from + sum / columns * kTileRows * stride + sum % columns * kTileRows, stride * kFloat), ...);
  }
  template <int columns, int... sum>
  [[gnu::always_inline]] static void store_sums(Tiles& tiles, float* to, std::int64_t stride,
                                                std::integer_sequence<int, sum...>) {
    constexpr std::int64_t kFloat = sizeof(float);
    (tiles.template store<sum>(to + sum / columns * kTileRows * stride + sum % columns * kTileRows, stride * kFloat), ...);
  }

  // Column by column: each right tile is loaded once, past L1, the left ones change places.
  template <int rows, int columns>
  [[gnu::always_inline]] static void add_step(Tiles& tiles, const float* a, const float* b) {
    add_columns<rows, columns>(tiles, a, b, std::make_integer_sequence<int, columns>{});
  }
  template <int rows, int columns, int... column>
  [[gnu::always_inline]] static void add_columns(Tiles& tiles, const float* a, const float* b,
                                                 std::integer_sequence<int, column...>) {
    (add_column<rows, columns, column>(tiles, a, b), ...);
  }
  template <int rows, int columns, int column>
  [[gnu::always_inline]] static void add_column(Tiles& tiles, const float* a, const float* b) {
    constexpr std::int64_t kRightStride = kPanelB * sizeof(float), kLeftStride = 64;
    constexpr int kFirst = rows == 2 ? column % 2 : 0;
    tiles.template load_once<kRight>(b + column * kTileRows, kRightStride);
    if constexpr (column == 0) tiles.template load<kLeft>(a + kFirst * kTileWords, kLeftStride);
    tiles.template add_products<kFirst * columns + column, kLeft, kRight>();
    if constexpr (rows == 2) {
      tiles.template load<kLeft>(a + (1 - kFirst) * kTileWords, kLeftStride);
      tiles.template add_products<(1 - kFirst) * columns + column, kLeft, kRight>();
    }
  }

  static float tile_loop(const float* a, const float* b, std::int64_t depth, std::int64_t repeats, Compute compute) {
    float sum = 0;
    if (compute == Compute::kFloat32) {
      constexpr std::int64_t kLow = Float32::table().a_panel;
      for (std::int64_t i = 0; i < kPanelA; i += kLow)
        sum += Float32::table().tile_loop(a + i * depth, b, depth, repeats, compute);
      return sum;
    }
    Tiles tiles;
    constexpr std::make_integer_sequence<int, kTilesHigh * kTilesWide> kSums{};
    zero_sums(tiles, kSums);
    typename Tiles::Awake awake{};
    for (std::int64_t r = 0; r < repeats; ++r) {
      for (std::int64_t s = 0; s < ceil_div(depth, kTileDepth); ++s) {
        add_step<kTilesHigh, kTilesWide>(tiles, a + s * (kTilesHigh * kTileWords), b + s * (kStepWords * kPanelB));
        Tiles::keep_awake(awake);
      }
    }
    alignas(64) float sums[kPanelA][kPanelB];
    store_sums<kTilesWide>(tiles, sums[0], kPanelB, kSums);
    for (const auto& row : sums) {
      for (const float x : row) sum += x;
    }
    return sum;
  }
};

}  // namespace tileloss::impl::cpu
