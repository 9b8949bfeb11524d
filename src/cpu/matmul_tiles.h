// The products of cpu/matmul.h in bfloat16 on tile registers (AMX): 2 x 3 tiles of sums of 16 x 16 floats, kept in six of the
// eight registers over the whole depth; one register goes through the left tiles and one through the right ones. float32 is
// multiplied by the FMA kernels.
//
// A product of two tiles is 16 rows x 16 columns x 32 k, 16384 flops, 16 cycles. Layouts, so that a tile is one load:
//   left   32 rows a panel, two tiles a step of 32 k; a tile is 16 rows of 64 bytes side by side (cpu/matmul_pack_tiles.h)
//   right  48 columns a panel, as for the vector kernels: words of two bfloat16 neighbours along k, 48 words a row, so that three
//          tiles lie beside each other at a stride of 192 bytes
// Both are filled with zeros to whole tiles along k. Parts of a tile are computed whole, and what exists of it is copied.
//
// Cost of a step: 6 products, 96 cycles; 7 loads of 16 lines, two of them from L1 once more, 56 cycles at two a cycle; 5 KB from
// L2, 53 bytes a cycle, and that is the bound: about 47 are what L2 gives. At the store: sums go straight into c where they are
// whole and nothing is there yet, else through 6 KB of L1, where they are added to c. Per call: two instructions that take and
// release the tiles, beside some 10^8 flops.
//
// What the design rests on was measured with a prototype, on a 2-core Xeon with AMX at [2048,1536] x [151936,1536], beside a roof
// of 5.0 - 6.0 TFLOP/s on random data: forward 3.6 - 3.96 TFLOP/s, 60 - 69 % of the roof of the same run, with the softmax spread
// over the steps of the next tile; dhead with streaming stores 3.38, dhidden with packing 3.14, all of recompute 3.27. It found:
// 2 x 2 tiles take 21.6 cycles a product with both operands in L2; a left operand in tiles of its own, loaded with the T1 hint,
// 3.70 -> 3.96; a right operand that comes from L3, fetched into L2 six lines a step ahead, 3.59 -> 3.73; steps and rows in
// alternating order, together 4 - 5 %; and 48 or more steps without arithmetic in 512-bit registers cost 650 - 1000 cycles, as
// the unit falls asleep: an addition a step keeps it awake, 4.2 -> 5.1 from L1.
//
// Those figures are the prototype's. This code has not been timed: it ran on emulations of the tile instructions only. It differs
// in that rows of z are tokens, as the row kernels want them; that the softmax is not spread over the steps; and that only the
// rows alternate, not the steps, since a sum must not depend on its place.
#ifndef TILELOSS_CPU_MATMUL_TILES_H_
#define TILELOSS_CPU_MATMUL_TILES_H_

#include <cstdint>
#include <utility>

#include "cpu/matmul.h"
#include "cpu/matmul_kernels.h"
#include "cpu/matmul_pack.h"
#include "cpu/matmul_pack_tiles.h"
#include "cpu/matmul_write.h"

namespace tileloss::cpu {

// Tiles: eight registers of 16 rows of 64 bytes. Its constructor takes them, its destructor gives them back; members with the
// register's number, which is part of the instruction, as a template argument:
//   zero<t>(), load<t>(p, stride), load_once<t>(p, stride) for what L1 need not keep, store<t>(p, stride), strides in bytes
//   add_products<sum, left, right>(): TDPBF16PS
//   keep_awake(Awake&): one addition in the widest vector registers
// Float32: a MatmulKernels of the same panels of the right operand.
template <class Simd, class Tiles, class Float32>
struct TileMatmul {
  static constexpr int kTilesHigh = 2, kTilesWide = 3, kTileRows = 16, kTileWords = 256;
  static constexpr int kPanelA = kTilesHigh * kTileRows, kPanelB = kTilesWide * kTileRows;
  static constexpr int kStepDepth = 32, kStepWords = kStepDepth / 2;
  static constexpr int kLeft = 6, kRight = 7;
  static_assert(Float32::table().b_panel == kPanelB && kPanelA % Float32::table().a_panel == 0);

