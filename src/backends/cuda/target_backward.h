// A row's gradient from its statistics and its target, by one block that reads both once and writes the gradient once, in place
// or not, or from some of its columns; the columns that a sparse teacher knows are written after that.
#pragma once

#include "backends/cuda/target_forward.h"

namespace tileloss::impl::cuda {

// dL/dx_j = z'_j (p_factor p_j + form_factor form_j + label_factor p'_j), p' of the label's temperature; made by the first
// thread.
template <class T>
__device__ inline void make_factors(const TargetJob& job, const RowInBlock<T>& block, std::int64_t i, const TargetStats& stats,
                                    const LogitTransform& own, TargetRow& to) {
  const RowResult& result = job.own.rows.results[i];
  const double target = result.coefficients.target;
  const LogitTransform& label = job.label_transform == nullptr ? own : *job.label_transform;
  const double label_slope = label.exact_exponent_scale / own.exact_exponent_scale;
  const bool has_label = block.label >= 0;
  double p = 0, form = 0, slope = has_label ? target * label_slope * stats.label.one_minus_p : 0;
  if (job.kind == TargetKind::kColumns && result.has_divergence) {
    p = job.known[i].columns.slope_of_others(result.form);
    if (stats.p != 0) slope += p * stats.p;
  } else if (result.has_divergence) {
    const bool is_divergence = job.kind == TargetKind::kLogits;
    const bool has_a_mean = !is_divergence || has_mean(job.options.divergence.kind);
    form = result.form;
    if (has_a_mean) p = -form * stats.sums.mean;
    if (has_label) {
      const DivergenceTerm<double> term = label_column_term(job, block, stats, to.shift);
      slope += form * (is_divergence ? divergence_slope(term, stats, stats.sums.mean, has_a_mean)
                                     : probability_slope(-term.form, stats.p, stats.one_minus_p, stats.sums.mean));
    }
  }
  if (job.label_transform == nullptr) p -= target;
  to.p_factor = static_cast<float>(p * own.scale);
  to.form_factor = static_cast<float>(form * own.scale);
  to.label_factor = static_cast<float>(-target * label.scale);
  to.label_gradient = has_label ? static_cast<float>(slope * own.derivative(block.logit(block.label))) : 0;
}

// Those that a sparse teacher knows, of the block's columns.
template <class T>
__device__ inline void write_known(const TargetJob& job, const RowInBlock<T>& block, std::int64_t i, const TargetStats& stats,
                                   const LogitTransform& own, T* to) {
  const RowResult& result = job.own.rows.results[i];
  const KnownRow& known = job.known[i];
  const LogitTransform& label = job.label_transform == nullptr ? own : *job.label_transform;
  const double label_slope = label.exact_exponent_scale / own.exact_exponent_scale;
  for (const KnownColumn* c = known.columns.begin() + threadIdx.x; c < known.columns.end(); c += blockDim.x) {
    const std::int64_t column = c->column - job.own.first_column;
    if (column < 0 || column >= block.columns) continue;
    const double cross_entropy =
        column == block.label ? stats.label.one_minus_p : -std::exp((c->z - known.max) * label_slope - stats.label.log_sum);
    double dz = result.coefficients.target * label_slope * cross_entropy;
    if (result.has_divergence) dz += result.form * known.columns.slope(*c);
    store(to + column, from_float<T>(static_cast<float>(dz * c->derivative)));
  }
}

template <class T, bool kIsPlain>
__global__ void __launch_bounds__(kMaxThreads, 1) target_backward_rows(TargetJob job) {
  begin_kernel();
  TILELOSS_SHARED(TargetRow, row);
  const std::int64_t i = blockIdx.x;
  const RowInBlock<T> block(job, i);
  T* const to = job.own.dlogits.row<T>(i);
  const auto fill = [&](std::int64_t begin, std::int64_t end, float value) {
    for (std::int64_t j = begin + threadIdx.x; j < end; j += blockDim.x) store(to + j, from_float<T>(value));
  };
  if (block.label == kIgnoredRow) return fill(0, job.own.total_columns, 0);
  fill(block.columns, job.own.total_columns, 0);
  const TargetStats& stats = job.own.rows.stats[i];
  const bool is_undefined = block.label == kBadLabel || job.is_undefined(stats) ||
                            (job.kind == TargetKind::kProbabilities && !std::isfinite(stats.sums.mean));
  if (is_undefined || job.is_certain(i)) {
    const float value = is_undefined ? std::numeric_limits<float>::quiet_NaN() : 0;
    for (std::int64_t j = threadIdx.x; j < block.columns; j += blockDim.x)
      store(to + j, from_float<T>(block.allowed.has(j) ? value : 0));
    return;
  }
  const LogitTransform &own = *job.own.transform, &teacher = job.teacher_transform == nullptr ? own : *job.teacher_transform;
  make_sides(job, block, i, stats, own, teacher, row);
  if (threadIdx.x == 0) make_factors(job, block, i, stats, own, row);
  __syncthreads();
  const bool has_label_term = job.label_transform != nullptr && row.label_factor != 0;
  const Side<T, kIsPlain> label(has_label_term ? *job.label_transform : own, has_label_term ? row.label : row.own);
  const bool has_target = job.own.rows.results[i].has_divergence;
  visit_target<T, kIsPlain>(job, block.added, row, own, teacher, has_target, [&]<class Target>(const Target& target) {
    const bool is_aligned = is_aligned_to_16(block.row) && is_aligned_to_16(block.other) && is_aligned_to_16(to);
    for_each_pair<T, typename Target::Other>(block, is_aligned,
                                             [&](int g, const Group<T>& x, const auto& y, int count, unsigned in) {
                                               const std::int64_t start = std::int64_t{g} * Group<T>::kCount;
                                               Group<T> dx;
#pragma unroll
                                               for (int q = 0; q < Group<T>::kCount; ++q) {
                                                 dx.values[q] = 0;
                                                 if ((in >> q & 1) == 0) continue;
                                                 const ColumnTerm term = target(x.values[q], y[q], start + q);
                                                 float d = term.p * row.p_factor;
                                                 if constexpr (!std::is_void_v<typename Target::Other>)
                                                   d = std::fma(term.form, row.form_factor, d);
                                                 if (has_label_term) d = std::fma(label(x.values[q]).e, row.label_factor, d);
                                                 if (target.own.exponents.has_softcap)
                                                   d *= capped_slope(target.own.exponents.inner, x.values[q]);
                                                 dx.values[q] = start + q == block.label ? row.label_gradient : d;
                                               }
                                               if (is_aligned && count == Group<T>::kCount) return dx.store(to + start);
                                               dx.store_some(to + start, count);
                                             });
  });
  if (job.kind != TargetKind::kColumns) return;
  __syncthreads();
  write_known(job, block, i, stats, own, to);
}

}  // namespace tileloss::impl::cuda
