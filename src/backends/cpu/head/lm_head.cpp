#include "backends/cpu/head/lm_head.h"

#include <cstring>

#include "backends/cpu/head/linear_walk.h"

namespace tileloss::impl::cpu {

LinearWalk::LinearWalk(const LinearJob& job, const tileloss_executor* executor)
    : job_(job),
      parts_{{job.shape.own, job.layout.own, job.own}, {job.shape.low_rank, job.layout.low_rank, job.low_rank}},
      executor_(executor),
      z_depth_(z_depth(job.shape, job.kernels->matmul)),
      chunk_columns_(head_chunk(job.shape)),
      slice_columns_(ceil_div(ceil_div(job.shape.columns, job.shape.tile), kSlices) * job.shape.tile),
      rows_(piece<std::int64_t>(job.layout.used_rows)),
      packed_hidden_(piece<float>(job.layout.packed_hidden)),
      states_(piece<RowState>(job.layout.states)),
      weights_(piece<double>(job.layout.weights)),
      empty_(piece<std::uint8_t>(job.layout.empty)),
      gradients_(piece<RowGradient>(job.layout.gradients)) {
  // Beyond these scales a step leaves float's range; nothing is kept then, and nothing rounded.
  const bool is_extreme = !(job.transform.scale > 0x1p-64F && job.transform.scale < 0x1p64F);
  has_words_ = shape().kept_in_words && !is_extreme;
  if (!(shape().kept_in_words && is_extreme)) {
    kept_in_dhead_ = shape().kept_in_dhead;
    kept_columns_ = shape().kept;
  }
  steps_per_unit_ = job.transform.scale * kKeptStepsPerExponent;
  for (std::int64_t i = 0; i < shape().rows; ++i) {
    if (job.label_columns[i] != kIgnoredRow) rows_[used_++] = i;
  }
  for (std::int64_t u = 0; job.allowed && u < used_; ++u) empty_[u] = allowed(u, 0, shape().columns).has_any() ? 0 : 1;
}

// Columns [h, h + columns) of hidden's rows in use [u, u + rows), as rows 0 on of a matrix. Rows that are not in use are left
// out: if there are any, the others are copied side by side into `copy`.
Operand LinearWalk::rows_in_use(const Part& part, std::int64_t u, std::int64_t rows, std::int64_t h, std::int64_t columns,
                                float* copy) const {
  const Operand& x = part.operands.hidden;
  const std::int64_t bytes = kElementBytes[x.storage];
  const auto* data = static_cast<const std::byte*>(x.data) + h * x.k_stride * bytes;
  if (used_ == shape().rows) return {data + u * x.row_stride * bytes, x.storage, x.row_stride, x.k_stride};
  auto* to = reinterpret_cast<std::byte*>(copy);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::byte* from = data + rows_[u + r] * x.row_stride * bytes;
    if (x.k_stride == 1) {
      std::memcpy(to + r * columns * bytes, from, static_cast<std::size_t>(columns * bytes));
    } else {
      for (std::int64_t k = 0; k < columns; ++k)
        std::memcpy(to + (r * columns + k) * bytes, from + k * x.k_stride * bytes, static_cast<std::size_t>(bytes));
    }
  }
  return {to, x.storage, columns, 1};
}

void LinearWalk::pack_hidden() {
  const std::int64_t tile = row_tile(matmul());
  parallel(ceil_div(used_, tile), [&](std::int64_t slot, std::int64_t task) {
    const std::int64_t u = task * tile, rows = std::min(tile, used_ - u);
    std::int64_t word = 0;
    for (const Part& part : parts()) {
      const std::int64_t width = part.shape.width;
      matmul().pack_a_part(rows_in_use(part, u, rows, 0, width, scratch(slot)), 0, rows, 0, width, shape().compute,
                           packed_rows(u), word, z_words());
      word += matmul().words(width, shape().compute);
    }
  });
}

void LinearWalk::pack_tile_of_head(std::int64_t column, std::int64_t columns, float* scratch) const {
  std::int64_t word = 0;
  for (const Part& part : parts()) {
    const std::int64_t width = part.shape.width;
    matmul().pack_b_part(part.operands.head, column, columns, 0, width, shape().compute, scratch, word, z_words());
    word += matmul().words(width, shape().compute);
  }
}

// ------------------------------------------------------------------------------------------------------------- forward

// A tile of the bias in float32, side by side; null: there is none.
const float* LinearWalk::tile_of_bias(std::int64_t column, std::int64_t columns, float* to) const {
  const Operand& bias = job_.bias;
  if (bias.data == nullptr) return nullptr;
  for (std::int64_t j = 0; j < columns; ++j) to[j] = load_element(bias.storage, bias.data, (column + j) * bias.row_stride);
  return to;
}

