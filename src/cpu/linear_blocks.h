// How the LM head's work is cut. Constants, so that results do not depend on threads.
#ifndef TILELOSS_CPU_LINEAR_BLOCKS_H_
#define TILELOSS_CPU_LINEAR_BLOCKS_H_

#include <algorithm>

#include "cpu/linear.h"

namespace tileloss::cpu {

inline constexpr std::int64_t kSlices = 16;         // of the vocabulary, in a forward
inline constexpr std::int64_t kRowGroup = 1024;     // rows that share a packed tile of the head
inline constexpr std::int64_t kAcrossDepth = 2048;  // rows along k in dhead's product
inline constexpr std::int64_t kRowTile = 128;       // about so many rows of z or dhidden at a time

inline constexpr std::int64_t kPanelsATask = 4;   // when the head or hidden is packed across
inline constexpr std::int64_t kRoundedRows = 64;  // of a 16-bit dhead at a time: 393 KB of sums at a width of 1536
inline constexpr std::int64_t kDhiddenTasks = 4;  // of a chunk at least: each packs its rows of dz anew

inline constexpr float kKeptStepsPerExponent = 0x1p9F;  // of cpu/kept_logits.h

inline std::int64_t ceil_div(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

// The operands of dhead's product: hidden across, and dz down a tile's columns. dhead as [H,V] has them in each other's place.
inline std::int64_t across_panel(const LinearShape& s, const MatmulTable& m) { return s.dhead_across ? m.a_panel : m.b_panel; }
inline std::int64_t dz_panel(const LinearShape& s, const MatmulTable& m) { return s.dhead_across ? m.b_panel : m.a_panel; }
inline std::int64_t across_block(const LinearShape& s, const MatmulTable& m) {
  return m.packed_floats(s.width, across_panel(s, m), std::min(s.row_chunk, kAcrossDepth), s.compute);
}
inline std::int64_t dz_block(const LinearShape& s, const MatmulTable& m) {
  return m.packed_floats(s.tile, dz_panel(s, m), std::min(s.row_chunk, kAcrossDepth), s.compute);
}

// A row tile is whole panels.
inline std::int64_t row_tile(const MatmulTable& m) { return std::max<std::int64_t>(1, kRowTile / m.a_panel) * m.a_panel; }
inline std::int64_t row_group(const MatmulTable& m) { return kRowGroup / row_tile(m) * row_tile(m); }
// Columns of dhidden a task, whole panels: all of them where the tiles of rows are tasks enough.
inline std::int64_t dhidden_part(const LinearShape& s, const MatmulTable& m, std::int64_t row_tiles) {
  const std::int64_t panels = std::max<std::int64_t>(ceil_div(s.width, m.b_panel), 1);
  return ceil_div(panels, ceil_div(kDhiddenTasks, row_tiles)) * m.b_panel;
}
// Columns of a backward's chunk.
inline std::int64_t head_chunk(const LinearShape& s) { return std::min(s.chunk, ceil_div(s.columns, s.tile) * s.tile); }

}  // namespace tileloss::cpu

#endif  // TILELOSS_CPU_LINEAR_BLOCKS_H_
