#include "backends/cpu/sweep/pair_driver.h"

#include "backends/cpu/sweep/known_columns.h"
#include "backends/cpu/sweep/pair_worker.h"
#include "backends/cpu/sweep/row_gradient.h"

namespace tileloss::impl::cpu {
namespace {

// A student's logits and a teacher's.
class PairWorker : public PairWorkerBase {
 public:
  PairWorker(const PairJob& job, PairVisitor& visitor, const PairScratch& scratch)
      : PairWorkerBase(job, visitor), exponents_(scratch.exponents), student_(scratch.student), teacher_(scratch.teacher) {}

  void row(std::int64_t i) {
    if (is_ignored(i)) return;
    const std::byte* const x = logits(i);
    const std::byte* const teacher = teacher_logits(i);
    const std::optional<PairStats> whole = visitor_.whole(i);
    PairStats stats;
    const bool shifts = job_.divergence.kind == DivergenceKind::kSkewForwardKl && wants_gradient() && !whole;
    stats.student = sweep_side(i, x, rows_.transform, student_, shifts ? kArgmax : kNoSums);
    stats.teacher = sweep_side(i, teacher, job_.teacher_transform, teacher_);
    stats.label = whole ? whole->label : label(i, x, stats.student, student_);
    if (whole) stats = *whole;
    const bool is_finite = std::isfinite(stats.student.max) && std::isfinite(stats.teacher.max);
    PairRow pair;
    pair.student = side(x, rows_.transform, stats.student, student_);
    pair.teacher = side(teacher, job_.teacher_transform, stats.teacher, teacher_);
    pair.columns = rows_.columns;
    pair.target = rows_.targets[i];
    pair.vocab_block = student_.vocab_block;
    pair.divergence = job_.divergence;
    if (shifts && is_finite) {
      const std::int64_t j = stats.student.argmax;
      pair.divergence.shift_for(probability(x, j, rows_.transform, stats.student),
                                probability(teacher, j, job_.teacher_transform, stats.teacher));
    }
    pair.exponents = exponents_;
    const bool is_certain = is_finite && rows_.columns == 1 && !whole;  // p = q = 1, whatever exp rounds
    double slope = 0;
    const PairSide apart = label_side(x, stats.label);
    if (wants_gradient()) {
      pair.coefficients = visitor_.coefficients(i);
      if (job_.label_transform && pair.coefficients.target != 0) pair.label = &apart;
      pair.dx = dlogits(i);
      pair.stream = rows_.dlogits != rows_.logits;
      // Read now: in place, the sweep overwrites the logit.
      if (pair.target >= 0) slope = rows_.transform.derivative(load_element(rows_.storage, x, pair.target));
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
    if (!wants_gradient()) return;
    if (whole) pair.sums = whole->sums;
    if (!is_finite) {
      spoil(i);
    } else if (!is_certain) {
      if (!pair.has_gradient) {
        pair.coefficients.has_divergence ? kernels.gradient(pair) : write_cross_entropy(x, stats.label, pair);
      }
      if (pair.target >= 0) write_label(stats, label, slope, pair);
    }
    finish(i, is_certain ? 0 : rows_.columns);
  }

 private:
  const std::byte* teacher_logits(std::int64_t i) const {
    return at(job_.teacher_logits, i, job_.teacher_stride, rows_.groups.teacher_logits_stride, rows_.storage);
  }

  // The label is left out of both rows' sums in the same way, so that equal rows have the same bits.
  RowStats sweep_side(std::int64_t i, const std::byte* x, const LogitTransform& transform, const RowScratch& scratch,
                      std::uint32_t more_sums = kNoSums) const {
    return make_row_stats(sweep(x, rows_.targets[i], rows_.columns, transform, scratch, !(transform.softcap > 0), more_sums));
  }
  double probability(const std::byte* x, std::int64_t column, const LogitTransform& transform, const RowStats& stats) const {
    return std::exp(transform.exact_value(load_element(rows_.storage, x, column)) - stats.max) / stats.sum;
  }

  // Without the divergence, which may be infinite.
  void write_cross_entropy(const std::byte* x, const RowStats& stats, const PairRow& pair) const {
    RowGradient g;
    g.stats = stats;
    g.coefficients.target = pair.coefficients.target;
    BackwardRow b = make_backward(g, label_transform());
    b.x = x;
    b.dx = pair.dx;
    b.columns = rows_.columns;
    b.vocab_block = student_.vocab_block;
    b.operands = student_.operands;
    b.stream = pair.stream;
    rows_.kernels->run[rows_.storage](nullptr, &b);
  }

  static void add_label(const DivergenceTerm& label, PairRow& pair) {
    pair.sums.divergence += label.value;
    if (has_mean(pair.divergence.kind)) pair.sums.mean += label.form;
  }

  void write_label(const PairStats& stats, const DivergenceTerm& label, double slope, const PairRow& pair) const {
    const PairCoefficients& c = pair.coefficients;
    double dz = c.target * stats.label.one_minus_p * label_slope();
    if (c.has_divergence) {
      // g - mean, the mean's own part taken together with g: of a certain label they all but cancel.
      // Where both are infinite the gradient is NaN.
      const double others = pair.sums.mean - label.form;
      const bool all = !has_mean(pair.divergence.kind);
      dz += c.form * (all ? label.form : label.form * stats.student.one_minus_p - stats.student.p * others);
    }
    store_element(rows_.storage, pair.dx, pair.target, static_cast<float>(dz * slope));
  }

  float* const exponents_;
  const RowScratch student_, teacher_;
};

// Class probabilities, as arrays of floats where a teacher's exps would be.
class SoftLabelWorker : public PairWorkerBase {
 public:
  SoftLabelWorker(const PairJob& job, PairVisitor& visitor, const PairScratch& scratch)
      : PairWorkerBase(job, visitor), exponents_(scratch.exponents), student_(scratch.student), q_(scratch.teacher.stash) {}