void LinearWalk::multiply_z(const float* head, const float* bias, std::int64_t u, std::int64_t rows, std::int64_t columns,
                            float* z, std::int64_t z_stride) const {
  matmul().multiply(packed_rows(u), head, rows, columns, z_depth_, shape().compute, z, z_stride, Store::kReplace);
  if (bias == nullptr) return;
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = z + r * z_stride;
    for (std::int64_t j = 0; j < columns; ++j) row[j] += bias[j];
  }
}

RowState LinearWalk::tile_state(std::int64_t u, std::int64_t column, std::int64_t columns, const float* z, float* scratch) const {
  ForwardRow f;
  f.x = z;
  f.columns = columns;
  const std::int64_t target = job_.label_columns[rows_[u]] - column;
  f.label_column = target >= 0 && target < columns ? target : -1;
  f.vocab_block = shape().tile;
  f.transform = job_.transform;
  f.operands = operands(scratch);
  f.sums = job_.sums;
  f.class_weights = weights_from(column);
  if (job_.allowed && !allowed(u, column, columns).is_full()) {
    const AllowedSet set = allowed(u, column, columns);
    float *const beside = side_by_side(scratch), *const weights = beside + shape().tile;
    f.x = beside;
    f.columns = set.gather(sizeof(float), z, beside);
    if (f.columns == 0) return {};
    if (f.label_column >= 0) f.label_column = set.rank(f.label_column);
    if (f.class_weights != nullptr) {
      set.gather(sizeof(float), f.class_weights, weights);
      f.class_weights = weights;
    }
    job_.kernels->run[kStorageFloat32](&f, nullptr);
    if (f.state.argmax >= 0) f.state.argmax = set.select(f.state.argmax);
  } else {
    job_.kernels->run[kStorageFloat32](&f, nullptr);
  }
  if (f.state.argmax >= 0) f.state.argmax += column;
  return f.state;
}

// A tile's state to its slice's, whose columns before this tile have the weight `weight_before`; with `allowed` each row its own.
void LinearWalk::add_to_slice(std::int64_t u, std::int64_t slice, std::int64_t column, std::int64_t columns, const RowState& tile,
                              double weight_before, double weight) const {
  RowState& state = states_[u * kSlices + slice];
  if (!job_.allowed) {
    state = merge(state, weight_before, tile, weight);
    return;
  }
  double& before = weights_[u * kSlices + slice];
  const bool is_weighted = (job_.sums & kSmoothingSum) != 0;
  const double here = is_weighted ? allowed(u, column, columns).classes(weights_from(column)).weight : 0;
  state = merge(state, before, tile, here);
  before += here;
}

bool LinearWalk::has_z(std::int64_t first, std::int64_t last, std::int64_t column, std::int64_t columns) const {
  if (!job_.allowed) return true;
  for (std::int64_t u = first; u < last; ++u) {
    if (allowed(u, column, columns).has_any()) return true;
  }
  return false;
}

// z of the columns that are not allowed, where -inf is nothing: without a softcap.
void LinearWalk::leave_out(std::int64_t u, std::int64_t column, std::int64_t columns, float* z) const {
  if (job_.allowed) allowed(u, column, columns).for_each(false, [&](std::int64_t j) { z[j] = -kInfinity; });
}

// Of rows that have nothing in a tile.
void LinearWalk::skip(std::int64_t first, std::int64_t last, std::int64_t column) const {
  for (std::int64_t u = first; has_words_ && u < last; ++u) {
    if (is_kept(u, column)) kept_max(u, column) = -kInfinity;
  }
}

// Of the smoothing sum: the sum of c_j over the columns.
double LinearWalk::weight_of(std::int64_t column, std::int64_t columns) const {
  if ((job_.sums & kSmoothingSum) == 0) return 0;
  if (job_.class_weights == nullptr) return static_cast<double>(columns);
  double sum = 0;
  for (std::int64_t j = column; j < column + columns; ++j) sum += static_cast<double>(job_.class_weights[j]);
  return sum;
}

