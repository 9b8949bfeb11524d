// A row's gradient from its statistics, by one block that reads it once and writes it once, in place or not.
#pragma once

#include "backends/cuda/gradient_row.h"
#include "backends/cuda/row_forward.h"
#include "core/columns.h"

namespace tileloss::impl::cuda {

// `largest`: of the row's own logits, where they are capped. The maximum of the state is one of float32, which says less than the
// logit that it came from, unless that is another shard's. kIsPlain: off the label a multiple of p.
template <bool kIsPlain>
__device__ inline GradientRow make_gradient(RowCoefficients c, std::int64_t label, float label_logit, const SweepJob& job,
                                            const LogitTransform& transform, const RowStats& stats, float largest) {
  if constexpr (kIsPlain) c.prob_logp = c.uniform = 0;
  const double factor = transform.exact_factor;
  const bool has_softcap = transform.softcap > 0;
  GradientRow g;
  g.top = stats.max;
  double off = 0;  // from the maximum to t = 0: a scale's rounding has moved it
  if (factor != 1 || has_softcap) {
    const bool is_own = has_softcap && transform.value(largest) == static_cast<float>(stats.max);
    g.top = (is_own ? transform.exact_value(largest) : stats.max) / factor;
    if (!has_softcap) g.top = static_cast<double>(static_cast<float>(g.top));
    if (!is_own) off = g.top * factor - stats.max;
  }
  double p = over_sum(transform.scale, stats.sum);
  if (off != 0) p *= std::exp(off);
  g.prob_base = p * c.prob();
  g.prob_t = 0;
  if (c.prob_logp != 0) {
    g.prob_base = p * (c.prob() + c.prob_logp * (off - stats.log_sum));
    g.prob_t = p * c.prob_logp / transform.log2e;
  }
  g.prob = static_cast<float>(g.prob_base);
  g.uniform = static_cast<float>(c.uniform * transform.scale);
  g.label = 0;
  if (label >= 0)
    g.label = static_cast<float>(column_gradient(c, stats, true, job.weight(label)) * transform.derivative(label_logit));
  const float top = static_cast<float>(g.top), scale = transform.exponent_scale;
  g.bias = bias_of(top, scale);
  g.prob_biased = g.prob * exp2_approx(-bias_error(g.bias, top, scale));
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
    if (g.uniform != 0 && column < job.columns) dx += g.uniform * job.weight(column);
    if (exponents.has_softcap) dx *= capped_slope(exponents.inner, x);
    return dx;
  }
}

// A span's, to the row that begins at `to`. kIsPlain: off the label a multiple of p, no softcap.
template <class T, bool kIsPlain, class Source>
__device__ __forceinline__ void write_gradient(const Source& source, const Span& span, T* to, const GradientRow& gradient,
                                               std::int64_t label, const LogitTransform& transform, const SweepJob& job) {
  constexpr int kCount = Group<T>::kCount;
  constexpr bool kIsFast = kIsPlain && sizeof(T) == 2;
  const Exponents<T, kIsPlain> exponents(transform);
  const bool is_aligned = source.is_aligned && is_aligned_to_16(to), is_biased = kIsFast && is_bias_fine(gradient.bias);
  const float scale = exponents.scale, bias = gradient.bias, prob = gradient.prob_biased;
  const auto write = [&](auto at_once, bool takes_bias) {
    for_each_visit<at_once>(span, [&](int g, auto groups) {
      constexpr int kGroups = decltype(groups)::value;
      uint4 words[kGroups];
      unsigned allowed[kGroups];
      source.load(g, words, allowed);
      const bool has_others = !are_all<T>(allowed);
      T* const at = to + std::int64_t{g} * kCount;
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        constexpr int kApart = kWarp * kCount;
        Group<T> x = Group<T>::unpacked(words[k]);
#pragma unroll
        for (int q = 0; q < kCount; ++q) {
          x.values[q] = takes_bias
                            ? exp2_approx(std::fma(x.values[q], scale, bias)) * prob
                            : column_slope(gradient, x.values[q], std::int64_t{g} * kCount + k * kApart + q, exponents, job);
        }
#pragma unroll
        for (int q = 0; has_others && q < kCount; ++q) {
          if ((allowed[k] >> q & 1) == 0) x.values[q] = 0;
        }
        if (is_aligned && (kGroups > 1 || g < span.whole)) {
          x.store(at + k * kApart);
        } else {
          x.store_some(at + k * kApart, g < span.whole ? kCount : static_cast<int>(job.columns % kCount));
        }
      }
    });
  };
  constexpr bool kAtOnce = kIsFast || Source::kAtOnce;
  if (kAtOnce && is_aligned && is_biased == kIsFast) {
    write(std::bool_constant<kAtOnce>(), kIsFast);
  } else {
    write(std::false_type(), is_biased);
  }
  // Whoever wrote something else there.
  if (const int g = label >= 0 ? static_cast<int>(label / kCount) : -1;
      span.has(g) && span.visit_of(g).thread == static_cast<int>(threadIdx.x))
    store(to + label, from_float<T>(gradient.label));
}

// The padding's gradient, and all of it where the row is not used: by these threads of so many.
template <class T>
__device__ __forceinline__ void write_zeros(T* to, std::int64_t from, const SweepJob& job, unsigned rank, unsigned ranks) {
  const std::int64_t step = std::int64_t{blockDim.x} * ranks;
  for (std::int64_t j = from + std::int64_t{blockDim.x} * rank + threadIdx.x; j < job.total_columns; j += step)
    store(to + j, from_float<T>(0.0f));
}

template <class T, bool kIsPlain, bool kMayBeMasked>
__global__ void __launch_bounds__(kMaxRowThreads, kIsPlain && sizeof(T) == 2 ? kPlainBlocks : 1)
    backward_rows(SweepJob job, RowStates states) {
  begin_kernel();
  TILELOSS_SHARED(GradientRow, shared);
  const std::int64_t i = blockIdx.x;
  T* const to = job.dlogits.row<T>(i);
  const std::int64_t label = job.rows.label_columns[i];
  write_zeros(to, label == kIgnoredRow ? 0 : job.columns, job, 0, 1);
  if (label == kIgnoredRow) return;
  const RowInMemory<T, kMayBeMasked> row(job, i, true);
  row.prefetch_allowed(all_of<T>(job));
  row.prefetch(all_of<T>(job));  // while one thread makes the row's numbers
  const LogitTransform transform = transform_of<kIsPlain>(job);
  float largest = -kInfinity;
  if (!kIsPlain && transform.softcap > 0) largest = largest_of(row.data, job.columns, row.allowed);
  // Before anybody writes: the gradient may lie where the logits do.
  if (threadIdx.x == 0) {
    const RowCoefficients c = job.rows.results[i].coefficients;
    const RowStats stats = make_row_stats(states[i], !kIsPlain && c.prob_logp != 0);
    shared = make_gradient<kIsPlain>(c, label, label >= 0 ? to_float(load(row.data + label)) : 0, job, transform, stats, largest);
  }
  __syncthreads();
  write_gradient<T, kIsPlain>(row, all_of<T>(job), to, shared, label, transform, job);
}

}  // namespace tileloss::impl::cuda
