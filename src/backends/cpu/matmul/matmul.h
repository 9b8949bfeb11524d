// Products of packed matrices, c = a * b^T: what the schedules of the LM head are built of. One table an instruction set.
//
// The caller cuts the operands into blocks that suit the caches, packs each block once and multiplies it many times. A packed
// block is a row of panels; a panel holds a_panel (or b_panel) rows, word by word along k: word (row r, step s) of panel p is at
// dst[(p * words(depth) + s) * panel + r]. Two instruction sets have words in another order within the panel: the left operand's
// in backends/cpu/amx/matmul_tiles.h, both with neon_bf16, where words 2s and 2s + 1 of a row lie side by side.
#pragma once

#include <cstdint>

#include "backends/cpu/simd/storage_type.h"

namespace tileloss::impl::cpu {

// What the products are computed in. Sums are float32. With kBfloat16 the operands are rounded to bfloat16 (nearest even) while
// they are packed; products of two bfloat16 are exact in float32. The instruction sets avx512_bf16 and avx512_amx multiply pairs
// with VDPBF16PS and TDPBF16PS, which take subnormal operands for 0, flush subnormal sums to 0 and round to nearest even whatever
// the control word says; neon_bf16 multiplies rows of four with BFMMLA, which flushes too and rounds sums to odd (an inexact
// one's last bit is set, at most twice the error); the others do as the control word says.
enum class Compute { kFloat32, kBfloat16 };

// What a product does to c. kStream replaces a c that is not read again soon, around the caches where its lines are stored
// whole, so that no line is read first: by AVX-512's kernels and AMX's, with c and its rows on 64-byte boundaries.
enum class Store { kReplace, kAdd, kStream };

// A matrix operand as it lies in memory: element (i, k) is at data + i * row_stride + k * k_stride, in elements of `storage`.
struct Operand {
  const void* data = nullptr;
  StorageType storage = kStorageFloat32;
  std::int64_t row_stride = 0;
  std::int64_t k_stride = 0;
};

// A matrix to write, any strides.
struct OutputMatrix {
  void* data = nullptr;
  StorageType storage = kStorageFloat32;
  std::int64_t row_stride = 0, col_stride = 1;
};

// Packs rows [row, row + rows) and k in [k, k + depth) of x. Missing rows of the last panel and, for pairs, a missing last k are
// 0. Reads nothing outside those rows and k. dst: packed_floats() floats, on a 64-byte boundary; all of it is written but for the
// padding after the last panel.
using PackFunction = void (*)(const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t depth,
                              Compute compute, float* dst);

using PackPartFunction = void (*)(const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t depth,
                                  Compute compute, float* dst, std::int64_t first_word, std::int64_t panel_words);

struct TileTable;  // backends/cpu/amx/tile_table.h

struct MatmulTable {
  std::int64_t a_panel, b_panel;  // rows of a panel of the left (broadcast) and of the right (vector) operand
  std::int64_t bfloat16_in_word;  // 2: kBfloat16 packs neighbours along k into one 32-bit word; 1: a word is always one float
  std::int64_t whole_words;       // words along k come in multiples of this if they are of two bfloat16; those beyond depth are 0
  PackFunction pack_a, pack_b;
  // The same, but for some of the k of a block at dst whose panels are panel_words words long, from word first_word on, a
  // multiple of whole_words.
  PackPartFunction pack_a_part, pack_b_part;

  // c[i * c_stride + j] = sum over k of a(i, k) * b(j, k) for i < m, j < n, k < depth, that of both packs; with kAdd the sum is
  // added to what is there (in tile registers as its first term). Its order is the same for any m, n and place in the panels.
  // Writes nothing outside c's m x n.
  void (*multiply)(const float* a, const float* b, std::int64_t m, std::int64_t n, std::int64_t depth, Compute compute, float* c,
                   std::int64_t c_stride, Store how);

  // Row row + i, column j of `to` = (adds: +=) sums[i * sums_stride + j] for i < rows, j < columns, rounded once.
  void (*write)(const float* sums, std::int64_t sums_stride, std::int64_t rows, std::int64_t columns, const OutputMatrix& to,
                std::int64_t row, bool adds);

  // The inner loop alone over one panel of each, `repeats` times, without touching c; returns a sum so that it is not dropped.
  // It does 2 * a_panel * b_panel * depth flops a repeat. For the roof: choose a depth at which both panels lie in L1.
  float (*tile_loop)(const float* a, const float* b, std::int64_t depth, std::int64_t repeats, Compute compute);

  // What products in tile registers (of kBfloat16) make possible besides; null elsewhere.
  const TileTable* tiles = nullptr;
  bool uses_amx(Compute compute) const { return tiles != nullptr && compute == Compute::kBfloat16; }

  // Words along k of a panel's row.
  std::int64_t words(std::int64_t depth, Compute compute) const {
    if (compute == Compute::kFloat32) return depth;
    const std::int64_t in_multiple = bfloat16_in_word * whole_words;
    return (depth + in_multiple - 1) / in_multiple * whole_words;
  }
  // Of a block whose k are those of two matrices, one after the other, each packed as a part: as if it had so many k.
  std::int64_t depth_of_both(std::int64_t first, std::int64_t second, Compute compute) const {
    if (second == 0 || compute == Compute::kFloat32) return first + second;
    return words(first, compute) * bfloat16_in_word + second;
  }
  // Floats of a packed block of `rows` rows, `panel` being a_panel or b_panel; rounded up to 64 bytes, so that blocks can follow
  // each other.
  std::int64_t packed_floats(std::int64_t rows, std::int64_t panel, std::int64_t depth, Compute compute) const {
    return ((rows + panel - 1) / panel * panel * words(depth, compute) + 15) / 16 * 16;
  }
};

}  // namespace tileloss::impl::cpu
