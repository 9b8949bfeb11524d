// The backward of lm_head.h where products are in tile registers (backends/cpu/amx/matmul_tiles.h): dz is packed as soon as it
// is made, along the chunk for dhidden and down its columns for dhead, from words in one kernel
// (backends/cpu/amx/tile_gradient.h); the products then go over sets of columns of the hidden size, whose right operand stays
// in L2 while all of the chunk's dz passes.
#include "backends/cpu/amx/tile_table.h"
#include "backends/cpu/head/linear_walk.h"
#include "core/number_formats.h"

namespace tileloss::impl::cpu {

// ---------------------------------------------------------------------------------------------------------------- operands

float* LinearWalk::dz_along(const DzChunk& c, const DzBlock& b) const {
  return piece<float>(job_.layout.dz) + (b.first - c.begin) * matmul().words(c.columns, shape().compute) +
         matmul().words(b.column - c.chunk, shape().compute) * matmul().a_panel;
}

float* LinearWalk::dz_down(const DzChunk& c, const DzBlock& b) const {
  const std::int64_t row = b.first - c.begin, block = row / kAcrossDepth, k = row % kAcrossDepth;
  return piece<float>(job_.layout.dz) + dz_along_floats(shape(), matmul()) + block * dz_down_block(shape(), matmul()) +
         (b.column - c.chunk) * dz_down_words(shape(), matmul()) + matmul().words(k, shape().compute) * matmul().a_panel;
}

void LinearWalk::pack_dz(const DzChunk& c, const DzBlock& b, const float* dz) const {
  const std::int64_t panel = matmul().a_panel, tile = shape().tile, words = dz_down_words(shape(), matmul());
  if (shape().dhidden()) {
    matmul().pack_a({dz, kStorageFloat32, tile, 1}, 0, b.rows, 0, b.columns, shape().compute, dz_along(c, b));
  }
  if (!shape().dhead()) return;
  for (std::int64_t v = 0; v < b.columns; v += panel) {
    matmul().pack_a({dz + v, kStorageFloat32, 1, tile}, 0, std::min(panel, b.columns - v), 0, b.rows, shape().compute,
                    dz_down(c, b) + v * words);
  }
}

// ---------------------------------------------------------------------------------------------------------------------- dz

// What makes dz of a row's words: dz = factor * 2^(exponent + words), as GradientTiles has it. False if coefficients or logits
// are out of range for that; zeros then.
bool LinearWalk::words_to_dz(std::int64_t u, float max, float& factor, float& exponent) const {
  constexpr double kFar = 1e30;  // in float32's range, with room
  const RowGradient& g = gradients_[u];
  const double scale = job_.transform.scale, p = g.coefficients.prob() / g.stats.sum * scale;
  const double behind = scale * static_cast<double>(max) - static_cast<double>(g.stats.max);
  factor = 0;
  exponent = -1000;
  if (!(p > -kFar && p < kFar)) return false;
  if (max == -kInfinity) return true;  // words are 0
  if (!(behind <= 1 && behind > -kFar)) return false;
  factor = static_cast<float>(p);
  exponent = static_cast<float>(behind * LogitTransform::kExactLog2E - 65535 * kExponentOfWord);
  return true;
}

// One element of the packed block. Row and column are the block's.
void LinearWalk::put_dz(const GradientTiles& g, std::int64_t row, std::int64_t column, float dz) const {
  const auto value = from_float<Bfloat16>(dz);
  const std::int64_t tiles = column / kTileDepth, rest = column % kTileDepth;
  if (g.along != nullptr) {
    reinterpret_cast<Bfloat16*>(g.along + tiles * 2 * kTileWords + row * kTileRows)[rest] = value;
  }
  if (g.down != nullptr) reinterpret_cast<Bfloat16*>(g.down + tiles * g.down_stride + rest * kTileRows)[row] = value;
}

// dz of a block whose z are kept in words or, where they are not, are at z and take the way through `words`. A row out of the
// kernel's range is done as everywhere else, by itself: the rows beside it keep their bits.
void LinearWalk::dz_from_words(const DzChunk& c, const DzBlock& b, float* z, std::uint16_t* words, float* scratch) const {
  const std::int64_t tile = shape().tile;
  const bool is_there = is_kept(b.first, b.column);
  bool is_odd[kGradientRows];
  float maxima[kGradientRows];
  GradientTiles g;
  g.rows = b.rows;
  g.columns = ceil_div(b.columns, kTileDepth) * kTileDepth;
  g.exponent_of_word = static_cast<float>(kExponentOfWord);
  if (shape().dhidden()) g.along = dz_along(c, b);
  if (shape().dhead()) g.down = dz_down(c, b);
  g.down_stride = matmul().a_panel * dz_down_words(shape(), matmul());
  for (std::int64_t r = 0; r < b.rows; ++r) {
    const std::int64_t u = b.first + r;
    if (!is_there) leave_out(u, b.column, b.columns, z + r * tile);
    maxima[r] = is_there ? kept_max(u, b.column) : to_words(z + r * tile, b.columns, words + r * tile);
    g.words[r] = is_there ? kept_row<std::uint16_t>(u, b.column) : words + r * tile;
    is_odd[r] = !words_to_dz(u, maxima[r], g.factor[r], g.exponent[r]);
  }
  matmul().tiles->gradient(g);
  for (std::int64_t r = 0; r < b.rows; ++r) {
    const std::int64_t u = b.first + r, target = job_.label_columns[rows_[u]] - b.column;
    if (is_odd[r]) {
      float* const row = z + r * tile;
      job_.kernels->kept_logits.restore(g.words[r], b.columns, maxima[r], steps_per_unit_, row);
      dz_row(u, b.column, b.columns, row, row, scratch);
      for (std::int64_t j = 0; j < b.columns; ++j) put_dz(g, r, j, row[j]);
    } else if (target >= 0 && target < b.columns) {
      const double weight = job_.class_weights == nullptr ? 1 : static_cast<double>(job_.class_weights[b.column + target]);
      put_dz(g, r, target, static_cast<float>(label_gradient(gradients_[u], weight) * job_.transform.derivative(0)));
    }
  }
}

void LinearWalk::dz_from_kept(const DzChunk& c, const DzBlock& b, float* dz) const {
  for (std::int64_t r = 0; r < b.rows; ++r) load_dz(b.first + r, b.column, b.columns, dz + r * shape().tile);
  pack_dz(c, b, dz);
}

void LinearWalk::dz_from_floats(const DzChunk& c, const DzBlock& b, float* z, float* scratch) const {
  const bool is_there = is_kept(b.first, b.column);
  for (std::int64_t r = 0; r < b.rows; ++r) {
    float* const row = z + r * shape().tile;
    dz_row(b.first + r, b.column, b.columns, is_there ? kept_row<float>(b.first + r, b.column) : row, row, scratch);
  }
  pack_dz(c, b, z);
}

// Some rows of a tile of columns, a panel of them at a time.
void LinearWalk::dz_tiles_task(float* scratch, const DzChunk& c, const DzBlock& rows) const {
  const std::int64_t tile = shape().tile, last = rows.first + rows.rows;
  float* const behind = after_head(scratch);
  float* const z = behind + (shape().bias ? tile : 0);
  const float* bias = nullptr;
  if (!shape().needs_target_sweep() && !(is_kept(rows.first, rows.column) && is_kept(last - 1, rows.column)) &&
      has_dz(rows.first, last, rows.column, rows.columns)) {
    pack_tile_of_head(rows.column, rows.columns, scratch);
    bias = tile_of_bias(rows.column, rows.columns, behind);
  }
  DzBlock b = rows;
  for (; b.first < last; b.first += kDzRows) {
    b.rows = std::min(kDzRows, last - b.first);
    if (shape().needs_target_sweep()) {
      dz_from_kept(c, b, z);
      continue;
    }
    if (!has_dz(b.first, b.first + b.rows, b.column, b.columns)) {
      std::fill_n(z, b.rows * tile, 0.0F);
      pack_dz(c, b, z);
      continue;
    }
    if (!is_kept(b.first, b.column)) multiply_z(scratch, bias, b.first, b.rows, b.columns, z, tile);
    if (has_words_) {
      dz_from_words(c, b, z, reinterpret_cast<std::uint16_t*>(z + kDzRows * tile), scratch);
    } else {
      dz_from_floats(c, b, z, scratch);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------- products

// The product for some rows of the chunk's part of dhead, `row` on, and columns [h, h + width). A last, shorter block of rows
// along k has its panels as far apart as the others', so that they are multiplied one by one.
void LinearWalk::multiply_dhead(const Part& part, const DzChunk& c, std::int64_t row, std::int64_t rows, std::int64_t h,
                                std::int64_t width, bool adds, Store alone, float* to, std::int64_t stride) const {
  const std::int64_t words = dz_down_words(shape(), matmul()), panel = matmul().a_panel, all_depth = c.end - c.begin;
  const float* const down = piece<float>(job_.layout.dz) + dz_along_floats(shape(), matmul()) + row * words;
  for (std::int64_t k = 0; k < all_depth; k += kAcrossDepth) {
    const std::int64_t depth = std::min(kAcrossDepth, all_depth - k), block = k / kAcrossDepth;
    const std::int64_t words_here = matmul().words(depth, shape().compute), at_once = words_here == words ? rows : panel;
    const float* const left = down + block * dz_down_block(shape(), matmul());
    const float* const right =
        piece<float>(part.layout.packed_across) + block * across_block(shape(), part.shape, matmul()) + h * words_here;
    const Store how = adds || k > 0 ? Store::kAdd : k + depth == all_depth ? alone : Store::kReplace;
    for (std::int64_t i = 0; i < rows; i += at_once) {
      matmul().multiply(left + i * words, right, std::min(at_once, rows - i), width, depth, shape().compute, to + i * stride,
                        stride, how);
    }
  }
}

// Rows [first, first + rows) of the chunk's part of dhead, columns [h, h + width): into the output itself, into the whole chunk's
// sums, or by way of a few rows' sums, which are rounded while they are in L2.
void LinearWalk::dhead_set(const Part& part, float* scratch, const DzChunk& c, std::int64_t first, std::int64_t rows,
                           std::int64_t h, std::int64_t width) const {
  const std::int64_t column = c.chunk + first;
  if (!has_dz(c.begin, c.end, column, rows)) {
    if (h == 0) zero_dhead(part, c.begin, column, rows);
    return;
  }
  if (part.shape.dhead_in_place) {
    const std::int64_t stride = part.operands.dhead.row_stride;
    float* const to = static_cast<float*>(part.operands.dhead.data) + column * stride + h;
    return multiply_dhead(part, c, first, rows, h, width, c.begin > 0 || job_.accumulate, Store::kStream, to, stride);
  }
  if (shape().sums_dhead(part.shape)) {
    float* const to = piece<float>(part.layout.dhead) + column * part.shape.width + h;
    return multiply_dhead(part, c, first, rows, h, width, c.begin > 0, Store::kReplace, to, part.shape.width);
  }
  OutputMatrix out = part.operands.dhead;
  out.data = static_cast<std::byte*>(out.data) + h * out.col_stride * kElementBytes[out.storage];
  for (std::int64_t row = 0; row < rows; row += kRoundedRows) {
    const std::int64_t n = std::min(kRoundedRows, rows - row);
    multiply_dhead(part, c, first + row, n, h, width, false, Store::kReplace, scratch, width);
    matmul().write(scratch, width, n, width, out, column + row, job_.accumulate);
  }
}

// Columns [h, h + width) of dhidden's rows in use [first, first + rows).
void LinearWalk::dhidden_set(const Part& part, const DzChunk& c, std::int64_t first, std::int64_t rows, std::int64_t h,
                             std::int64_t width) const {
  Store how = c.chunk > 0 ? Store::kAdd : Store::kReplace;
  if (skips_dhidden(part, first, rows, h, width, c.chunk, c.columns, how)) return;
  const std::int64_t words = matmul().words(c.columns, shape().compute);
  const float* const left = piece<float>(job_.layout.dz) + (first - c.begin) * words;
  const float* const right = piece<float>(part.layout.packed_head) + h * words;
  float* const sums = piece<float>(part.layout.dhidden) + first * part.shape.width + h;
  matmul().multiply(left, right, rows, width, c.columns, shape().compute, sums, part.shape.width, how);
}

void LinearWalk::multiply_sets(const DzChunk& c) {
  const std::int64_t head_set = kHeadSetPanels * matmul().b_panel, hidden_set = kHiddenSetPanels * matmul().b_panel;
  const std::int64_t row_parts = ceil_div(c.end - c.begin, kSetRows), head_parts = ceil_div(c.columns, kSetRows);
  const auto hidden_tasks = [&](const Part& p) {
    return makes_dhidden_alone(p) ? ceil_div(p.shape.width, hidden_set) * row_parts : 0;
  };
  const auto head_tasks = [&](const Part& p) { return p.shape.dhead ? ceil_div(p.shape.width, head_set) * head_parts : 0; };
  parallel(all_tasks(hidden_tasks) + all_tasks(head_tasks), [&](std::int64_t slot, std::int64_t task) {  // the longer ones first
    if (const Part* const part = part_of(task, hidden_tasks)) {
      const std::int64_t h = task / row_parts * hidden_set, width = std::min(hidden_set, part->shape.width - h);
      const std::int64_t begin = c.begin + task % row_parts * kSetRows, end = std::min(begin + kSetRows, c.end);
      const Part* const few = joined_to(*part, h + width);
      for (std::int64_t first = begin, step = few != nullptr ? kJoinedRows : kSetRows; first < end; first += step) {
        const std::int64_t rows = std::min(step, end - first);
        dhidden_set(*part, c, first, rows, h, width);
        if (few != nullptr) dhidden_set(*few, c, first, rows, 0, few->shape.width);
      }
      return;
    }
    const Part& part = *part_of(task, head_tasks);
    const std::int64_t h = task / head_parts * head_set, first = task % head_parts * kSetRows;
    dhead_set(part, scratch(slot), c, first, std::min(kSetRows, c.columns - first), h, std::min(head_set, part.shape.width - h));
  });
}

// Where z is made again, more rows share a packed tile of the head.
void LinearWalk::backward_amx(std::int64_t begin, std::int64_t end) {
  first_row_ = begin;
  for (const Part& part : parts()) pack_across(part, begin, end);
  const bool keeps_all = shape().needs_target_sweep() || kept_in_dhead_.rows >= end - begin || kept_columns_ >= shape().columns;
  const std::int64_t tile = shape().tile, group = keeps_all ? kKeptDzGroup : kRowGroup, groups = ceil_div(end - begin, group);
  for (std::int64_t chunk = 0; chunk < shape().columns; chunk += chunk_columns_) {
    const DzChunk c{begin, end, chunk, std::min(chunk_columns_, shape().columns - chunk)};
    const bool is_nothing = !has_dz(begin, end, chunk, c.columns);
    const std::int64_t tiles = ceil_div(c.columns, tile), tasks = is_nothing ? 0 : tiles * groups;
    const auto pack_tasks = [&](const Part& part) { return is_nothing ? 0 : pack_head_tasks(part, c.columns); };
    parallel(tasks + all_tasks(pack_tasks), [&](std::int64_t slot, std::int64_t task) {
      if (task >= tasks) {
        const Part& part = *part_of(task -= tasks, pack_tasks);
        return pack_head_task(part, task, chunk, c.columns);
      }
      const std::int64_t at = task / groups * tile, first = begin + task % groups * group;
      dz_tiles_task(scratch(slot), c, {first, std::min(group, end - first), chunk + at, std::min(tile, c.columns - at)});
    });
    multiply_sets(c);
  }
}

}  // namespace tileloss::impl::cpu