// A slice of the vocabulary for a group of rows.
void LinearWalk::forward_task(float* scratch, std::int64_t begin, std::int64_t end, std::int64_t task) const {
  const std::int64_t slice = task % kSlices, group = forward_group(shape(), matmul()), rows_at_once = row_tile(matmul());
  const std::int64_t first = begin + task / kSlices * group, last = std::min(end, first + group);
  for (std::int64_t u = first; u < last; ++u) {
    states_[u * kSlices + slice] = RowState{};
    if (job_.allowed) weights_[u * kSlices + slice] = 0;
  }
  if (has_softmax_beside()) return forward_tiles_task(scratch, first, last, slice);
  const std::int64_t slice_end = std::min(shape().columns, (slice + 1) * slice_columns_);
  float* z_tile = after_head(scratch);
  double weight_before = 0;
  for (std::int64_t column = slice * slice_columns_; column < slice_end; column += shape().tile) {
    const std::int64_t columns = std::min(shape().tile, slice_end - column);
    if (!has_z(first, last, column, columns)) {
      skip(first, last, column);
      continue;
    }
    pack_tile_of_head(column, columns, scratch);
    const float* bias = tile_of_bias(column, columns, z_tile + rows_at_once * shape().tile);
    const double weight = weight_of(column, columns);
    for (std::int64_t u = first; u < last; u += rows_at_once) {
      const std::int64_t rows = std::min(rows_at_once, last - u);
      if (!has_z(u, u + rows, column, columns)) {
        skip(u, u + rows, column);
        continue;
      }
      const bool keeps = is_kept(u, column), keeps_floats = keeps && !has_words_;
      float* z = keeps_floats ? kept_row<float>(u, column) : z_tile;
      const std::int64_t stride = keeps_floats ? kept_stride(u) : shape().tile;
      multiply_z(scratch, bias, u, rows, columns, z, stride);
      for (std::int64_t r = 0; r < rows; ++r) {
        float* row = z + r * stride;
        add_to_slice(u + r, slice, column, columns, tile_state(u + r, column, columns, row, scratch), weight_before, weight);
        if (keeps && has_words_) {
          leave_out(u + r, column, columns, row);
          kept_max(u + r, column) = to_words(row, columns, kept_row<std::uint16_t>(u + r, column));
        }
      }
    }
    weight_before += weight;
  }
}

void LinearWalk::merge_slices(std::int64_t u) const {
  RowState* slices = states_ + u * kSlices;
  double weight_before = 0;
  for (std::int64_t s = 0; s < kSlices; ++s) {
    const std::int64_t column = s * slice_columns_, columns = std::min(slice_columns_, shape().columns - column);
    if (columns <= 0) break;
    const double weight = job_.allowed ? weights_[u * kSlices + s] : weight_of(column, columns);
    if (s > 0) slices[0] = merge(slices[0], weight_before, slices[s], weight);
    weight_before += weight;
  }
}

void LinearWalk::forward(std::int64_t begin, std::int64_t end) {
  first_row_ = begin;
  const std::int64_t groups = ceil_div(end - begin, forward_group(shape(), matmul()));
  parallel(groups * kSlices, [&](std::int64_t slot, std::int64_t task) { forward_task(scratch(slot), begin, end, task); });
  parallel(ceil_div(end - begin, kRowTile), [&](std::int64_t, std::int64_t task) {
    const std::int64_t first = begin + task * kRowTile;
    for (std::int64_t u = first; u < std::min(end, first + kRowTile); ++u) merge_slices(u);
  });
}

// ----------------------------------------------------------------------------------------------------------------- run

void LinearWalk::run(RowVisitor& visitor) {
  const bool runs_products = job_.own.hidden.data != nullptr && (job_.sweeps_forward || job_.wants_gradients);
  if (runs_products && !job_.is_packed) pack_hidden();
  if (runs_products && shape().labels_per_row > 0) find_labels(visitor);
  const std::int64_t chunk = std::max<std::int64_t>(shape().row_chunk, 1);
  for (std::int64_t begin = 0; begin < used_; begin += chunk) {
    const std::int64_t end = std::min(used_, begin + chunk);
    if (job_.sweeps_forward && runs_products) forward(begin, end);
    for (std::int64_t u = begin; u < end; ++u) {
      const std::int64_t i = rows_[u];
      std::optional<TargetStats> stats = visitor.known(i);
      RowClasses classes;
      if (job_.allowed) {
        const AllowedSet set = allowed(u, 0, shape().columns);
        if (!set.is_full()) classes = set.classes(job_.class_weights);
      }
      if (!stats) {
        const RowState& state = states_[u * kSlices];
        stats = make_row_stats(state);
        stats->labels = labels(u, visitor);
        visitor.swept(i, state, classes, stats->labels);
      }
      if (stats->classes.count < 0) set_classes(*stats, classes);
      if (stats->labels.z == nullptr) stats->labels = labels(u, visitor);
      const RowResult result = visitor.visit(i, *stats);
      if (!job_.wants_gradients) continue;
      gradients_[u] = {*stats, result.coefficients};
      keep_label_gradients(u, stats->labels, visitor);
    }
    if (job_.wants_gradients) backward(begin, end);
  }
}

void run_linear(const LinearJob& job, RowVisitor& visitor, const tileloss_executor* executor) {
  const FloatingPointScope scope;
  LinearWalk walk(job, executor);
  for (std::int64_t i = 0; i < job.shape.rows; ++i) {
    if (job.label_columns[i] == kIgnoredRow) visitor.ignored(i);
  }
  needs_target_sweep(job.target.kind) ? walk.run_some_rows(visitor) : walk.run(visitor);
  if (job.wants_gradients) walk.finish();
}

}  // namespace tileloss::impl::cpu
