// What the workers share that do a thread's rows, one class for each kind of target: where a row lies, its memory, its sweeps.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/simd/storage_access.h"
#include "backends/cpu/sweep/driver.h"
#include "backends/cpu/sweep/label_gradients.h"
#include "backends/cpu/sweep/row_blocks.h"
#include "backends/cpu/sweep/row_gradient.h"
#include "core/columns.h"
#include "core/row_offset.h"

namespace tileloss::impl::cpu {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A thread's memory. Rows compared with their labels have `own`, and what several labels take; class probabilities and a copy of
// the row without its known columns lie in the teacher's stash.
struct SweepScratch {
  float* exponents = nullptr;
  RowScratch own, teacher;
  KnownColumn* known = nullptr;
  // Of rows with several labels: their gradients, and their z.
  LabelGradient* label_gradients = nullptr;
  float* label_z = nullptr;

  SweepScratch(std::byte* at, const ScratchShape& s)
      : exponents(reinterpret_cast<float*>(at)),
        own(at + exponent_bytes(s), has_stash(s), s.columns, s.vocab_block, s.has_softcap),
        teacher(at + exponent_bytes(s) + own_bytes(s), has_stash(s), s.columns, s.vocab_block, s.has_softcap),
        known(reinterpret_cast<KnownColumn*>(at + exponent_bytes(s) + 2 * own_bytes(s))),
        label_gradients(reinterpret_cast<LabelGradient*>(at + own_bytes(s))),
        label_z(reinterpret_cast<float*>(label_gradients + s.labels_per_row)) {}

  static std::int64_t bytes(const ScratchShape& s) {
    constexpr auto kOfLabel = static_cast<std::int64_t>(sizeof(LabelGradient) + sizeof(float));
    if (!needs_target_sweep(s.target)) return own_bytes(s) + round_up(s.labels_per_row * kOfLabel, 64);
    return exponent_bytes(s) + 2 * own_bytes(s) + round_up(s.known_columns * static_cast<std::int64_t>(sizeof(KnownColumn)), 64);
  }

 private:
  static bool has_stash(const ScratchShape& s) { return s.has_stash || needs_target_sweep(s.target); }
  static std::int64_t exponent_bytes(const ScratchShape& s) {
    return needs_target_sweep(s.target) ? 2 * kTargetBlock * static_cast<std::int64_t>(sizeof(float)) : 0;
  }
  static std::int64_t own_bytes(const ScratchShape& s) {
    return RowScratch::bytes(has_stash(s), s.columns, s.vocab_block, s.has_softcap);
  }
};

class RowWorker {
 public:
  void drain() {}

 protected:
  RowWorker(const SweepJob& job, RowVisitor& visitor, const SweepScratch& scratch)
      : job_(job), target_(job.target), visitor_(visitor), scratch_(scratch) {}

  bool wants_gradient() const { return job_.dlogits != nullptr; }
  bool is_capped() const { return job_.transform.softcap > 0; }
  const TargetTable& kernels() const { return job_.kernels->target[job_.storage]; }
  const std::byte* at(const void* matrix, std::int64_t i, std::int64_t row_stride, std::int64_t group_stride,
                      StorageType storage) const {
    return static_cast<const std::byte*>(matrix) +
           row_offset(i, row_stride, job_.groups.rows, group_stride) * kElementBytes[storage];
  }
  const std::byte* logits(std::int64_t i) const {
    return at(job_.logits, i, job_.logits_stride, job_.groups.logits_stride, job_.storage);
  }
  std::byte* dlogits(std::int64_t i) const {
    return const_cast<std::byte*>(at(job_.dlogits, i, job_.dlogits_stride, job_.groups.dlogits_stride, job_.storage));
  }
  // A row of the teacher's logits or of the class probabilities.
  const std::byte* target_row(std::int64_t i) const {
    return at(target_.data, target_index(i), target_.stride, job_.groups.teacher_logits_stride, target_.storage);
  }
  std::int64_t target_index(std::int64_t i) const { return target_.rows == nullptr ? i : target_.rows[i]; }