  static constexpr MatmulTable table() {
    return {kPanelA,
            kPanelB,
            2,
            kStepWords,
            &pack_a,
            &MatmulPacking<Simd, kPanelB, kStepWords>::pack,
            &MatmulPacking<Simd, kPanelB, kStepWords>::pack_part,
            &multiply,
            &MatmulWriting<Simd>::write,
            &tile_loop};
  }

 private:
  static constexpr std::int64_t ceil_div(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

  // The panels of float32 are lower: those that are missing in the last of ours are 0.
  static void pack_a(const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t depth, Compute compute,
                     float* dst) {
    if (compute == Compute::kBfloat16) return TilePacking<Simd, kTilesHigh>::pack(x, row, rows, k, depth, dst);
    Float32::table().pack_a(x, row, rows, k, depth, compute, dst);
    constexpr std::int64_t kLow = Float32::table().a_panel;
    for (std::int64_t i = ceil_div(rows, kLow) * kLow * depth; i < ceil_div(rows, kPanelA) * kPanelA * depth; ++i) dst[i] = 0;
  }

  // A block of c, at its place; the part of it that exists.
  struct Place {
    float* c;
    std::int64_t c_stride;
    std::int64_t rows, columns;
    Store how;
  };
  // Lines of the next right panel to fetch at every step.
  struct Ahead {
    const float* panel;
    std::int64_t first_line, lines;
  };

  // A right panel is used for all of the left operand, which stays in L2. The rows go forward and backward by turns: the left
  // panel used last is the next one's first.
  static void multiply(const float* a, const float* b, std::int64_t m, std::int64_t n, std::int64_t depth, Compute compute,
                       float* c, std::int64_t c_stride, Store how) {
    if (compute == Compute::kFloat32) return Float32::table().multiply(a, b, m, n, depth, compute, c, c_stride, how);
    Tiles tiles;
    const std::int64_t steps = ceil_div(depth, kStepDepth), words = steps * kStepWords;
    const std::int64_t panels_a = ceil_div(m, kPanelA), panels_b = ceil_div(n, kPanelB);
    constexpr std::int64_t kLines = kPanelB;  // of a step of a right panel: kStepWords rows of kPanelB words
    const std::int64_t lines = ceil_div(kLines, panels_a);
    for (std::int64_t q = 0; q < panels_b; ++q) {
      const std::int64_t j = q * kPanelB;
      for (std::int64_t turn = 0; turn < panels_a; ++turn) {
        const std::int64_t p = q % 2 == 0 ? turn : panels_a - 1 - turn, i = p * kPanelA;
        const Place place{c + i * c_stride + j, c_stride, m - i < kPanelA ? m - i : kPanelA, n - j < kPanelB ? n - j : kPanelB,
                          how};
        const std::int64_t first = turn * lines, left = kLines - first;
        const bool fetches = q + 1 < panels_b && left > 0;
        const Ahead ahead{b + (j + kPanelB) * words, first, !fetches ? 0 : left < lines ? left : lines};
        choose_columns<kTilesWide>(tiles, a + i * words, b + j * words, steps, place, ahead);
      }
    }
  }

  // The fewest tiles that hold the part that exists.
  template <int columns>
  static void choose_columns(Tiles& tiles, const float* a, const float* b, std::int64_t steps, const Place& place,
                             const Ahead& ahead) {
    if constexpr (columns > 1) {
      if (place.columns <= (columns - 1) * kTileRows) {
        return choose_columns<columns - 1>(tiles, a, b, steps, place, ahead);
      }
    }
    if (place.rows <= kTileRows) return block<1, columns>(tiles, a, b, steps, place, ahead);
    block<kTilesHigh, columns>(tiles, a, b, steps, place, ahead);
  }

  template <int rows, int columns>
  [[gnu::noinline]] static void block(Tiles& tiles, const float* a, const float* b, std::int64_t steps, const Place& place,
                                      const Ahead& ahead) {
    zero_sums(tiles, std::make_integer_sequence<int, rows * columns>{});
    typename Tiles::Awake awake{};
    for (std::int64_t s = 0; s < steps; ++s) {
      add_step<rows, columns>(tiles, a + s * (kTilesHigh * kTileWords), b + s * (kStepWords * kPanelB));
      Tiles::keep_awake(awake);
      const float* const next = ahead.panel + (s * kPanelB + ahead.first_line) * 16;
      for (std::int64_t line = 0; line < ahead.lines; ++line) Simd::prefetch(next + line * 16);
    }
    constexpr std::make_integer_sequence<int, rows * columns> kSums{};
    if (place.rows == rows * kTileRows && place.columns == columns * kTileRows && place.how != Store::kAdd) {
      return store_sums<columns>(tiles, place.c, place.c_stride, kSums);
    }
    const bool adds = place.how == Store::kAdd;
    alignas(64) float sums[rows * kTileRows][columns * kTileRows];
    store_sums<columns>(tiles, sums[0], columns * kTileRows, kSums);
    for (std::int64_t i = 0; i < place.rows; ++i) {
      float* const c = place.c + i * place.c_stride;
      std::int64_t j = 0;
      for (; j + Simd::kLanes <= place.columns; j += Simd::kLanes) {
        const typename Simd::F sum = Simd::load(sums[i] + j);
        Simd::store(c + j, adds ? Simd::add(Simd::load(c + j), sum) : sum);
      }
      for (; j < place.columns; ++j) c[j] = adds ? c[j] + sums[i][j] : sums[i][j];
    }
  }

  template <int... sum>
  [[gnu::always_inline]] static void zero_sums(Tiles& tiles, std::integer_sequence<int, sum...>) {
    (tiles.template zero<sum>(), ...);
  }
  template <int columns, int... sum>
  [[gnu::always_inline]] static void store_sums(Tiles& tiles, float* to, std::int64_t stride,
                                                std::integer_sequence<int, sum...>) {
    constexpr std::int64_t kFloat = sizeof(float);
    (tiles.template store<sum>(to + sum / columns * kTileRows * stride + sum % columns * kTileRows, stride * kFloat), ...);
  }

  // The first row of tiles from the left, the second from the right, where one tile is still there.
  template <int rows, int columns>
  [[gnu::always_inline]] static void add_step(Tiles& tiles, const float* a, const float* b) {
    constexpr std::make_integer_sequence<int, columns> kColumns{};
    constexpr std::int64_t kLeftStride = 64;
    tiles.template load_once<kLeft>(a, kLeftStride);
    add_row(tiles, b, kColumns);
    if constexpr (rows == 2) {
      tiles.template load_once<kLeft>(a + kTileWords, kLeftStride);
      add_row_back(tiles, b, kColumns);
    }
  }
  template <int... column>
  [[gnu::always_inline]] static void add_row(Tiles& tiles, const float* b, std::integer_sequence<int, column...>) {
    ((load_right(tiles, b, std::integral_constant<int, column>{}), tiles.template add_products<column, kLeft, kRight>()), ...);
  }
  template <int... turn>
  [[gnu::always_inline]] static void add_row_back(Tiles& tiles, const float* b, std::integer_sequence<int, turn...>) {
    constexpr int kColumns = sizeof...(turn);
    (add_back(tiles, b, std::integral_constant<int, turn>{}, std::integral_constant<int, kColumns>{}), ...);
  }
  template <int turn, int columns>
  [[gnu::always_inline]] static void add_back(Tiles& tiles, const float* b, std::integral_constant<int, turn>,
                                              std::integral_constant<int, columns>) {
    constexpr int kColumn = columns - 1 - turn;
    if constexpr (turn > 0) load_right(tiles, b, std::integral_constant<int, kColumn>{});
    tiles.template add_products<columns + kColumn, kLeft, kRight>();
  }
  template <int column>
  [[gnu::always_inline]] static void load_right(Tiles& tiles, const float* b, std::integral_constant<int, column>) {
    constexpr std::int64_t kRightStride = kPanelB * sizeof(float);
    tiles.template load<kRight>(b + column * kTileRows, kRightStride);
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
      for (std::int64_t s = 0; s < ceil_div(depth, kStepDepth); ++s) {
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

}  // namespace tileloss::cpu

#endif  // TILELOSS_CPU_MATMUL_TILES_H_
