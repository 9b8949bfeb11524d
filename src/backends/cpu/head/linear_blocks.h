// How the LM head's work is cut. Constants, so that results do not depend on threads.
#pragma once

#include <algorithm>

#include "backends/cpu/head/lm_head.h"

namespace tileloss::impl::cpu {

inline constexpr std::int64_t kSlices = 16;         // of the vocabulary, in a forward
inline constexpr std::int64_t kRowGroup = 1024;     // rows that share a packed tile of the head
inline constexpr std::int64_t kAmxRowGroup = 2048;  // the same in a forward with products in tile registers
inline constexpr std::int64_t kAcrossDepth = 2048;  // rows along k in dhead's product
inline constexpr std::int64_t kRowTile = 128;       // about so many rows of z or dhidden at a time

inline constexpr std::int64_t kPanelsATask = 4;   // when the head or hidden is packed across
inline constexpr std::int64_t kRoundedRows = 64;  // of a 16-bit dhead at a time: 393 KB of sums at a width of 1536
inline constexpr std::int64_t kDhiddenTasks = 4;  // of a chunk at least: each packs its rows of dz anew

inline constexpr float kKeptStepsPerExponent = 0x1p9F;  // of backends/cpu/head/kept_logits.h
inline constexpr double kExponentOfWord = LogitTransform::kExactLog2E / static_cast<double>(kKeptStepsPerExponent);

inline std::int64_t ceil_div(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

// The operands of dhead's product: hidden across, and dz down a tile's columns. dhead as [H,V] has them in each other's place.
inline std::int64_t across_panel(const PartShape& part, const MatmulTable& m) {
  return part.dhead_across ? m.a_panel : m.b_panel;
}
inline std::int64_t across_block(const LinearShape& s, const PartShape& part, const MatmulTable& m) {
  return m.packed_floats(part.width, across_panel(part, m), std::min(s.row_chunk, kAcrossDepth), s.compute);
}
inline std::int64_t dz_block(const LinearShape& s, const PartShape& part, const MatmulTable& m) {
  const std::int64_t panel = part.dhead_across ? m.b_panel : m.a_panel;
  return m.packed_floats(s.tile, panel, std::min(s.row_chunk, kAcrossDepth), s.compute);
}

// A row tile is whole panels.
inline std::int64_t row_tile(const MatmulTable& m) { return std::max<std::int64_t>(1, kRowTile / m.a_panel) * m.a_panel; }
inline std::int64_t row_group(const MatmulTable& m) { return kRowGroup / row_tile(m) * row_tile(m); }
// The same of a forward.
inline std::int64_t forward_group(const LinearShape& s, const MatmulTable& m) {
  return m.uses_amx(s.compute) ? kAmxRowGroup : row_group(m);
}
// Columns of a low-rank part's dhidden that are too few to read all of dz once more for them.
inline constexpr std::int64_t kFewColumns = 64;
// Columns of dhidden a task, whole panels: all of them where the tiles of rows are tasks enough.
inline std::int64_t dhidden_part(const PartShape& part, const MatmulTable& m, std::int64_t row_tiles) {
  const std::int64_t panels = std::max<std::int64_t>(ceil_div(part.width, m.b_panel), 1);
  return ceil_div(panels, ceil_div(kDhiddenTasks, row_tiles)) * m.b_panel;
}
// The k of z, and a tile of the head that is packed for it.
inline std::int64_t z_depth(const LinearShape& s, const MatmulTable& m) {
  return m.depth_of_both(s.own.width, s.low_rank.width, s.compute);
}
inline std::int64_t tile_of_head(const LinearShape& s, const MatmulTable& m) {
  return m.packed_floats(s.tile, m.b_panel, z_depth(s, m), s.compute);
}
// What of a row's tile is allowed: z, and class weights.
inline std::int64_t side_by_side_floats(const LinearShape& s) { return s.allowed ? 2 * s.tile : 0; }
// Columns of a backward's chunk.
inline std::int64_t head_chunk(const LinearShape& s) { return std::min(s.chunk, ceil_div(s.columns, s.tile) * s.tile); }

// --------------------------------------------------------------------------------------------- products in tile registers

// z beside whose products the softmax of the rows before is done: two blocks of rows by turns, whole panels of columns.
inline std::int64_t z_beside_stride(const LinearShape& s, const MatmulTable& m) {
  return ceil_div(s.tile, m.b_panel) * m.b_panel;
}
inline std::int64_t z_beside_floats(const LinearShape& s, const MatmulTable& m) { return 2 * m.a_panel * z_beside_stride(s, m); }

// Whether dz is packed as soon as it is made, once for each of its products: as left operands of the products in tile registers.
inline bool packs_dz(const LinearShape& s, const MatmulTable& m) {
  return m.uses_amx(s.compute) && s.backward() && !s.own.dhead_across && !s.low_rank.dhead_across && !s.dbias;
}
// A product is cut into sets of panels of its right operand, which stay in L2 while left rows pass: 786 KB of hidden at 2048
// rows, 885 KB of the head at chunks of 1536.
inline constexpr std::int64_t kHeadSetPanels = 4, kHiddenSetPanels = 6;
inline constexpr std::int64_t kSetRows = 512;      // of the left operand, a task
inline constexpr std::int64_t kJoinedRows = 64;    // of it for two products at a time: 196 KB at chunks of 1536
inline constexpr std::int64_t kDzRows = 32;        // at a time: the left operand's panel
inline constexpr std::int64_t kKeptDzGroup = 256;  // rows of dz a task, where all z are kept
// Packed dz: for dhidden row tiles along the chunk; for dhead the chunk's columns along rows, cut every kAcrossDepth.
inline std::int64_t dz_along_floats(const LinearShape& s, const MatmulTable& m) {
  return s.dhidden() ? m.packed_floats(s.row_chunk, m.a_panel, head_chunk(s), s.compute) : 0;
}
inline std::int64_t dz_down_block(const LinearShape& s, const MatmulTable& m) {
  return m.packed_floats(head_chunk(s), m.a_panel, std::min(s.row_chunk, kAcrossDepth), s.compute);
}
inline std::int64_t dz_down_words(const LinearShape& s, const MatmulTable& m) {
  return m.words(std::min(s.row_chunk, kAcrossDepth), s.compute);
}
inline std::int64_t dz_down_floats(const LinearShape& s, const MatmulTable& m) {
  return s.dhead() ? ceil_div(s.row_chunk, kAcrossDepth) * dz_down_block(s, m) : 0;
}

}  // namespace tileloss::impl::cpu
