// The forward of lm_head.h where products are in tile registers (backends/cpu/amx/matmul_tiles.h): the softmax of linear logits
// is done beside the products of the next block (backends/cpu/amx/tile_softmax.h).
#include <cstring>
#include <utility>

#include "backends/cpu/amx/tile_table.h"
#include "backends/cpu/head/linear_walk.h"

namespace tileloss::impl::cpu {

// Not a matter of what else is wanted of a row, so that its logp has the same bits whatever that is.
bool LinearWalk::has_softmax_beside() const {
  const float scale = job_.transform.scale;
  return matmul().uses_amx(shape().compute) && !(job_.transform.softcap > 0) && scale > 0x1p-64F && scale < 0x1p64F &&
         job_.bias.data == nullptr;
}

// What the callbacks of SoftmaxRows need to know of the tile of columns at hand: `first` is the group's first row.
struct LinearWalk::TileAtHand {
  const LinearWalk* walk;
  RunningRow* running = nullptr;
  std::int64_t first = 0, column = 0, columns = 0, slice = 0;
  double weight_before = 0, weight = 0;
  float* scratch = nullptr;

  static void leave_out(void* data, std::int64_t row, float* z) noexcept {
    const TileAtHand& t = *static_cast<const TileAtHand*>(data);
    t.walk->leave_out(t.first + row, t.column, t.columns, z);
  }
  static std::uint16_t* keep(void* data, std::int64_t row, float max) noexcept {
    const TileAtHand& t = *static_cast<const TileAtHand*>(data);
    t.walk->kept_max(t.first + row, t.column) = max;
    return t.walk->kept_row<std::uint16_t>(t.first + row, t.column);
  }
  static void add_odd(void* data, std::int64_t row, const float* z) noexcept {
    const TileAtHand& t = *static_cast<const TileAtHand*>(data);
    const RowState state = t.state(row, z);
    RunningRow& r = t.running[row];
    const RowState odd = merge({.max = r.odd_max, .sum = r.odd_sum, .label_logit = r.odd_target}, 0,
                               {.max = state.max, .sum = state.sum, .label_logit = state.label_logit}, 0);
    r.odd_max = odd.max;
    r.odd_sum = odd.sum;
    r.odd_target = odd.label_logit;
    t.add(row, state);
    t.keep_floats(row, z);
  }
  static void also(void* data, std::int64_t row, const float* z) noexcept {
    const TileAtHand& t = *static_cast<const TileAtHand*>(data);
    if (t.walk->job_.sums != kNoSums) t.add(row, t.state(row, z));
    t.keep_floats(row, z);
  }

 private:
  RowState state(std::int64_t row, const float* z) const { return walk->tile_state(first + row, column, columns, z, scratch); }
  void add(std::int64_t row, const RowState& state) const {
    walk->add_to_slice(first + row, slice, column, columns, state, weight_before, weight);
  }
  void keep_floats(std::int64_t row, const float* z) const {
    const std::int64_t u = first + row;
    if (walk->has_words_ || !walk->is_kept(u, column)) return;
    std::memcpy(walk->kept_row<float>(u, column), z, static_cast<std::size_t>(columns) * sizeof(float));
  }
};

SoftmaxRows LinearWalk::softmax_of(float* scratch, std::int64_t first, std::int64_t last) const {
  const LogitTransform& t = job_.transform;
  SoftmaxRows job;
  job.b = scratch;
  job.depth = z_depth_;
  job.z = after_head(scratch);
  job.z_stride = z_beside_stride(shape(), matmul());
  job.running = reinterpret_cast<RunningRow*>(job.z + z_beside_floats(shape(), matmul()));
  job.exponent_scale = t.exponent_scale;
  job.inverse_scale = 1 / t.exponent_scale;
  job.exact_exponent_scale = t.exact_exponent_scale;
  job.reference_unit = t.exact_exponent_scale / static_cast<double>(t.exponent_scale);
  job.steps_per_unit = steps_per_unit_;
  job.odd = &TileAtHand::add_odd;
  if (job_.allowed) job.leave_out = &TileAtHand::leave_out;
  const bool keeps_floats = !has_words_ && (kept_in_dhead_.rows > 0 || kept_columns_ > 0);
  if (job_.sums != kNoSums || keeps_floats) job.also = &TileAtHand::also;
  for (std::int64_t u = first; u < last; ++u) {
    job.running[u - first] = RunningRow{};
    job.running[u - first].target_column = job_.label_columns[rows_[u]];
  }
  return job;
}

// A slice of the vocabulary for a group of rows: those whose words dhead holds first, then the others.
void LinearWalk::forward_tiles_task(float* scratch, std::int64_t first, std::int64_t last, std::int64_t slice) const {
  const SoftmaxRows all = softmax_of(scratch, first, last);
  TileAtHand at{.walk = this, .slice = slice, .scratch = scratch};
  const std::int64_t slice_end = std::min(shape().columns, (slice + 1) * slice_columns_);
  const std::int64_t in_dhead = std::clamp(first_row_ + kept_in_dhead_.rows, first, last);
  for (at.column = slice * slice_columns_; at.column < slice_end; at.column += shape().tile) {
    at.columns = std::min(shape().tile, slice_end - at.column);
    at.weight_before += at.weight;
    at.weight = weight_of(at.column, at.columns);
    if (!has_z(first, last, at.column, at.columns)) {
      skip(first, last, at.column);
      continue;
    }
    pack_tile_of_head(at.column, at.columns, scratch);
    for (const auto& [begin, end] : {std::pair{first, in_dhead}, std::pair{in_dhead, last}}) {
      if (begin == end) continue;
      at.first = begin;
      at.running = all.running + (begin - first);
      SoftmaxRows rows = all;
      rows.a = packed_rows(begin);
      rows.rows = end - begin;
      rows.column = at.column;
      rows.columns = at.columns;
      rows.running = at.running;
      rows.context = &at;
      if (has_words_ && is_kept(begin, at.column)) rows.keep = &TileAtHand::keep;
      matmul().tiles->multiply_softmax(rows);
    }
  }
  for (std::int64_t u = first; u < last; ++u) add_running(all.running[u - first], all, states_[u * kSlices + slice]);
}

// A slice's softmax. Where more is wanted, `state` has it too, in other bits: those of all tiles merged.
void LinearWalk::add_running(const RunningRow& running, const SoftmaxRows& job, RowState& state) const {
  RowState in_reach;
  in_reach.max = job_.transform.scale * running.max;
  in_reach.label_logit = job_.transform.scale * running.target;
  if (running.sum != 0) {
    const double reference = job.reference_unit * static_cast<double>(running.reference);
    const double max = LogitTransform::kExactLog2E * static_cast<double>(in_reach.max);
    in_reach.sum = static_cast<float>(running.sum * __builtin_exp2(reference - max));
  }
  const RowState all = merge({.max = running.odd_max, .sum = running.odd_sum, .label_logit = running.odd_target}, 0, in_reach, 0);
  state.max = all.max;
  state.sum = all.sum;
  state.label_logit = all.label_logit;
}

}  // namespace tileloss::impl::cpu
