// What the sweeps over a row and its target share. A target is a teacher's logits, class probabilities, or some columns of a
// teacher (known_columns.h), whose other columns are compared with nothing.
//
// Columns are computed in float32, in the arithmetic of the CPU's vectors, and added up in double after a group of them. The
// label's own column is left out and comes in at the end, in double.
#pragma once

#include "backends/cuda/known_columns.h"
#include "backends/cuda/row_forward.h"
#include "core/vector_arithmetic.h"

namespace tileloss::impl::cuda {

struct TargetJob {
  SweepJob own;
  RowMatrix other;                                       // the teacher's logits or the class probabilities
  tileloss_dtype other_dtype = TILELOSS_FLOAT32;         // the teacher's is the logits'
  const LogitTransform* teacher_transform = nullptr;     // on the device
  const LogitTransform* label_transform = nullptr;       // on the device; null: the label's cross-entropy has the row's own
  float *largest = nullptr, *teacher_largest = nullptr;  // the forward's; null: not known, the statistics are of all shards
  KnownRow* known = nullptr;
  TargetKind kind = TargetKind::kLogits;
  TargetOptions options;
  std::int64_t classes = 0;
  double* shifts = nullptr;  // Divergence::shift, by the forward from the row's argmax; null: 1

  __device__ double kept() const { return 1 - options.label_smoothing; }
  // Of this row's classes.
  __device__ double count(std::int64_t i) const {
    return own.rows.classes == nullptr ? static_cast<double>(classes) : own.rows.classes[i].count;
  }
  __device__ double added(std::int64_t i) const { return options.label_smoothing / count(i); }
  // A row that no target's sums can be told of: its gradient is NaN.
  __device__ bool is_undefined(const TargetStats& stats) const {
    if (kind == TargetKind::kColumns) return std::isnan(stats.sums.divergence);
    return !std::isfinite(stats.max) || (kind == TargetKind::kLogits && !std::isfinite(stats.teacher.max));
  }
  // p = q = 1, whatever exp rounds.
  __device__ bool is_certain(std::int64_t i) const { return kind == TargetKind::kLogits && count(i) == 1; }
};

// Vectors of one float, as core/vector_arithmetic.h has them.
struct OneFloat {
  using F = float;
  TILELOSS_HOST_DEVICE static F set(float x) { return x; }
  TILELOSS_HOST_DEVICE static F negate(F x) { return -x; }
  TILELOSS_HOST_DEVICE static F abs(F x) { return std::fabs(x); }
  TILELOSS_HOST_DEVICE static F add(F x, F y) { return x + y; }
  TILELOSS_HOST_DEVICE static F sub(F x, F y) { return x - y; }
  TILELOSS_HOST_DEVICE static F mul(F x, F y) { return x * y; }
  TILELOSS_HOST_DEVICE static F fma(F x, F y, F z) { return std::fma(x, y, z); }
  TILELOSS_HOST_DEVICE static F max(F x, F y) { return x > y ? x : y; }
  TILELOSS_HOST_DEVICE static F reciprocal(F x) { return 1 / x; }
  TILELOSS_HOST_DEVICE static F multiply_where_nonzero(F x, F y) { return x == 0 ? 0.0f : x * y; }
  TILELOSS_HOST_DEVICE static F flip_sign(F x, F sign) { return std::signbit(sign) ? -x : x; }
  TILELOSS_HOST_DEVICE static F select_less(F x, F y, F yes, F no) { return x < y ? yes : no; }
  TILELOSS_HOST_DEVICE static F select_abs_at_most(F x, float limit, F small, F other) {
    return std::fabs(x) <= limit ? small : other;
  }
};
using ColumnArithmetic = VectorArithmetic<OneFloat>;

// ------------------------------------------------------------------------------------------------------------ a row's numbers

// Of one side's distribution: p = 2^t share and log p = t / log2e + constant, t relative to `top`.
struct SideRow {
  double top, constant;
  float share;
};

// `largest`: the logit that the maximum came from, of which float32 says less once it is transformed; or another, if that is
// another shard's or not known.
__device__ inline SideRow make_side(const RowStats& stats, const LogitTransform& transform, float largest) {
  const double per_unit = transform.exact_factor;
  const bool is_own = transform.value(largest) == static_cast<float>(stats.max);
  SideRow side;
  side.top = is_own ? transform.exact_value(largest) / per_unit : stats.max / per_unit;
  if (!(transform.softcap > 0)) side.top = is_own ? largest : static_cast<float>(side.top);
  side.constant = (is_own ? 0 : side.top * per_unit - stats.max) - stats.log_sum;
  side.share = static_cast<float>(std::exp(side.constant));
  return side;
}

template <class T, bool kIsPlain>
struct Side {
  Exponents<T, kIsPlain> exponents;
  typename Exponents<T, kIsPlain>::Top top;
  float share;
  double log2e, constant;

