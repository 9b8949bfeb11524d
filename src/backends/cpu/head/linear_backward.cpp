// The backward of lm_head.h: dz a chunk of the vocabulary at a time, and the two products made of it.
#include <cstring>
#include <limits>

#include "backends/cpu/head/linear_walk.h"

namespace tileloss::impl::cpu {
namespace {

// Zeros in rows [first, last) of [R, width]. Whole rows at once where they lie together: a head of 151936 x 1536 element by
// element takes 0.3 s, as long as a step of some rows.
void write_zeros(const OutputMatrix& m, std::int64_t width, std::int64_t first, std::int64_t last) {
  const std::int64_t bytes = m.storage == kStorageFloat32 ? 4 : 2;
  if (m.col_stride == 1) {
    for (std::int64_t i = first; i < last; ++i) {
      std::memset(static_cast<char*>(m.data) + i * m.row_stride * bytes, 0, static_cast<std::size_t>(width * bytes));
    }
    return;
  }
  for (std::int64_t h = 0; h < width; ++h) {
    for (std::int64_t i = first; i < last; ++i) store_element(m.storage, m.data, i * m.row_stride + h * m.col_stride, 0);
  }
}

}  // namespace

// One row's columns of a tile: from z, which may lie where dz goes, dL/dz.
void LinearWalk::dz_row(std::int64_t u, std::int64_t column, std::int64_t columns, const float* z, float* dz,
                        float* scratch) const {
  const RowGradient& g = gradients_[u];
  BackwardRow row = make_backward(g, job_.transform);
  row.x = z;
  row.dx = dz;
  row.columns = columns;
  row.vocab_block = shape().tile;
  row.operands = operands(scratch);
  row.class_weights = weights_from(column);
  const std::int64_t target = job_.label_columns[rows_[u]] - column;
  const bool has_target = target >= 0 && target < columns;
  double at_target = 0;
  if (has_target) {
    const double weight = row.class_weights == nullptr ? 1 : static_cast<double>(row.class_weights[target]);
    at_target = label_gradient(g, weight) * job_.transform.derivative(z[target]);
  }
  if (job_.allowed && !allowed(u, column, columns).is_full()) {
    const AllowedSet set = allowed(u, column, columns);
    float *const beside = side_by_side(scratch), *const weights = beside + shape().tile;
    row.x = row.dx = beside;
    row.columns = set.gather(sizeof(float), z, beside);
    if (row.class_weights != nullptr) {
      set.gather(sizeof(float), row.class_weights, weights);
      row.class_weights = weights;
    }
    if (row.columns > 0) job_.kernels->run[kStorageFloat32](nullptr, &row);
    set.scatter(sizeof(float), beside, dz);
    if (g.stats.classes.count == 0) std::fill_n(dz, columns, std::numeric_limits<float>::quiet_NaN());
  } else {
    job_.kernels->run[kStorageFloat32](nullptr, &row);
  }
  if (has_target) dz[target] = static_cast<float>(at_target);
  set_labels(u, column, columns, [&](std::int64_t j, float dx) { dz[j] = dx; });
}

bool LinearWalk::has_dz(std::int64_t first, std::int64_t last, std::int64_t column, std::int64_t columns) const {
  return has_z(first, last, column, columns) || std::find(empty_ + first, empty_ + last, 1) != empty_ + last;
}

// A tile of dhead to which no row of this row chunk adds anything.
void LinearWalk::zero_dhead(const Part& part, std::int64_t begin, std::int64_t column, std::int64_t columns) const {
  const std::int64_t width = part.shape.width;
  if (begin > 0) return;
  if (shape().sums_dhead(part.shape)) {
    std::fill_n(piece<float>(part.layout.dhead) + column * width, columns * width, 0.0F);
  } else if (!job_.accumulate) {
    write_zeros(part.operands.dhead, width, column, column + columns);
  }
}

// Whether a chunk of the vocabulary adds nothing to these rows' dhidden. `how`, from kAdd: kReplace for the first that does;
// where none has, the last leaves zeros.
bool LinearWalk::skips_dhidden(const Part& part, std::int64_t first, std::int64_t rows, std::int64_t h, std::int64_t width,
                               std::int64_t chunk, std::int64_t chunk_columns, Store& how) const {
  if (!job_.allowed) return false;
  const bool is_first = chunk == 0 || !has_dz(first, first + rows, 0, chunk);
  if (is_first) how = Store::kReplace;
  if (has_dz(first, first + rows, chunk, chunk_columns)) return false;
  if (!is_first || chunk + chunk_columns < shape().columns) return true;
  float* const sums = piece<float>(part.layout.dhidden) + first * part.shape.width + h;
  for (std::int64_t r = 0; r < rows; ++r) std::fill_n(sums + r * part.shape.width, width, 0.0F);
  return true;
}

// z of a tile from 16 bits. One that was computed again takes the same way, through `words`.
void LinearWalk::restore_row(std::int64_t u, std::int64_t column, std::int64_t columns, std::uint16_t* words, float* z) const {
  const bool is_there = is_kept(u, column);
  if (!is_there) leave_out(u, column, columns, z);
  const float max = is_there ? kept_max(u, column) : to_words(z, columns, words);
  const std::uint16_t* from = is_there ? kept_row<std::uint16_t>(u, column) : words;
  job_.kernels->kept_logits.restore(from, columns, max, steps_per_unit_, z);
}

void LinearWalk::dz_task(float* scratch, std::int64_t begin, std::int64_t end, std::int64_t column, std::int64_t columns,
                         float* dz) const {
  if (shape().needs_target_sweep()) {
    for (std::int64_t u = begin; u < end; ++u) load_dz(u, column, columns, dz + (u - begin) * chunk_columns_);
    return;
  }
  float* const behind = after_head(scratch);
  auto* const words = reinterpret_cast<std::uint16_t*>(behind + (shape().bias ? shape().tile : 0));
  const float* bias = nullptr;
  const auto clear = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t u = first; u < last; ++u) std::fill_n(dz + (u - begin) * chunk_columns_, columns, 0.0F);
  };
  if (!has_dz(begin, end, column, columns)) return clear(begin, end);
  if (!(is_kept(begin, column) && is_kept(end - 1, column))) {
    pack_tile_of_head(column, columns, scratch);
    bias = tile_of_bias(column, columns, behind);
  }
  for (std::int64_t u = begin; u < end; u += row_tile(matmul())) {
    const std::int64_t rows = std::min(row_tile(matmul()), end - u);
    float* tile = dz + (u - begin) * chunk_columns_;
    if (!has_dz(u, u + rows, column, columns)) {
      clear(u, u + rows);
      continue;
    }
    const bool is_there = is_kept(u, column);
    if (!is_there) multiply_z(scratch, bias, u, rows, columns, tile, chunk_columns_);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* row = tile + r * chunk_columns_;
      if (has_words_) restore_row(u + r, column, columns, words, row);
      dz_row(u + r, column, columns, is_there && !has_words_ ? kept_row<float>(u + r, column) : row, row, scratch);
    }
  }
}

