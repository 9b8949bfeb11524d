// A row's gradient from its statistics, by one block that reads it once and writes it once, in place or not.
#ifndef TILELOSS_BACKENDS_CUDA_ROW_BACKWARD_H_
#define TILELOSS_BACKENDS_CUDA_ROW_BACKWARD_H_

#include "backends/cuda/row_forward.h"
#include "core/columns.h"

namespace tileloss::impl::cuda {

// dL/dx_j of every column but the label's: 2^t (prob + prob_t t) + uniform c_j, times a softcap's own derivative.
struct GradientRow {
  double top;
  float prob;
  double prob_base, prob_t;  // in double: of rows that are nearly uniform the two all but cancel
  float uniform;
  float label;  // the label's own, as it is stored
};

// `largest`: of the row's own logits, where they are capped. The maximum of the state is one of float32, which says less than the
// logit that it came from, unless that is another shard's.
template <class T>
__device__ inline GradientRow make_gradient(const T* row, std::int64_t i, const SweepJob& job, const LogitTransform& transform,
                                            const RowStates& states, float largest) {
  const RowStats stats = states.stats(i);
  const RowCoefficients& c = job.rows.results[i].coefficients;
  // Of t = 0: where a scale's rounding has moved the maximum, it is not quite the maximum's.
  const double per_unit = transform.exact_exponent_scale / LogitTransform::kExactLog2E;
  const bool has_softcap = transform.softcap > 0,
             is_own = has_softcap && transform.value(largest) == static_cast<float>(stats.max);
  GradientRow g;
  g.top = has_softcap ? stats.max / per_unit : static_cast<double>(static_cast<float>(stats.max / per_unit));
  if (is_own) g.top = transform.exact_value(largest) / per_unit;
  const double logp = (is_own ? 0 : g.top * per_unit - stats.max) - stats.log_sum;
  const double p = std::exp(logp) * transform.scale;
  g.prob_base = p * (c.prob() + (c.prob_logp == 0 ? 0 : c.prob_logp * logp));
  g.prob_t = c.prob_logp == 0 ? 0 : p * c.prob_logp / transform.log2e;
  g.prob = static_cast<float>(g.prob_base);
  g.uniform = static_cast<float>(c.uniform * transform.scale);
  g.label = 0;
  if (const std::int64_t label = job.rows.label_columns[i]; label >= 0) {
    g.label = static_cast<float>(column_gradient(c, stats, true, job.weight(label)) *
                                 transform.derivative(to_float(load(row + label))));
  }
  return g;
}

template <class T, bool kIsPlain>
__device__ __forceinline__ float column_slope(const GradientRow& g, float x, std::int64_t column,
                                              const Exponents<T, kIsPlain>& exponents, const SweepJob& job) {
  const auto [t, e] = exponents.power(x, {static_cast<float>(g.top), g.top});
  if constexpr (kIsPlain) {
    return e * g.prob;
  } else {
    float dx = e * (g.prob_t == 0 ? g.prob : static_cast<float>(g.prob_base + g.prob_t * static_cast<double>(t)));
    if (e == 0 && !std::isnan(g.prob)) dx = 0;  // t may be -inf
    if (g.uniform != 0) dx += g.uniform * job.weight(column);
    if (exponents.has_softcap) {
      const double q = std::exp(-2 * std::fabs(exponents.inner * x));  // 1 - tanh^2
      dx *= static_cast<float>(4 * q / ((1 + q) * (1 + q)));
    }
    return dx;
  }
}

// kIsPlain: off the label a multiple of p, no softcap.
template <class T, bool kIsPlain>
__global__ void __launch_bounds__(kMaxThreads, 1) backward_rows(SweepJob job, RowStates states) {
  TILELOSS_SHARED(GradientRow, shared);
  const std::int64_t i = blockIdx.x;
  const T* const row = job.logits.row<T>(i);
  T* const to = job.dlogits.row<T>(i);
  const std::int64_t label = job.rows.label_columns[i];
  const std::int64_t written = label == kIgnoredRow ? 0 : job.columns;
  for (std::int64_t j = written + threadIdx.x; j < job.total_columns; j += blockDim.x) store(to + j, from_float<T>(0.0f));
  if (label == kIgnoredRow) return;
  const LogitTransform transform = *job.transform;
  const Exponents<T, kIsPlain> exponents(transform);
  float largest = -kInfinity;
  if (exponents.has_softcap) {
    using Parts = float[kWarp];
    TILELOSS_SHARED(Parts, parts);
    for (std::int64_t j = threadIdx.x; j < job.columns; j += blockDim.x) largest = max_nan(largest, to_float(load(row + j)));
    largest = reduce_block(largest, parts, -kInfinity, [](float a, float b) { return max_nan(a, b); });
  }
  // Before anybody writes: the gradient may lie where the logits do.
  if (threadIdx.x == 0) shared = make_gradient(row, i, job, transform, states, largest);
  __syncthreads();
  const GradientRow gradient = shared;
  constexpr int kCount = Group<T>::kCount;
  const int label_group = label >= 0 ? static_cast<int>(label / kCount) : -1, label_place = static_cast<int>(label % kCount);
  const auto make = [&](int g, Group<T> x, int count) {
#pragma unroll
    for (int q = 0; q < kCount; ++q) {
      if (!kIsPlain && q >= count) break;
      x.values[q] = column_slope(gradient, x.values[q], std::int64_t{g} * kCount + q, exponents, job);
    }
    if (g == label_group) {
#pragma unroll
      for (int q = 0; q < kCount; ++q) x.values[q] = q == label_place ? gradient.label : x.values[q];
    }
    return x;
  };
  for_each_group<T>(
      row, job.columns, is_aligned_to_16(row) && is_aligned_to_16(to),
      [&](int g, const Group<T>& x) { make(g, x, kCount).store(to + std::int64_t{g} * kCount); },
      [&](int g, const Group<T>& x, int count) { make(g, x, count).store_some(to + std::int64_t{g} * kCount, count); });
}

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_ROW_BACKWARD_H_
