#include "backends/cpu/sweep/pair_driver.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/simd/storage_access.h"
#include "backends/cpu/sweep/row_blocks.h"

namespace tileloss::impl::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kExponentBytes = 2 * kPairBlock * static_cast<std::int64_t>(sizeof(float));

std::int64_t side_bytes(std::int64_t columns, std::int64_t vocab_block, bool has_softcap) {
  return RowScratch::bytes(true, columns, vocab_block, has_softcap);
}

class PairWorker {
 public:
  PairWorker(const PairJob& job, PairVisitor& visitor, std::byte* scratch, std::int64_t bytes, bool has_softcap)
      : job_(job),
        rows_(job.student),
        visitor_(visitor),
        exponents_(reinterpret_cast<float*>(scratch)),
        student_(scratch + kExponentBytes, true, rows_.columns, rows_.vocab_block, has_softcap),
        teacher_(scratch + kExponentBytes + bytes, true, rows_.columns, rows_.vocab_block, has_softcap) {}

  void row(std::int64_t i) {
    if (rows_.targets[i] == kIgnoredRow) {
      if (rows_.dlogits != nullptr) clear(i, 0);
      visitor_.ignored(i);
      return;
    }
    const std::byte* logits = at(rows_.logits, i, rows_.logits_stride, rows_.groups.logits_stride);
    const std::byte* teacher = at(job_.teacher_logits, i, job_.teacher_logits_stride, rows_.groups.teacher_logits_stride);
    PairStats stats;
    stats.student = sweep(i, logits, rows_.transform, student_);
    stats.teacher = sweep(i, teacher, job_.teacher_transform, teacher_);
    const bool is_finite = std::isfinite(stats.student.max) && std::isfinite(stats.teacher.max);
    PairRow pair;
    pair.student = side(logits, rows_.transform, stats.student, student_);
    pair.teacher = side(teacher, job_.teacher_transform, stats.teacher, teacher_);
    pair.columns = rows_.columns;
    pair.target = rows_.targets[i];
    pair.vocab_block = student_.vocab_block;
    pair.divergence = job_.divergence;
    pair.exponents = exponents_;
    const bool wants_gradient = rows_.dlogits != nullptr;
    const bool is_certain = is_finite && rows_.columns == 1;  // p = q = 1, whatever exp rounds
    double slope = 0;
    if (wants_gradient) {
      pair.coefficients = visitor_.coefficients(i);
      pair.dx = dlogits(i);
      pair.stream = rows_.dlogits != rows_.logits;
      // Read now: in place, the sweep overwrites the logit.
      if (pair.target >= 0) slope = rows_.transform.derivative(load_element(rows_.storage, logits, pair.target));
    }
    DivergenceTerm label;
    const PairTable& kernels = rows_.kernels->pair[rows_.storage];
    if (is_finite && !is_certain) {
      kernels.diverge(pair);
      if (pair.target >= 0) add_label(label = label_term(pair.divergence, stats.student, stats.teacher), pair);
    } else if (!is_finite) {
      pair.sums.divergence = kNan;
    }
    stats.sums = pair.sums;
    visitor_.visit(i, stats);
    if (!wants_gradient) return;
    if (!is_finite) {
      for (std::int64_t j = 0; j < rows_.columns; ++j) store_element(rows_.storage, pair.dx, j, kNan);
    } else if (!is_certain) {
      if (!pair.has_gradient) kernels.gradient(pair);
      if (pair.target >= 0) write_label(stats, label, slope, pair);
    }
    clear(i, is_certain ? 0 : rows_.columns);
    visitor_.finished(i);
  }

  void drain() {}

 private:
  const std::byte* at(const void* matrix, std::int64_t i, std::int64_t row_stride, std::int64_t group_stride) const {
    return static_cast<const std::byte*>(matrix) +
           row_offset(i, row_stride, rows_.groups.rows, group_stride) * kElementBytes[rows_.storage];
  }
  std::byte* dlogits(std::int64_t i) const {
    return const_cast<std::byte*>(at(rows_.dlogits, i, rows_.dlogits_stride, rows_.groups.dlogits_stride));
  }
  // The gradient's columns from `begin` on.
  void clear(std::int64_t i, std::int64_t begin) const {
    const std::int64_t bytes = kElementBytes[rows_.storage];
    std::memset(dlogits(i) + begin * bytes, 0, static_cast<std::size_t>((rows_.total_columns - begin) * bytes));
  }

  // The label is left out of both rows' sums in the same way, so that equal rows have the same bits.
  RowStats sweep(std::int64_t i, const std::byte* x, const LogitTransform& transform, const RowScratch& scratch) const {
    ForwardRow f;
    f.x = x;
    f.columns = rows_.columns;
    f.target = rows_.targets[i];
    f.vocab_block = scratch.vocab_block;
    f.transform = transform;
    f.sums = rows_.sums;
    if (!(transform.softcap > 0)) {
      f.stash = scratch.stash;
      f.references = scratch.references;
    }
    f.operands = scratch.operands;
    rows_.kernels->run[rows_.storage](&f, nullptr);
    return make_row_stats(f.state);
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

  static void add_label(const DivergenceTerm& label, PairRow& pair) {
    pair.sums.divergence += label.value;
    if (has_mean(pair.divergence.kind)) pair.sums.mean += label.form;
  }

  void write_label(const PairStats& stats, const DivergenceTerm& label, double slope, const PairRow& pair) const {
    const PairCoefficients& c = pair.coefficients;
    double dz = c.target * stats.student.one_minus_p;
    if (c.form != 0) {
      // g - mean, the mean's own part taken together with g: of a certain label they all but cancel.
      // Where both are infinite the gradient is NaN.
      const double others = pair.sums.mean - label.form;
      const bool all = !has_mean(pair.divergence.kind);
      dz += c.form * (all ? label.form : label.form * stats.student.one_minus_p - stats.student.p * others);
    }
    store_element(rows_.storage, pair.dx, pair.target, static_cast<float>(dz * slope));
  }

  const PairJob& job_;
  const SweepJob& rows_;
  PairVisitor& visitor_;
  float* const exponents_;
  const RowScratch student_, teacher_;
};

bool has_softcap(const PairJob& job) { return job.student.transform.softcap > 0 || job.teacher_transform.softcap > 0; }

}  // namespace

std::int64_t pair_scratch_bytes(std::int64_t columns, std::int64_t vocab_block, bool has_softcap) {
  return kExponentBytes + 2 * side_bytes(columns, vocab_block, has_softcap);
}

void run_pairs(const PairJob& job, PairVisitor& visitor, const tileloss_executor* executor) {
  const SweepJob& rows = job.student;
  const bool capped = has_softcap(job);
  const std::int64_t bytes = pair_scratch_bytes(rows.columns, rows.vocab_block, capped);
  walk_row_blocks(executor, rows.threads, rows.rows, rows.row_block, [&](std::int64_t slot) {
    return PairWorker(job, visitor, rows.scratch + slot * bytes, side_bytes(rows.columns, rows.vocab_block, capped), capped);
  });
}

}  // namespace tileloss::impl::cpu
