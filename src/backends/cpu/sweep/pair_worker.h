// What the workers share that see a row twice, with something between its forward and its gradient: pair_driver.cpp.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_PAIR_WORKER_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_PAIR_WORKER_H_

#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/simd/storage_access.h"
#include "backends/cpu/sweep/pair_driver.h"
#include "backends/cpu/sweep/row_blocks.h"

namespace tileloss::impl::cpu {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A column that a sparse teacher knows, in double.
struct KnownColumn {
  std::int64_t column = 0;
  double z = 0, slope = 0;                    // of the student: the transformed logit, and dz/dx
  double p = 0, q = 0, log_p = 0, log_q = 0;  // as the divergence sees them
  double dz = 0;                              // p dD/dp
};

// A thread's memory. Of class probabilities or known columns the teacher's stash is used alone.
struct PairScratch {
  float* exponents;
  RowScratch student, teacher;
  KnownColumn* known;

  PairScratch(std::byte* at, const PairScratchShape& s)
      : exponents(reinterpret_cast<float*>(at)),
        student(at + kExponentBytes, true, s.columns, s.vocab_block, s.has_softcap),
        teacher(at + kExponentBytes + side_bytes(s), true, s.columns, s.vocab_block, s.has_softcap),
        known(reinterpret_cast<KnownColumn*>(at + kExponentBytes + 2 * side_bytes(s))) {}

  // A multiple of 64.
  static std::int64_t bytes(const PairScratchShape& s) {
    return kExponentBytes + 2 * side_bytes(s) + round_up(s.known_columns * static_cast<std::int64_t>(sizeof(KnownColumn)), 64);
  }

 private:
  static constexpr std::int64_t kExponentBytes = 2 * kPairBlock * static_cast<std::int64_t>(sizeof(float));
  static std::int64_t side_bytes(const PairScratchShape& s) {
    return RowScratch::bytes(true, s.columns, s.vocab_block, s.has_softcap);
  }
};

class PairWorkerBase {
 public:
  void drain() {}

 protected:
  PairWorkerBase(const PairJob& job, PairVisitor& visitor) : job_(job), rows_(job.student), visitor_(visitor) {}

  bool wants_gradient() const { return rows_.dlogits != nullptr; }
  const std::byte* at(const void* matrix, std::int64_t i, std::int64_t row_stride, std::int64_t group_stride,
                      StorageType storage) const {
    return static_cast<const std::byte*>(matrix) +
           row_offset(i, row_stride, rows_.groups.rows, group_stride) * kElementBytes[storage];
  }
  const std::byte* logits(std::int64_t i) const {
    return at(rows_.logits, i, rows_.logits_stride, rows_.groups.logits_stride, rows_.storage);
  }
  std::byte* dlogits(std::int64_t i) const {
    return const_cast<std::byte*>(at(rows_.dlogits, i, rows_.dlogits_stride, rows_.groups.dlogits_stride, rows_.storage));
  }
  // The row of the matrices that say what is wanted.
  std::int64_t wanted_row(std::int64_t i) const { return job_.wanted_rows == nullptr ? i : job_.wanted_rows[i]; }

  bool is_ignored(std::int64_t i) {
    if (rows_.targets[i] != kIgnoredRow) return false;
    if (wants_gradient()) clear(i, 0);
    visitor_.ignored(i);
    return true;
  }
  // The gradient's columns from `begin` on.
  void clear(std::int64_t i, std::int64_t begin) const {
    const std::int64_t bytes = kElementBytes[rows_.storage];
    std::memset(dlogits(i) + begin * bytes, 0, static_cast<std::size_t>((rows_.total_columns - begin) * bytes));
  }
  void spoil(std::int64_t i) const {
    for (std::int64_t j = 0; j < rows_.columns; ++j) store_element(rows_.storage, dlogits(i), j, kNan);
  }
  // The gradient is there but for the padding.
  void finish(std::int64_t i, std::int64_t columns) {
    clear(i, columns);
    visitor_.finished(i);
  }

  RowState sweep(const std::byte* x, std::int64_t target, std::int64_t columns, const LogitTransform& transform,
                 const RowScratch& scratch, bool has_stash, std::uint32_t more_sums = kNoSums) const {
    ForwardRow f;
    f.x = x;
    f.columns = columns;
    f.target = target;
    f.vocab_block = scratch.vocab_block;
    f.transform = transform;
    f.sums = rows_.sums | more_sums;
    if (has_stash) {
      f.stash = scratch.stash;
      f.references = scratch.references;
    }
    f.operands = scratch.operands;
    rows_.kernels->run[rows_.storage](&f, nullptr);
    return f.state;
  }

  static PairSide side(const std::byte* x, const LogitTransform& transform, const RowStats& stats, const RowScratch& scratch) {
    PairSide s;
    s.x = x;
    s.transform = transform;
    s.max = static_cast<float>(stats.max);
    s.sum = stats.sum;
    s.log_sum = stats.log_sum;
    s.exps = scratch.stash;
    s.references = scratch.references;
    s.operands = scratch.operands;
    return s;
  }

  // The student as its label's cross-entropy sees it.
  const LogitTransform& label_transform() const { return job_.label_transform ? *job_.label_transform : rows_.transform; }
  // Its dz/dx over the student's.
  double label_slope() const { return label_transform().exact_exponent_scale / rows_.transform.exact_exponent_scale; }
  // `scratch` keeps its stash.
  RowStats label(std::int64_t i, const std::byte* x, const RowStats& student, const RowScratch& scratch) const {
    if (!job_.label_transform) return student;
    return make_row_stats(sweep(x, rows_.targets[i], rows_.columns, label_transform(), scratch, false));
  }
  PairSide label_side(const std::byte* x, const RowStats& label) const {
    PairSide s;
    s.x = x;
    s.transform = label_transform();
    s.max = static_cast<float>(label.max);
    s.sum = label.sum;
    s.log_sum = label.log_sum;
    return s;
  }

  const PairJob& job_;
  const SweepJob& rows_;
  PairVisitor& visitor_;
};

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_PAIR_WORKER_H_