  __device__ Side(const LogitTransform& transform, const SideRow& row)
      : exponents(transform),
        top{static_cast<float>(row.top), row.top},
        share(row.share),
        log2e(transform.log2e),
        constant(row.constant) {}
  // t and p of a column.
  __device__ __forceinline__ typename Exponents<T, kIsPlain>::Power operator()(float x) const {
    const auto [t, e] = exponents.power(x, top);
    return {t, e * share};
  }
};

// A row's numbers, made by one thread before anybody writes: the gradient may lie where the logits do.
struct TargetRow {
  SideRow own, teacher, label;
  double shift;
  float p_factor, form_factor, label_factor;  // of the gradient: what a column's p, form and p of the label's are multiplied by
  float label_gradient;                       // the label's own, as it is stored
};

// A block's row.
template <class T>
struct RowInBlock {
  const T* row;
  const void* other;
  std::int64_t columns, label;
  AllowedColumns<true> allowed;
  double added;  // to each class of class probabilities

  __device__ RowInBlock(const TargetJob& job, std::int64_t i)
      : row(job.own.logits.row<T>(i)),
        other(nullptr),
        columns(job.own.columns),
        label(job.own.rows.label_columns[i]),
        allowed(job.own, i, true),
        added(job.added(i)) {
    allowed.prefetch(0, columns);
    if (job.kind == TargetKind::kLogits) other = job.other.row<T>(i);
    if (job.kind == TargetKind::kProbabilities) {
      visit_format(job.other_dtype, [&](auto format) { other = job.other.row<decltype(format)>(i); });
    }
  }
  __device__ float logit(std::int64_t column) const { return to_float(load(row + column)); }
  __device__ float teacher_logit(std::int64_t column) const { return to_float(load(static_cast<const T*>(other) + column)); }
  // A class's q with its weight.
  __device__ double weight(const TargetJob& job, std::int64_t column) const {
    const double q = visit_format(job.other_dtype, [&](auto format) {
      return static_cast<double>(to_float(load(static_cast<const decltype(format)*>(other) + column)));
    });
    return job.own.weight(column) * (job.kept() * q + added);
  }
};

// A row's largest logit. Not known, it is looked for where they are capped; else the row's maximum says enough.
template <class T>
__device__ inline float find_largest(const float* known, std::int64_t i, const T* row, const RowInBlock<T>& block,
                                     bool is_capped) {
  if (known != nullptr) return known[i];
  if (!is_capped) return std::numeric_limits<float>::quiet_NaN();
  return largest_of(row, block.columns, block.allowed);
}

// Both sides, by the first thread; the others get it at the next barrier.
template <class T>
__device__ inline void make_sides(const TargetJob& job, const RowInBlock<T>& block, std::int64_t i, const TargetStats& stats,
                                  const LogitTransform& own, const LogitTransform& teacher, TargetRow& to) {
  const bool has_teacher = job.kind == TargetKind::kLogits;
  const float largest = find_largest(job.largest, i, block.row, block, own.softcap > 0);
  float teacher_largest = 0;
  if (has_teacher)
    teacher_largest = find_largest(job.teacher_largest, i, static_cast<const T*>(block.other), block, teacher.softcap > 0);
  if (threadIdx.x != 0) return;
  to.own = make_side(stats, own, largest);
  if (job.label_transform != nullptr) to.label = make_side(stats.label, *job.label_transform, largest);
  to.shift = 1;
  if (!has_teacher) return;
  to.teacher = make_side(stats.teacher, teacher, teacher_largest);
  if (job.shifts != nullptr) to.shift = job.shifts[i];
}

// -------------------------------------------------------------------------------------------------------- column after column

// A column's p, and its share of the divergence and of the mean.
struct ColumnTerm {
  float p, value, form;
};

template <class T, bool kIsPlain, class Form>
struct TeacherTarget {
  using Other = T;
  static constexpr bool kHasMean = Form::kHasMean;
  const Form& form;
  const Side<T, kIsPlain> own, teacher;
  bool swaps;
  float ratio, unit, constant;

  __device__ TeacherTarget(const Form& f, const Side<T, kIsPlain>& student, const Side<T, kIsPlain>& other)
      : form(f), own(student), teacher(other), swaps(f.swaps()) {
    const double log2e = swaps ? teacher.log2e : own.log2e;
    ratio = static_cast<float>(log2e / (swaps ? own.log2e : teacher.log2e));
    unit = static_cast<float>(1 / log2e);
    constant = static_cast<float>(swaps ? teacher.constant - own.constant : own.constant - teacher.constant);
  }
  __device__ __forceinline__ ColumnTerm operator()(float x, float y, std::int64_t /*column*/) const {
    const auto p = own(x), q = teacher(y);
    const auto first = swaps ? q : p, second = swaps ? p : q;
    const auto term = form({first.e, second.e, std::fma(std::fma(-second.t, ratio, first.t), unit, constant)});
    return {p.e, term.value, term.form};
  }
};

template <class T, bool kIsPlain, class Probability>
struct ProbabilityTarget {
  using Other = Probability;
  static constexpr bool kHasMean = true;
  const SweepJob& job;
  const Side<T, kIsPlain> own;
  float kept, added, unit, constant;

