#include <algorithm>

#include "backends/cpu/amx/tile_table.h"
#include "backends/cpu/head/linear_blocks.h"
#include "backends/cpu/sweep/label_gradients.h"
#include "backends/cpu/sweep/row_gradient.h"

namespace tileloss::impl::cpu {
namespace {

// A thread's scratch is used by one kind of task at a time.
std::int64_t forward_floats(const LinearShape& s, const MatmulTable& m) {
  const std::int64_t head = tile_of_head(s, m), with_bias = head + row_tile(m) * s.tile + (s.bias ? s.tile : 0);
  if (!m.uses_amx(s.compute)) return with_bias;
  const std::int64_t running = std::min(kAmxRowGroup, s.rows) * static_cast<std::int64_t>(sizeof(RunningRow) / sizeof(float));
  return std::max(with_bias, head + z_beside_floats(s, m) + running);
}

std::int64_t backward_floats(const LinearShape& s, const MatmulTable& m) {
  const std::int64_t after_head = tile_of_head(s, m) + (s.bias ? s.tile : 0);
  const std::int64_t words = s.kept_in_words ? ceil_div(s.tile, 2) : 0;
  if (packs_dz(s, m)) {
    const std::int64_t rounded =
        s.dhead() ? kRoundedRows * std::min(kHeadSetPanels * m.b_panel, std::max(s.own.width, s.low_rank.width)) : 0;
    return std::max(after_head + kDzRows * (s.tile + words), rounded);
  }
  std::int64_t most = after_head + words;
  for (const PartShape& part : {s.own, s.low_rank}) {
    if (part.dhead) most = std::max(most, dz_block(s, part, m) + s.tile * part.width);
  }
  if (s.dbias) most = std::max(most, s.tile * 2);
  if (s.dhidden()) most = std::max(most, m.packed_floats(row_tile(m), m.a_panel, head_chunk(s), s.compute));
  return most;
}

std::int64_t scratch_floats(const LinearShape& s, const MatmulTable& m) {
  if (!s.forward && !s.backward()) return 0;
  const auto copies = [](const PartShape& part, std::int64_t rows, std::int64_t columns) {
    return ceil_div(rows * columns * part.hidden_bytes, 4);
  };
  std::int64_t most = 0;
  for (const PartShape& part : {s.own, s.low_rank})
    most = std::max(most, copies(part, std::min(row_tile(m), s.rows), part.width));
  if (s.needs_target_sweep()) {
    const std::int64_t teacher = m.packed_floats(s.tile, m.b_panel, s.target.width, s.compute);
    const std::int64_t head = std::max(tile_of_head(s, m), teacher) + s.tile;
    const std::int64_t sweeps = s.target.scratch.bytes() / 4;
    const std::int64_t copy = ceil_div(std::min(row_tile(m), s.rows) * s.target.width * s.target.hidden_bytes, 4);
    most = std::max({most, head, sweeps, copy});
  }
  if (s.forward && !s.needs_target_sweep()) most = std::max(most, forward_floats(s, m));
  if (s.backward()) most = std::max(most, backward_floats(s, m));
  for (const PartShape& part : {s.own, s.low_rank}) {
    const std::int64_t columns = std::min(kPanelsATask * across_panel(part, m), part.width);
    if (part.dhead) most = std::max(most, copies(part, std::min(s.row_chunk, kAcrossDepth), columns));
  }
  return most;
}

}  // namespace

// 256 rows of 1536 bfloat16 are 786 KB. Products in tile registers are 48 columns wide: they take 4 whole panels.
std::int64_t linear_tile(const MatmulTable& matmul, Compute compute, std::int64_t width) {
  if (width <= 2048) return matmul.uses_amx(compute) ? 192 : 256;
  return width <= 6144 ? 128 : 64;
}

LinearLayout linear_layout(const LinearShape& s, const MatmulTable& m) {
  LinearLayout l;
  const auto take = [&l](const char* name, std::int64_t bytes) {
    const std::int64_t begin = l.bytes, rounded = ceil_div(bytes, 64) * 64;
    if (bytes > 0) l.buffers.push_back({name, rounded});
    l.bytes += rounded;
    return begin;
  };
  constexpr std::int64_t kFloat = sizeof(float);
  l.used_rows = take("rows in use", s.rows * 8);
  l.empty = take("rows without tokens", s.allowed ? s.rows : 0);
  const bool needs_z = s.forward || s.backward();
  l.packed_hidden = take("packed hidden", needs_z ? m.packed_floats(s.rows, m.a_panel, z_depth(s, m), s.compute) * kFloat : 0);
  if (s.needs_target_sweep()) {
    const std::int64_t logits = s.target.rows * s.z_stride() * kFloat;
    l.packed_teacher = take("packed teacher hidden",
                            s.target.width == 0 ? 0 : m.packed_floats(s.rows, m.a_panel, s.target.width, s.compute) * kFloat);
    l.some_logits = take("logits of some rows", logits);
    l.some_teacher_logits = take("teacher logits of these", s.target.width > 0 ? logits : 0);
    l.some_label_columns = take("labels of these", s.target.rows * 8);
    const std::int64_t others = s.row_chunk - s.kept_in_dhead.rows;
    l.kept_dz = take("dlogits kept", s.backward() ? others * s.z_stride() * s.dz_bytes() : 0);
  }
  l.states = take("states of slices",
                  s.forward && !s.needs_target_sweep() ? kSlices * s.rows * static_cast<std::int64_t>(sizeof(RowState)) : 0);
  l.weights = take("weights of slices", s.allowed && s.forward && !s.needs_target_sweep() ? kSlices * s.rows * 8 : 0);
  const std::int64_t labels = s.rows * s.labels_per_row;
  l.label_logits = take("labels' logits", labels * kFloat);
  l.label_z = take("labels' transformed logits", labels * kFloat);
  if (s.backward()) {
    l.label_gradients =
        take("labels' gradients", labels > 0 ? (labels + s.rows) * static_cast<std::int64_t>(sizeof(LabelGradient)) : 0);
    l.gradients = take("row gradients", s.needs_target_sweep() ? 0 : s.rows * static_cast<std::int64_t>(sizeof(RowGradient)));
    const std::int64_t chunk = head_chunk(s);
    const std::int64_t kept_rows = ceil_div(s.kept, s.tile) * (s.row_chunk - s.kept_in_dhead.rows);
    const std::int64_t kept_bytes = kept_rows * s.tile * (s.kept_in_words ? 2 : kFloat);
    l.kept = take("logits kept", kept_bytes + (s.kept_in_words ? kept_rows * kFloat : 0));
    l.kept_max = l.kept + kept_bytes;
    const std::int64_t rows_in_dhead = s.whole_tiles() * s.kept_in_dhead.rows;
    l.max_in_dhead = take("maxima of kept logits", s.kept_in_words ? rows_in_dhead * kFloat : 0);
    const std::int64_t dz = packs_dz(s, m) ? dz_along_floats(s, m) + dz_down_floats(s, m) : s.row_chunk * chunk;
    l.dz = take("dlogits of a chunk", dz * kFloat);
    const auto take_part = [&](const PartShape& part, const char* hidden, const char* dhead, const char* head,
                               const char* dhidden) {
      PartLayout at;
      const std::int64_t across = ceil_div(s.row_chunk, kAcrossDepth) * across_block(s, part, m) * kFloat;
      at.packed_across = take(hidden, part.dhead ? across : 0);
      at.dhead = take(dhead, s.sums_dhead(part) ? s.columns * part.width * kFloat : 0);
      at.packed_head = take(head, part.dhidden ? m.packed_floats(part.width, m.b_panel, chunk, s.compute) * kFloat : 0);
      at.dhidden = take(dhidden, part.dhidden ? s.rows * part.width * kFloat : 0);
      return at;
    };
    l.own = take_part(s.own, "hidden packed across", "dhead sums", "head packed across", "dhidden sums");
    l.low_rank = take_part(s.low_rank, "hidden_r packed across", "dhead_r sums", "head_r packed across", "dhidden_r sums");
    if (s.sums_dbias()) l.dbias = take("dbias sums", s.columns * kFloat);
  }
  l.scratch_bytes = ceil_div(scratch_floats(s, m) * kFloat, 64) * 64 + side_by_side_floats(s) * kFloat +
                    operand_floats(s.softcap, s.tile) * kFloat;
  l.scratch = take("scratch of threads", l.scratch_bytes * s.threads);
  return l;
}

}  // namespace tileloss::impl::cpu