// The chunk of the head across, for dhidden: panels of columns of the hidden size, along the vocabulary. A task is a part of the
// head as it lies in memory: classes of an [V,H] head, columns of the hidden size of an [H,V] one.
std::int64_t LinearWalk::pack_head_tasks(const Part& part, std::int64_t chunk_columns) const {
  if (!part.shape.dhidden) return 0;
  return part.packs_by_classes() ? ceil_div(chunk_columns, shape().tile)
                                 : ceil_div(part.shape.width, kPanelsATask * matmul().b_panel);
}

void LinearWalk::pack_head_task(const Part& part, std::int64_t task, std::int64_t chunk, std::int64_t chunk_columns) const {
  const Operand& head = part.operands.head;
  const Operand across{head.data, head.storage, head.k_stride, head.row_stride};
  const std::int64_t words = matmul().words(chunk_columns, shape().compute), width = part.shape.width;
  float* const out = piece<float>(part.layout.packed_head);
  if (part.packs_by_classes()) {
    const std::int64_t v = task * shape().tile, classes = std::min(shape().tile, chunk_columns - v);
    const std::int64_t first = matmul().words(v, shape().compute);
    return matmul().pack_b_part(across, 0, width, chunk + v, classes, shape().compute, out, first, words);
  }
  const std::int64_t panels = kPanelsATask * matmul().b_panel, h = task * panels;
  matmul().pack_b(across, h, std::min(panels, width - h), chunk, chunk_columns, shape().compute, out + h * words);
}