  void row(std::int64_t i) {
    if (is_ignored(i)) return;
    const std::byte* const x = logits(i);
    const std::int64_t target = rows_.targets[i];
    const bool is_capped = rows_.transform.softcap > 0;
    const std::optional<PairStats> whole = visitor_.whole(i);
    PairStats stats;
    stats.student = make_row_stats(sweep(x, target, rows_.columns, rows_.transform, student_, !is_capped));
    if (whole) stats = *whole;
    PairRow pair;
    pair.student = side(x, rows_.transform, stats.student, student_);
    pair.teacher.exps = q_;
    pair.columns = rows_.columns;
    pair.target = target;
    pair.vocab_block = student_.vocab_block;
    pair.divergence = job_.divergence;
    pair.exponents = exponents_;
    stats.label = stats.student;
    bool is_finite = std::isfinite(stats.student.max);
    if (is_finite) {
      weigh(wanted_row(i));
      rows_.kernels->pair[rows_.storage].diverge(pair);
      is_finite = std::isfinite(pair.sums.mean);
    }
    if (!is_finite) pair.sums.divergence = kNan;
    stats.sums = pair.sums;
    visitor_.visit(i, stats);
    if (!wants_gradient()) return;
    if (whole) {
      pair.sums = whole->sums;
      is_finite = is_finite && std::isfinite(pair.sums.mean);
    }
    if (is_finite) {
      write(i, x, stats.student, pair);
    } else {
      spoil(i);
    }
    finish(i, rows_.columns);
  }

 private:
  void weigh(std::int64_t row) const {
    const StorageType storage = job_.probs_storage;
    const std::byte* probs = at(job_.target_probs, row, job_.teacher_stride, rows_.groups.teacher_logits_stride, storage);
    if (storage != rows_.storage) {
      for (std::int64_t j = 0; j < rows_.columns; ++j) q_[j] = load_element(storage, probs, j);
      probs = nullptr;
    }
    const double s = job_.label_smoothing, added = s / static_cast<double>(job_.classes);
    rows_.kernels->pair[rows_.storage].weigh(probs, rows_.columns, static_cast<float>(1 - s), static_cast<float>(added),
                                             rows_.class_weights, q_);
  }

  // A label, which is there for the outputs alone, has no exp in the stash.
  void write(std::int64_t i, const std::byte* x, const RowStats& stats, PairRow& pair) const {
    const std::int64_t label = pair.target;
    pair.coefficients = visitor_.coefficients(i);
    pair.dx = dlogits(i);
    pair.stream = rows_.dlogits != rows_.logits;
    double slope = 0, weight = 0;
    if (label >= 0) {
      slope = rows_.transform.derivative(load_element(rows_.storage, x, label));
      weight = weight_of(wanted_row(i), label);
    }
    rows_.kernels->pair[rows_.storage].gradient(pair);
    if (label < 0) return;
    const double dz = pair.coefficients.form * (-pair.sums.mean * stats.p - weight);
    store_element(rows_.storage, pair.dx, label, static_cast<float>(dz * slope));
  }

  double weight_of(std::int64_t row, std::int64_t column) const {
    const std::byte* probs =
        at(job_.target_probs, row, job_.teacher_stride, rows_.groups.teacher_logits_stride, job_.probs_storage);
    const double s = job_.label_smoothing, q = load_element(job_.probs_storage, probs, column);
    const double weight = rows_.class_weights == nullptr ? 1 : rows_.class_weights[column];
    return weight * ((1 - s) * q + s / static_cast<double>(job_.classes));
  }

  float* const exponents_;
  const RowScratch student_;
  float* const q_;
};

bool has_softcap(const PairJob& job) { return job.student.transform.softcap > 0 || job.teacher_transform.softcap > 0; }

template <class Worker>
void walk(const PairJob& job, PairVisitor& visitor, const tileloss_executor* executor) {
  const SweepJob& rows = job.student;
  const PairScratchShape shape{rows.columns, rows.vocab_block, has_softcap(job), job.known.count};
  walk_row_blocks(executor, rows.threads, rows.rows, rows.row_block, [&](std::int64_t slot) {
    return Worker(job, visitor, PairScratch(rows.scratch + slot * shape.bytes(), shape));
  });
}

}  // namespace

std::int64_t PairScratchShape::bytes() const { return PairScratch::bytes(*this); }

void run_pairs(const PairJob& job, PairVisitor& visitor, const tileloss_executor* executor) {
  switch (job.teacher) {
    case Teacher::kProbabilities: return walk<SoftLabelWorker>(job, visitor, executor);
    case Teacher::kColumns: return walk<KnownColumnsWorker>(job, visitor, executor);
    default: return walk<PairWorker>(job, visitor, executor);
  }
}

}  // namespace tileloss::impl::cpu