  // Whether there is nothing of the row to be swept.
  bool is_done(std::int64_t i) {
    if (job_.label_columns[i] == kIgnoredRow) {
      if (wants_gradient()) clear(i, 0);
      visitor_.ignored(i);
      return true;
    }
    if (job_.logits != nullptr) return false;
    visitor_.visit(i, *visitor_.known(i));
    return true;
  }
  // The gradient's columns from `begin` on.
  void clear(std::int64_t i, std::int64_t begin) const {
    const std::int64_t bytes = kElementBytes[job_.storage];
    if (begin == job_.total_columns) return;
    std::memset(dlogits(i) + begin * bytes, 0, static_cast<std::size_t>((job_.total_columns - begin) * bytes));
  }
  void fill_with_nan(std::int64_t i) const {
    for (std::int64_t j = 0; j < job_.columns; ++j) store_element(job_.storage, dlogits(i), j, kNan);
  }
  // The gradient's first columns are there, the others are 0.
  void finish(std::int64_t i, std::int64_t columns) const {
    clear(i, columns);
    visitor_.finished(i);
  }

  ForwardRow forward_row(const std::byte* x, std::int64_t label_column, std::int64_t columns, const LogitTransform& transform,
                         const RowScratch& scratch) const {
    ForwardRow f;
    f.x = x;
    f.columns = columns;
    f.label_column = label_column;
    f.vocab_block = scratch.vocab_block;
    f.transform = transform;
    f.sums = job_.sums;
    f.operands = scratch.operands;
    return f;
  }
  RowState sweep(const std::byte* x, std::int64_t label_column, std::int64_t columns, const LogitTransform& transform,
                 const RowScratch& scratch, bool has_stash, std::uint32_t more_sums = kNoSums) const {
    ForwardRow f = forward_row(x, label_column, columns, transform, scratch);
    f.sums |= more_sums;
    if (has_stash) {
      f.stash = scratch.stash;
      f.references = scratch.references;
    }
    job_.kernels->run[job_.storage](&f, nullptr);
    return f.state;
  }
  BackwardRow backward_row(std::int64_t i, const std::byte* x, const RowGradient& g, const LogitTransform& transform) const {
    BackwardRow b = make_backward(g, transform);
    b.x = x;
    b.dx = dlogits(i);
    b.columns = job_.columns;
    b.vocab_block = scratch_.own.vocab_block;
    b.operands = scratch_.own.operands;
    b.stream = job_.dlogits != job_.logits;
    return b;
  }

  // ------------------------------------------------------------------------------------------ of a target that is not labels

  // The row's side, of which exps are in its scratch.
  TargetRow make_target_row(std::int64_t i, const std::byte* x, const RowStats& stats) const {
    TargetRow row;
    row.own = side(x, job_.transform, stats, scratch_.own);
    row.teacher.exps = scratch_.teacher.stash;
    row.columns = job_.columns;
    row.label_column = job_.label_columns[i];
    row.vocab_block = scratch_.own.vocab_block;
    row.exponents = scratch_.exponents;
    if (wants_gradient()) {
      row.dx = dlogits(i);
      row.stream = job_.dlogits != job_.logits;
    }
    return row;
  }
  static RowSide side(const std::byte* x, const LogitTransform& transform, const RowStats& stats, const RowScratch& scratch) {
    RowSide s = side(x, transform, stats);
    s.exps = scratch.stash;
    s.references = scratch.references;
    s.operands = scratch.operands;
    return s;
  }
  static RowSide side(const std::byte* x, const LogitTransform& transform, const RowStats& stats) {
    RowSide s;
    s.x = x;
    s.transform = transform;
    s.max = static_cast<float>(stats.max);
    s.sum = stats.sum;
    s.log_sum = stats.log_sum;
    return s;
  }

  // The row as its label's cross-entropy sees it.
  const LogitTransform& label_transform() const { return target_.label_transform ? *target_.label_transform : job_.transform; }
  // Its dz/dx over the row's.
  double label_slope() const { return label_transform().exact_exponent_scale / job_.transform.exact_exponent_scale; }
  // The stash is kept.
  RowStats label(std::int64_t i, const std::byte* x, const RowStats& own) const {
    if (!target_.label_transform) return own;
    return make_row_stats(sweep(x, job_.label_columns[i], job_.columns, label_transform(), scratch_.own, false));
  }
  RowSide label_side(const std::byte* x, const RowStats& label) const { return side(x, label_transform(), label); }

  const SweepJob& job_;
  const TargetInput& target_;
  RowVisitor& visitor_;
  const SweepScratch scratch_;
};

}  // namespace tileloss::impl::cpu