// A row chunk's hidden across, for dhead: columns of the hidden size, along the rows, cut every kAcrossDepth.
void LinearWalk::pack_across(const Part& part, std::int64_t begin, std::int64_t end) {
  if (!part.shape.dhead) return;
  const std::int64_t panels = kPanelsATask * across_panel(part.shape, matmul()), tasks = ceil_div(part.shape.width, panels);
  const PackFunction pack = part.shape.dhead_across ? matmul().pack_a : matmul().pack_b;
  parallel(tasks * ceil_div(end - begin, kAcrossDepth), [&](std::int64_t slot, std::int64_t task) {
    const std::int64_t block = task / tasks, k = block * kAcrossDepth, h = task % tasks * panels;
    const std::int64_t depth = std::min(kAcrossDepth, end - begin - k), columns = std::min(panels, part.shape.width - h);
    const Operand x = rows_in_use(part, begin + k, depth, h, columns, scratch(slot));
    float* out = piece<float>(part.layout.packed_across) + block * across_block(shape(), part.shape, matmul()) +
                 h * matmul().words(depth, shape().compute);
    pack({x.data, x.storage, x.k_stride, x.row_stride}, 0, columns, 0, depth, shape().compute, out);
  });
}

// dhead's rows of a tile: into the output itself, or into sums of the whole chunk's or of this task's, which are rounded into the
// output a few rows at a time, while they are in L2.
void LinearWalk::dhead_task(const Part& part, float* scratch, std::int64_t begin, std::int64_t end, std::int64_t column,
                            std::int64_t columns, const float* dz) const {
  const std::int64_t width = part.shape.width;
  const OutputMatrix& dhead = part.operands.dhead;
  if (!has_dz(begin, end, column, columns)) return zero_dhead(part, begin, column, columns);
  const bool sums_up = shape().sums_dhead(part.shape), is_rounded = !part.shape.dhead_in_place && !sums_up;
  float* sums = scratch + dz_block(shape(), part.shape, matmul());
  std::int64_t stride = width, rows_at_once = columns;
  bool accumulate = begin > 0;
  Store alone = Store::kReplace;  // in the only product of these rows
  if (part.shape.dhead_in_place) {
    const std::int64_t along = part.shape.dhead_across ? 1 : dhead.row_stride;
    sums = static_cast<float*>(dhead.data) + column * along;
    stride = part.shape.dhead_across ? dhead.col_stride : along;
    accumulate = accumulate || job_.accumulate;
    alone = Store::kStream;
  } else if (sums_up) {
    sums = piece<float>(part.layout.dhead) + column * width;
  } else if (end - begin <= kAcrossDepth) {
    rows_at_once = kRoundedRows;
  }
  const Operand down{dz, kStorageFloat32, 1, chunk_columns_};
  for (std::int64_t k = 0; k < end - begin; k += kAcrossDepth) {
    const std::int64_t depth = std::min(kAcrossDepth, end - begin - k), words = matmul().words(depth, shape().compute);
    const bool is_last = k + depth == end - begin;
    const float* across =
        piece<float>(part.layout.packed_across) + k / kAcrossDepth * across_block(shape(), part.shape, matmul());
    const Store how = accumulate || k > 0 ? Store::kAdd : is_last ? alone : Store::kReplace;
    if (part.shape.dhead_across) {
      matmul().pack_b(down, 0, columns, k, depth, shape().compute, scratch);
      matmul().multiply(across, scratch, width, columns, depth, shape().compute, sums, stride, how);
      continue;
    }
    matmul().pack_a(down, 0, columns, k, depth, shape().compute, scratch);
    for (std::int64_t row = 0; row < columns; row += rows_at_once) {
      const std::int64_t rows = std::min(rows_at_once, columns - row);
      matmul().multiply(scratch + row * words, across, rows, width, depth, shape().compute, sums, stride, how);
      if (is_rounded && is_last) matmul().write(sums, width, rows, width, dhead, column + row, job_.accumulate);
    }
  }
}

