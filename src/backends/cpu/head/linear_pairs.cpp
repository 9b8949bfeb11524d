#include "backends/cpu/head/linear_pairs.h"

#include <cstring>

#include "backends/cpu/head/linear_walk.h"
#include "core/number_formats.h"

namespace tileloss::impl::cpu {

// ---------------------------------------------------------------------------------------------------------------- logits

void LinearWalk::logits(std::int64_t begin, std::int64_t end, float* z) {
  const std::int64_t tile = shape().tile, stride = shape().z_stride();
  parallel(ceil_div(shape().columns, tile), [&](std::int64_t slot, std::int64_t task) {
    const std::int64_t column = task * tile, columns = std::min(tile, shape().columns - column);
    float* const head = scratch(slot);
    matmul().pack_b(job_.head, column, columns, 0, shape().width, shape().compute, head);
    const float* const bias =
        tile_of_bias(column, columns, head + matmul().packed_floats(tile, matmul().b_panel, shape().width, shape().compute));
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
  auto* const line = static_cast<std::byte*>(job_.dhead.data) + column * d.column_bytes + row / d.rows_of_line * d.line_bytes;
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

namespace {

// Some rows in use as rows of their own, 0 on.
class RowsAtHand final : public PairVisitor {
 public:
  RowsAtHand(const LinearWalk& walk, PairVisitor& all, std::int64_t chunk, std::int64_t begin, const float* dz,
             std::int64_t stride)
      : walk_(walk), all_(all), chunk_(chunk), begin_(begin), dz_(dz), stride_(stride) {}

  void ignored(std::int64_t) override {}
  PairCoefficients coefficients(std::int64_t r) override { return all_.coefficients(walk_.row_of(begin_ + r)); }
  std::optional<PairStats> whole(std::int64_t r) const override { return all_.whole(walk_.row_of(begin_ + r)); }
  void visit(std::int64_t r, const PairStats& stats) override { all_.visit(walk_.row_of(begin_ + r), stats); }
  void finished(std::int64_t r) override { walk_.keep_dz(chunk_, begin_ + r, dz_ + r * stride_); }

 private:
  const LinearWalk& walk_;
  PairVisitor& all_;
  const std::int64_t chunk_, begin_;
  const float* const dz_;
  const std::int64_t stride_;
};

LinearJob teacher_job(const LinearPairJob& job) {
  LinearJob teacher;
  teacher.kernels = job.student.kernels;
  LinearShape& s = teacher.shape = job.student.shape;
  s.width = s.pair.width;
  s.hidden_bytes = s.pair.hidden_bytes;
  s.bias = s.pair.bias;
  s.dhidden = s.dhead = s.dbias = false;
  s.kept_in_dhead = {};
  teacher.layout.used_rows = job.student.layout.used_rows;
  teacher.layout.packed_hidden = job.student.layout.packed_teacher;
  teacher.layout.scratch = job.student.layout.scratch;
  teacher.layout.scratch_bytes = job.student.layout.scratch_bytes;
  teacher.hidden = job.teacher_hidden;
  teacher.head = job.teacher_head;
  teacher.bias = job.teacher_bias;
  teacher.transform = job.pairs.teacher_transform;
  teacher.targets = job.student.targets;
  teacher.workspace = job.student.workspace;
  return teacher;
}

// The sweeps over pairs of rows: everything but which rows.
PairJob sweep_job(const LinearPairJob& job) {
  constexpr std::int64_t kRowsATask = 4;
  const LinearJob& s = job.student;
  std::byte* const workspace = s.workspace;
  PairJob pairs = job.pairs;
  SweepJob& rows = pairs.student;
  rows.kernels = s.kernels;
  rows.storage = kStorageFloat32;
  rows.columns = rows.total_columns = s.shape.columns;
  rows.logits = workspace + s.layout.pair_logits;
  rows.logits_stride = rows.dlogits_stride = s.shape.z_stride();
  rows.dlogits = s.wants_gradients ? workspace + s.layout.pair_logits : nullptr;
  rows.transform = s.transform;
  rows.sums = s.sums;
  rows.class_weights = s.class_weights;
  rows.targets = reinterpret_cast<std::int64_t*>(workspace + s.layout.pair_targets);
  rows.threads = s.shape.threads;
  rows.row_block = kRowsATask;
  rows.vocab_block = s.shape.pair.scratch.vocab_block;
  rows.scratch = workspace + s.layout.scratch;
  if (pairs.teacher == Teacher::kLogits) {
    pairs.teacher_logits = workspace + s.layout.pair_teacher;
    pairs.teacher_stride = s.shape.z_stride();
  }
  return pairs;
}

}  // namespace

void run_linear_pairs(const LinearPairJob& job, PairVisitor& visitor, const tileloss_executor* executor) {
  const FloatingPointScope scope;
  const LinearJob& s = job.student;
  const LinearJob t = teacher_job(job);
  LinearWalk student(s, executor), teacher(t, executor);
  for (std::int64_t i = 0; i < s.shape.rows; ++i) {
    if (s.targets[i] == kIgnoredRow) visitor.ignored(i);
  }
  student.pack_hidden();
  const bool has_teacher_head = job.pairs.teacher == Teacher::kLogits;
  if (has_teacher_head) teacher.pack_hidden();
  PairJob pairs = sweep_job(job);
  auto* const z = reinterpret_cast<float*>(s.workspace + s.layout.pair_logits);
  auto* const teacher_z = reinterpret_cast<float*>(s.workspace + s.layout.pair_teacher);
  auto* const targets = reinterpret_cast<std::int64_t*>(s.workspace + s.layout.pair_targets);
  const std::int64_t chunk = std::max<std::int64_t>(s.shape.row_chunk, 1);
  for (std::int64_t begin = 0; begin < student.used(); begin += chunk) {
    const std::int64_t end = std::min(student.used(), begin + chunk);
    for (std::int64_t first = begin; first < end; first += s.shape.pair.rows) {
      const std::int64_t last = std::min(end, first + s.shape.pair.rows);
      student.logits(first, last, z);
      if (has_teacher_head) teacher.logits(first, last, teacher_z);
      for (std::int64_t u = first; u < last; ++u) targets[u - first] = s.targets[student.row_of(u)];
      pairs.student.rows = last - first;
      pairs.wanted_rows = student.rows_from(first);
      RowsAtHand rows(student, visitor, begin, first, z, s.shape.z_stride());
      run_pairs(pairs, rows, executor);
    }
    if (s.wants_gradients) student.backward(begin, end);
  }
  if (s.wants_gradients) student.finish();
}

}  // namespace tileloss::impl::cpu
