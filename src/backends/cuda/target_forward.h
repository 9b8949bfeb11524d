// The target sweep of a row, once its statistics are there: what its target's sums are, by one block that reads row and target
// once.
#pragma once

#include "backends/cuda/target_sweep.h"

namespace tileloss::impl::cuda {

// What the label's own column adds.
template <class T>
__device__ inline DivergenceTerm<double> label_column_term(const TargetJob& job, const RowInBlock<T>& block,
                                                           const TargetStats& stats, double shift) {
  if (job.kind == TargetKind::kProbabilities) return probability_term(block.weight(job, block.label), stats.logp);
  Divergence d = job.options.divergence;
  d.shift = shift;
  return label_term(d, stats, stats.teacher);
}

// The heaviest class of each row that has no label, in the label's place: a sure row is made of it.
static __global__ void __launch_bounds__(kMaxThreads, 1) choose_columns(TargetJob job) {
  begin_kernel();
  using Weights = float[kWarp];
  using Columns = std::int64_t[kWarp];
  TILELOSS_SHARED(Weights, weights);
  TILELOSS_SHARED(Columns, columns);
  const std::int64_t i = blockIdx.x;
  const RowInBlock<float> block(job, i);
  if (block.label != kLabelElsewhere || job.count(i) == 0) return;
  float most = -std::numeric_limits<float>::infinity();
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::int64_t first = kNone;
  for (std::int64_t j = threadIdx.x; j < block.columns; j += blockDim.x) {
    if (!block.allowed.has(j)) continue;
    const float weight = static_cast<float>(block.weight(job, j));
    if (weight > most) most = weight, first = j;
  }
  const float of_all =
      reduce_block(most, weights, -std::numeric_limits<float>::infinity(), [](float a, float b) { return a > b ? a : b; });
  if (most != of_all) first = kNone;
  first = reduce_block(first, columns, kNone, [](std::int64_t a, std::int64_t b) { return a < b ? a : b; });
  if (threadIdx.x == 0 && first != kNone) job.own.rows.label_columns[i] = first;
}

// Where the gradient finds it, whose block may have other columns than the row's largest.
template <class T>
__device__ inline void choose_shift(const TargetJob& job, const RowInBlock<T>& block, std::int64_t i, const TargetStats& stats,
                                    const LogitTransform& own, const LogitTransform& teacher) {
  const std::int64_t column = stats.argmax - job.own.first_column;
  Divergence d = job.options.divergence;
  d.shift_for(std::exp(own.exact_value(block.logit(column)) - stats.max) / stats.sum,
              std::exp(teacher.exact_value(block.teacher_logit(column)) - stats.teacher.max) / stats.teacher.sum);
  job.shifts[i] = d.shift;
}

template <class T, bool kIsPlain>
__global__ void __launch_bounds__(kMaxThreads, 1) sweep_targets(TargetJob job) {
  begin_kernel();
  TILELOSS_SHARED(TargetRow, row);
  using Sums = double[kWarp];
  TILELOSS_SHARED(Sums, parts);
  const std::int64_t i = blockIdx.x;
  const RowInBlock<T> block(job, i);
  if (block.label == kIgnoredRow || block.label == kBadLabel) return;
  TargetStats& stats = job.own.rows.stats[i];
  if (job.is_undefined(stats) || job.is_certain(i)) {
    if (threadIdx.x == 0) stats.sums = {job.is_undefined(stats) ? std::numeric_limits<double>::quiet_NaN() : 0, 0};
    return;
  }
  const LogitTransform &own = *job.own.transform, &teacher = job.teacher_transform == nullptr ? own : *job.teacher_transform;
  if (job.shifts != nullptr && threadIdx.x == 0) choose_shift(job, block, i, stats, own, teacher);
  make_sides(job, block, i, stats, own, teacher, row);
  __syncthreads();
  double divergence = 0, mean = 0;
  visit_target<T, kIsPlain>(job, block.added, row, own, teacher, true, [&]<class Target>(const Target& target) {
    constexpr bool kHasOutside = requires { target.outside(0.0f, 0); };
    const bool is_aligned = is_aligned_to_16(block.row) && is_aligned_to_16(block.other);
    for_each_pair<T, typename Target::Other, kHasOutside>(block, is_aligned,
                                                          [&](int g, const Group<T>& x, const auto& y, int count, unsigned in) {
                                                            float value = 0, form = 0;
#pragma unroll
                                                            for (int q = 0; q < Group<T>::kCount; ++q) {
                                                              const std::int64_t column = std::int64_t{g} * Group<T>::kCount + q;
                                                              if (q >= count || column == block.label) continue;
                                                              ColumnTerm term = {0, 0, 0};
                                                              if ((in >> q & 1) != 0) {
                                                                term = target(x.values[q], y[q], column);
                                                              } else if constexpr (kHasOutside) {
                                                                term = target.outside(y[q], column);
                                                              } else {
                                                                continue;
                                                              }
                                                              value += term.value;
                                                              form += term.form;
                                                            }
                                                            divergence += static_cast<double>(value);
                                                            if constexpr (Target::kHasMean) mean += static_cast<double>(form);
                                                          });
  });
  const auto add_up = [&](double x) { return reduce_block(x, parts, 0.0, [](double a, double b) { return a + b; }); };
  divergence = add_up(divergence);
  mean = add_up(mean);
  if (threadIdx.x != 0) return;
  if (block.label >= 0) {
    const DivergenceTerm<double> label = label_column_term(job, block, stats, row.shift);
    divergence += label.value;
    if (job.kind == TargetKind::kProbabilities || has_mean(job.options.divergence.kind)) mean += label.form;
  }
  if (job.kind == TargetKind::kProbabilities && !std::isfinite(mean)) divergence = std::numeric_limits<double>::quiet_NaN();
  stats.sums = {divergence, mean};
}

// Logits whose states are there.
struct SweptSide {
  RowMatrix logits;
  tileloss_dtype storage;
  const LogitTransform* transform;
  RowState* states;  // null: there is no such side
  const float* largest;

  // The forward's sums are relative to the very logit that the maximum came from: so is the label here, where a transform has
  // rounded the two.
  TILELOSS_HOST_DEVICE RowStats stats(std::int64_t i, std::int64_t label) const {
    RowState state = states[i];
    if (label < 0 || !std::isfinite(state.max)) return make_row_stats(state);
    const double max = transform->exact_value(largest[i]);
    const double target = transform->exact_value(load_number(logits.data, storage, logits.offset(i) + label));
    if (target == static_cast<double>(state.label_logit) && max == static_cast<double>(state.max)) return make_row_stats(state);
    const float shift = static_cast<float>(target - max);
    const float own_max = state.max;
    state.label_logit = shift;
    state.max = std::isinf(shift) ? 0 : static_cast<float>(shift - (target - max));
    RowStats stats = make_row_stats(state);
    stats.max = own_max;
    stats.lse = max + stats.log_sum;
    return stats;
  }
};

struct MakeStats {
  device::RowArrays rows;
  SweptSide own, teacher, label;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    const std::int64_t column = rows.label_columns[i];
    TargetStats& stats = rows.stats[i] = own.stats(i, column);
    rows.set_classes(stats, i);
    if (teacher.states != nullptr) stats.teacher = teacher.stats(i, column);
    if (label.states != nullptr) stats.label = label.stats(i, column);
  }
};

}  // namespace tileloss::impl::cuda