void LinearWalk::dbias_task(float* scratch, std::int64_t begin, std::int64_t end, std::int64_t column, std::int64_t columns,
                            const float* dz) const {
  auto* sums = reinterpret_cast<double*>(scratch);
  std::fill(sums, sums + columns, 0.0);
  for (std::int64_t u = begin; u < end; ++u) {
    const float* row = dz + (u - begin) * chunk_columns_;
    for (std::int64_t j = 0; j < columns; ++j) sums[j] += static_cast<double>(row[j]);
  }
  const bool is_partial = shape().sums_dbias();
  OutputMatrix out = job_.dbias;
  if (is_partial) out = {piece<float>(job_.layout.dbias), kStorageFloat32, 1};
  const bool adds = is_partial ? begin > 0 : job_.accumulate;
  for (std::int64_t j = 0; j < columns; ++j) {
    const std::int64_t at = (column + j) * out.row_stride;
    const double before = adds ? static_cast<double>(load_element(out.storage, out.data, at)) : 0;
    store_element(out.storage, out.data, at, static_cast<float>(before + sums[j]));
  }
}

// Columns [h, h + width) of dhidden's rows in use [first, first + rows). `packs`: dz, which is in `scratch` else, of a call
// before for the same rows and chunk: by these alone skips_dhidden() decides.
void LinearWalk::dhidden_task(const Part& part, float* scratch, bool packs, std::int64_t first, std::int64_t rows, std::int64_t h,
                              std::int64_t width, std::int64_t chunk, std::int64_t chunk_columns, const float* dz) const {
  Store how = chunk > 0 ? Store::kAdd : Store::kReplace;
  if (skips_dhidden(part, first, rows, h, width, chunk, chunk_columns, how)) return;
  const Operand along{dz, kStorageFloat32, chunk_columns_, 1};
  if (packs) matmul().pack_a(along, 0, rows, 0, chunk_columns, shape().compute, scratch);
  const float* head = piece<float>(part.layout.packed_head) + h * matmul().words(chunk_columns, shape().compute);
  float* sums = piece<float>(part.layout.dhidden) + first * part.shape.width + h;
  matmul().multiply(scratch, head, rows, width, chunk_columns, shape().compute, sums, part.shape.width, how);
}

void LinearWalk::backward(std::int64_t begin, std::int64_t end) {
  if (packs_dz(shape(), matmul())) return backward_amx(begin, end);
  first_row_ = begin;
  for (const Part& part : parts()) pack_across(part, begin, end);
  const std::int64_t tile = shape().tile, group = row_group(matmul()), row_step = row_tile(matmul());
  const std::int64_t groups = ceil_div(end - begin, group), row_tiles = ceil_div(end - begin, row_step);
  const auto width_of_task = [&](const Part& p) { return dhidden_part(p.shape, matmul(), row_tiles); };
  const auto dhidden_tasks = [&](const Part& p) {
    return makes_dhidden_alone(p) ? row_tiles * ceil_div(p.shape.width, width_of_task(p)) : 0;
  };
  for (std::int64_t chunk = 0; chunk < shape().columns; chunk += chunk_columns_) {
    const std::int64_t columns = std::min(chunk_columns_, shape().columns - chunk), tiles = ceil_div(columns, tile);
    const bool is_nothing = !has_dz(begin, end, chunk, columns);
    const auto pack_tasks = [&](const Part& part) { return is_nothing ? 0 : pack_head_tasks(part, columns); };
    const std::int64_t dz_tasks = is_nothing && !shape().dbias ? 0 : tiles * groups;
    float* dz = piece<float>(job_.layout.dz);
    const auto tile_columns = [&](std::int64_t t) { return std::min(tile, columns - t * tile); };
    parallel(dz_tasks + all_tasks(pack_tasks), [&](std::int64_t slot, std::int64_t task) {
      if (task >= dz_tasks) {
        const Part& part = *part_of(task -= dz_tasks, pack_tasks);
        return pack_head_task(part, task, chunk, columns);
      }
      const std::int64_t t = task % tiles, first = begin + task / tiles * group;
      dz_task(scratch(slot), first, std::min(end, first + group), chunk + t * tile, tile_columns(t),
              dz + (first - begin) * chunk_columns_ + t * tile);
    });
    parallel(all_tasks(dhidden_tasks) + tiles, [&](std::int64_t slot, std::int64_t task) {  // the longer ones first
      if (const Part* const part = part_of(task, dhidden_tasks)) {
        const std::int64_t width = width_of_task(*part), sets = ceil_div(part->shape.width, width);
        const std::int64_t first = begin + task / sets * row_step, h = task % sets * width,
                           rows = std::min(row_step, end - first);
        const float* const dz_here = dz + (first - begin) * chunk_columns_;
        dhidden_task(*part, scratch(slot), true, first, rows, h, std::min(width, part->shape.width - h), chunk, columns, dz_here);
        if (const Part* const few = joined_to(*part, h + width))
          dhidden_task(*few, scratch(slot), false, first, rows, 0, few->shape.width, chunk, columns, dz_here);
        return;
      }
      const std::int64_t t = task, column = chunk + t * tile;
      for (const Part& part : parts()) {
        if (part.shape.dhead) dhead_task(part, scratch(slot), begin, end, column, tile_columns(t), dz + t * tile);
      }
      if (shape().dbias) dbias_task(scratch(slot), begin, end, column, tile_columns(t), dz + t * tile);
    });
  }
}

