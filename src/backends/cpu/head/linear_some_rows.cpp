// Of lm_head.h what rows need whose target is not labels: the logits of some of them at a time, and gradients that wait.
#include <cstring>

#include "backends/cpu/head/linear_walk.h"
#include "core/number_formats.h"

namespace tileloss::impl::cpu {

// ---------------------------------------------------------------------------------------------------------------- logits

void LinearWalk::logits(std::int64_t begin, std::int64_t end, float* z) {
  const std::int64_t tile = shape().tile, stride = shape().z_stride();
  parallel(ceil_div(shape().columns, tile), [&](std::int64_t slot, std::int64_t task) {
    const std::int64_t column = task * tile, columns = std::min(tile, shape().columns - column);
    if (!has_z(begin, end, column, columns)) return;
    float* const head = scratch(slot);
    pack_tile_of_head(column, columns, head);
    const float* const bias = tile_of_bias(column, columns, after_head(head));
    for (std::int64_t u = begin; u < end; u += row_tile(matmul())) {
      const std::int64_t rows = std::min(row_tile(matmul()), end - u);
      multiply_z(head, bias, u, rows, columns, z + (u - begin) * stride + column, stride);
    }
  });
}

// ------------------------------------------------------------------------------------------------------- gradients that wait

// Of the row chunk's row, from the first column of a tile on. In dhead a last tile that is not whole has its rows closer
// together.
void* LinearWalk::kept_dz(std::int64_t row, std::int64_t column) const {
  const KeptInDhead& d = kept_in_dhead_;
  const std::int64_t bytes = shape().dz_bytes();
  if (row >= d.rows) {
    return piece<std::byte>(job_.layout.kept_dz) + ((row - d.rows) * shape().z_stride() + column) * bytes;
  }
  const std::int64_t columns = std::min(shape().tile, shape().columns - column);
  auto* const line = static_cast<std::byte*>(job_.own.dhead.data) + column * d.column_bytes + row / d.rows_of_line * d.line_bytes;
  return line + row % d.rows_of_line * columns * bytes;
}

void LinearWalk::keep_dz(std::int64_t begin, std::int64_t u, const float* dz) const {
  for (std::int64_t column = 0; column < shape().columns; column += shape().tile) {
    const std::int64_t columns = std::min(shape().tile, shape().columns - column);
    void* const to = kept_dz(u - begin, column);
    if (shape().dz_bytes() == 4) {
      std::memcpy(to, dz + column, static_cast<std::size_t>(columns) * sizeof(float));
      continue;
    }
    matmul().write(dz + column, columns, 1, columns, {to, kStorageBfloat16, columns, 1}, 0, false);
  }
}

void LinearWalk::load_dz(std::int64_t u, std::int64_t column, std::int64_t columns, float* dz) const {
  const void* const from = kept_dz(u - first_row_, column);
  if (shape().dz_bytes() == 4) {
    std::memcpy(dz, from, static_cast<std::size_t>(columns) * sizeof(float));
    return;
  }
  for (std::int64_t j = 0; j < columns; ++j) dz[j] = to_float(static_cast<const Bfloat16*>(from)[j]);
}

// Some rows in use as rows of their own, 0 on.
class LinearWalk::RowsAtHand final : public RowVisitor {
 public:
  RowsAtHand(const LinearWalk& walk, RowVisitor& all, std::int64_t chunk, std::int64_t begin, const float* dz)
      : walk_(walk), all_(all), chunk_(chunk), begin_(begin), dz_(dz) {}

  void ignored(std::int64_t) override {}
  void swept(std::int64_t, const RowState&, const RowClasses&, const SeveralLabels&) override {}
  std::optional<TargetStats> known(std::int64_t r) const override { return all_.known(row(r)); }
  RowResult before_target_sweep(std::int64_t r, const TargetStats& stats) const override {
    return all_.before_target_sweep(row(r), stats);
  }
  RowResult visit(std::int64_t r, const TargetStats& stats) override { return all_.visit(row(r), stats); }
  std::int64_t label_column(std::int64_t r, std::int64_t k) const override { return all_.label_column(row(r), k); }
  double logp_grad(std::int64_t r, std::int64_t k) const override { return all_.logp_grad(row(r), k); }
  void finished(std::int64_t r) override { walk_.keep_dz(chunk_, begin_ + r, dz_ + r * walk_.shape().z_stride()); }

