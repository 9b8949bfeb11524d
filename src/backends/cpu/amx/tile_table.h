// What of the LM head's work is done beside the products where those are in tile registers (backends/cpu/amx/matmul_tiles.h):
// the softmax of a forward, and a backward's dz straight into the products' operands.
#pragma once

#include <cstdint>

namespace tileloss::impl::cpu {

// A tile of a left operand: 16 rows of 32 bfloat16, 64 bytes a row.
inline constexpr int kTileRows = 16, kTileDepth = 32, kTileWords = kTileRows * kTileDepth / 2;
inline constexpr int kGradientRows = 2 * kTileRows;

// A row in use over the tiles of columns of a slice of the vocabulary, as far as they are in reach of float32's exponents: `sum`
// is that over the columns but the label's of 2^(exponent - reference). Maximum and label's logit are those before the
// transform's scale. Tiles out of reach are the caller's to add: odd_*, as a RowState has them.
struct RunningRow {
  double sum = 0;
  float reference = -__builtin_inff();
  float max = -__builtin_inff(), target = -__builtin_inff();
  float odd_max = -__builtin_inff(), odd_sum = 0, odd_target = -__builtin_inff();
  std::int64_t target_column = -1;
};

// z of a tile of columns for all rows of a group, and their softmax: linear logits, of which maximum and sum of exponentials
// alone are wanted. Callbacks get a row's number in the group.
struct SoftmaxRows {
  const float *a = nullptr, *b = nullptr;  // packed
  std::int64_t rows = 0, columns = 0, depth = 0;
  std::int64_t column = 0;  // the first one's number
  // Room for two blocks of a_panel rows, z_stride floats from row to row: no less than the columns in whole panels and whole
  // pairs of vectors.
  float* z = nullptr;
  std::int64_t z_stride = 0;
  RunningRow* running = nullptr;
  float exponent_scale = 0, inverse_scale = 0;
  double exact_exponent_scale = 0;
  double reference_unit = 1;  // of RunningRow::reference, in exponents: what rounding exponent_scale leaves
  float steps_per_unit = 0;   // of backends/cpu/head/kept_logits.h
  void* context = nullptr;
  // Where a row's words go, whole pairs of vectors of them, which are relative to `max`; null: none are kept.
  std::uint16_t* (*keep)(void* context, std::int64_t row, float max) noexcept = nullptr;
  // Before anything is done with a row's z: makes -inf of what does not count; null: all does.
  void (*leave_out)(void* context, std::int64_t row, float* z) noexcept = nullptr;
  // A row with a NaN or +inf in it, or with logits too far out for float32's exponents.
  void (*odd)(void* context, std::int64_t row, const float* z) noexcept = nullptr;
  // Every other row, for what more is wanted of its logits; null: nothing is.
  void (*also)(void* context, std::int64_t row, const float* z) noexcept = nullptr;
};

// dz of up to kGradientRows rows from logits kept in words (backends/cpu/head/kept_logits.h): off the label p times one number,
// so that dz = factor * 2^(exponent_of_word * word + exponent), 0 for a word of 0, relative error 4e-6 and one rounding to
// bfloat16. Rows that are not there are 0. A row's words are followed by those of the row kGradientRows further where they lie in
// one block.
struct GradientTiles {
  const std::uint16_t* words[kGradientRows];
  float factor[kGradientRows], exponent[kGradientRows];
  float exponent_of_word = 0;
  std::int64_t rows = 0, columns = 0;  // columns: a multiple of 32
  float* along = nullptr;  // tiles of 16 rows by 32 columns, two of them for 32 columns, side by side; null: not wanted
  float* down = nullptr;   // tiles of 16 columns by 32 rows, two for 32 columns, the next ones down_stride floats further
  std::int64_t down_stride = 0;
};

struct TileTable {
  void (*multiply_softmax)(const SoftmaxRows& job);
  void (*gradient)(const GradientTiles& job);
};

}  // namespace tileloss::impl::cpu