void LinearWalk::finish() {
  const bool nothing_used = used_ == 0;
  for (const Part& part : parts()) {
    if (!part.shape.dhidden) continue;
    const std::int64_t width = part.shape.width;
    const OutputMatrix& dhidden = part.operands.dhidden;
    parallel(ceil_div(shape().rows, kRowTile), [&](std::int64_t, std::int64_t task) {
      const std::int64_t last = std::min(shape().rows, (task + 1) * kRowTile);
      std::int64_t u = std::lower_bound(rows_, rows_ + used_, task * kRowTile) - rows_;
      for (std::int64_t i = task * kRowTile; i < last; ++i) {
        if (u < used_ && rows_[u] == i) {
          matmul().write(piece<float>(part.layout.dhidden) + u * width, width, 1, width, dhidden, i, false);
          ++u;
          continue;
        }
        write_zeros(dhidden, width, i, i + 1);
      }
    });
  }
  for (const Part& part : parts()) {
    if (!shape().sums_dhead(part.shape) || nothing_used) continue;
    const std::int64_t width = part.shape.width;
    parallel(ceil_div(shape().columns, shape().tile), [&](std::int64_t, std::int64_t task) {
      const std::int64_t column = task * shape().tile, columns = std::min(shape().tile, shape().columns - column);
      matmul().write(piece<float>(part.layout.dhead) + column * width, width, columns, width, part.operands.dhead, column,
                     job_.accumulate);
    });
  }
  if (shape().sums_dbias() && !nothing_used) {
    const float* sums = piece<float>(job_.layout.dbias);
    for (std::int64_t v = 0; v < shape().columns; ++v) {
      const std::int64_t at = v * job_.dbias.row_stride;
      const float before = job_.accumulate ? load_element(job_.dbias.storage, job_.dbias.data, at) : 0;
      store_element(job_.dbias.storage, job_.dbias.data, at, before + sums[v]);
    }
  }
  if (job_.accumulate) return;
  const std::int64_t first = nothing_used ? 0 : shape().columns;  // padding, or everything when no row is in use
  parallel(ceil_div(shape().total_columns - first, shape().tile), [&](std::int64_t, std::int64_t task) {
    const std::int64_t begin = first + task * shape().tile, end = std::min(begin + shape().tile, shape().total_columns);
    for (const Part& part : parts()) {
      if (part.shape.dhead) write_zeros(part.operands.dhead, part.shape.width, begin, end);
    }
    if (shape().dbias) write_zeros(job_.dbias, 1, begin, end);
  });
}

}  // namespace tileloss::impl::cpu