 private:
  std::int64_t row(std::int64_t r) const { return walk_.rows_[begin_ + r]; }

  const LinearWalk& walk_;
  RowVisitor& all_;
  const std::int64_t chunk_, begin_;
  const float* const dz_;
};

// The logits of the teacher's head.
LinearJob LinearWalk::teacher_job() const {
  LinearJob teacher;
  teacher.kernels = job_.kernels;
  LinearShape& s = teacher.shape = job_.shape;
  s.own = {.width = s.target.width, .hidden_bytes = s.target.hidden_bytes};
  s.low_rank = {};
  s.bias = s.target.bias;
  s.dbias = false;
  s.kept_in_dhead = {};
  teacher.layout.used_rows = job_.layout.used_rows;
  teacher.layout.packed_hidden = job_.layout.packed_teacher;
  teacher.layout.scratch = job_.layout.scratch;
  teacher.layout.scratch_bytes = job_.layout.scratch_bytes;
  teacher.own.hidden = job_.teacher_hidden;
  teacher.own.head = job_.teacher_head;
  teacher.bias = job_.teacher_bias;
  teacher.transform = job_.target.transform;
  teacher.label_columns = job_.label_columns;
  teacher.allowed = job_.allowed;
  teacher.layout.empty = job_.layout.empty;
  teacher.workspace = job_.workspace;
  return teacher;
}

// The sweeps over some rows: everything but which.
SweepJob LinearWalk::sweep_job() const {
  constexpr std::int64_t kRowsATask = 4;
  SweepJob sweeps;
  sweeps.kernels = job_.kernels;
  sweeps.storage = kStorageFloat32;
  sweeps.columns = sweeps.total_columns = shape().columns;
  sweeps.logits = piece<float>(job_.layout.some_logits);
  sweeps.logits_stride = sweeps.dlogits_stride = shape().z_stride();
  sweeps.dlogits = job_.wants_gradients ? piece<float>(job_.layout.some_logits) : nullptr;
  sweeps.transform = job_.transform;
  sweeps.sums = job_.sums;
  sweeps.class_weights = job_.class_weights;
  sweeps.allowed = job_.allowed;
  sweeps.label_columns = piece<std::int64_t>(job_.layout.some_label_columns);
  sweeps.target = job_.target;
  if (job_.target.kind == TargetKind::kLogits) {
    sweeps.target.data = piece<float>(job_.layout.some_teacher_logits);
    sweeps.target.stride = shape().z_stride();
    sweeps.target.storage = kStorageFloat32;
  }
  sweeps.threads = shape().threads;
  sweeps.row_block = kRowsATask;
  sweeps.shape = shape().target.scratch;
  sweeps.scratch = piece<std::byte>(job_.layout.scratch);
  return sweeps;
}

void LinearWalk::run_some_rows(RowVisitor& visitor) {
  const bool has_teacher_head = job_.target.kind == TargetKind::kLogits;
  const LinearJob other = teacher_job();
  LinearWalk teacher(other, executor_);
  pack_hidden();
  if (has_teacher_head) teacher.pack_hidden();
  SweepJob sweeps = sweep_job();
  auto* const z = piece<float>(job_.layout.some_logits);
  auto* const teacher_z = piece<float>(job_.layout.some_teacher_logits);
  auto* const label_columns = piece<std::int64_t>(job_.layout.some_label_columns);
  const std::int64_t chunk = std::max<std::int64_t>(shape().row_chunk, 1);
  for (std::int64_t begin = 0; begin < used_; begin += chunk) {
    const std::int64_t end = std::min(used_, begin + chunk);
    for (std::int64_t first = begin; first < end; first += shape().target.rows) {
      const std::int64_t last = std::min(end, first + shape().target.rows);
      logits(first, last, z);
      if (has_teacher_head) teacher.logits(first, last, teacher_z);
      for (std::int64_t u = first; u < last; ++u) label_columns[u - first] = job_.label_columns[rows_[u]];
      sweeps.rows = last - first;
      sweeps.allowed.rows = rows_ + first;
      if (!has_teacher_head) sweeps.target.rows = rows_ + first;
      RowsAtHand rows(*this, visitor, begin, first, z);
      run_sweeps(sweeps, rows, executor_);
    }
    if (job_.wants_gradients) backward(begin, end);
  }
}

}  // namespace tileloss::impl::cpu