  __device__ ProbabilityTarget(const TargetJob& target, double added_to_each, const Side<T, kIsPlain>& student)
      : job(target.own),
        own(student),
        kept(static_cast<float>(target.kept())),
        added(static_cast<float>(added_to_each)),
        unit(static_cast<float>(1 / student.log2e)),
        constant(static_cast<float>(student.constant)) {}
  __device__ __forceinline__ ColumnTerm operator()(float x, float y, std::int64_t column) const {
    const auto p = own(x);
    const float q = job.weight(column) * std::fma(y, kept, added);
    const auto term = ClassProbabilities<ColumnArithmetic>{}({q, q, std::fma(p.t, unit, constant)});
    return {p.e, term.value, term.form};
  }
  // Of a class that is not allowed: its p is 0, and its probability counts as it is.
  __device__ __forceinline__ ColumnTerm outside(float y, std::int64_t column) const {
    const float q = job.weight(column) * (y * kept);
    const auto term = ClassProbabilities<ColumnArithmetic>{}({q, q, -kInfinity});
    return {0, term.value, term.form};
  }
};

// Of columns that a sparse teacher does not know.
template <class T, bool kIsPlain>
struct NoTarget {
  using Other = void;
  static constexpr bool kHasMean = false;
  const Side<T, kIsPlain> own;

  __device__ explicit NoTarget(const Side<T, kIsPlain>& student) : own(student) {}
  __device__ __forceinline__ ColumnTerm operator()(float x, float /*y*/, std::int64_t /*column*/) const {
    return {own(x).e, 0, 0};
  }
};

// visit(target) with the job's.
template <class T, bool kIsPlain, class Visit>
__device__ __forceinline__ void visit_target(const TargetJob& job, double added, const TargetRow& row, const LogitTransform& own,
                                             const LogitTransform& teacher, bool has_target, Visit&& visit) {
  const Side<T, kIsPlain> student(own, row.own);
  if (!has_target || job.kind == TargetKind::kColumns) return visit(NoTarget<T, kIsPlain>(student));
  if (job.kind == TargetKind::kProbabilities) {
    return visit_format(job.other_dtype,
                        [&](auto format) { visit(ProbabilityTarget<T, kIsPlain, decltype(format)>(job, added, student)); });
  }
  Divergence d = job.options.divergence;
  d.shift = row.shift;
  const Side<T, kIsPlain> other(teacher, row.teacher);
  visit_divergence<ColumnArithmetic>(
      d, [&](const auto& form) { visit(TeacherTarget<T, kIsPlain, std::decay_t<decltype(form)>>(form, student, other)); });
}

// As many columns of another row as a group has, 8, 16 or 32 bytes of them.
template <class P, int kCount>
__device__ __forceinline__ void load_columns(const P* from, float (&values)[kCount]) {
  if constexpr (kCount * sizeof(P) == 8) {
    const uint2 words = load(reinterpret_cast<const uint2*>(from));
    unpack(words.x, P{}, values[0], values[1]);
    unpack(words.y, P{}, values[2], values[3]);
  } else {
#pragma unroll
    for (int k = 0; k < kCount; k += Group<P>::kCount) {
      const auto part = Group<P>::unpacked(load(reinterpret_cast<const uint4*>(from + k)));
#pragma unroll
      for (int q = 0; q < Group<P>::kCount; ++q) values[k + q] = part.values[q];
    }
  }
}

// visit(g, x, y, columns, in) for each group of the row that is this thread's, x of the row and y of the other, and which of the
// columns are allowed, a bit each; a group of none is not read, unless kReadsAll. By column number, wherever the two lie.
// `is_aligned`: both, and what the visits write, to 16 bytes.
template <class T, class P, bool kReadsAll = false, class Visit>
__device__ __forceinline__ void for_each_pair(const RowInBlock<T>& block, bool is_aligned, Visit&& visit) {
  constexpr int kCount = Group<T>::kCount;
  const int groups = static_cast<int>((block.columns + kCount - 1) / kCount);
#pragma unroll 1
  for (int g = static_cast<int>(threadIdx.x); g < groups; g += static_cast<int>(blockDim.x)) {
    const std::int64_t start = std::int64_t{g} * kCount;
    const int count = block.columns - start < kCount ? static_cast<int>(block.columns - start) : kCount;
    const unsigned in = block.allowed.template bits<kCount>(g) & ((1u << count) - 1);
    Group<T> x = {};
    float y[kCount] = {};
    if (in == 0 && !kReadsAll) {
    } else if (is_aligned && count == kCount) {
      x = Group<T>::unpacked(load(reinterpret_cast<const uint4*>(block.row + start)));
      if constexpr (!std::is_void_v<P>) load_columns<P>(static_cast<const P*>(block.other) + start, y);
    } else {
      x = Group<T>::load_some(block.row + start, count);
      if constexpr (!std::is_void_v<P>) {
#pragma unroll
        for (int q = 0; q < kCount; ++q) y[q] = q < count ? to_float(load(static_cast<const P*>(block.other) + start + q)) : 0;
      }
    }
    visit(g, x, y, count, in);
  }
}

}  // namespace tileloss::impl::cuda
