// A row's state, by one block that reads it once.
#ifndef TILELOSS_BACKENDS_CUDA_ROW_FORWARD_H_
#define TILELOSS_BACKENDS_CUDA_ROW_FORWARD_H_

#include "backends/cuda/sweep_job.h"

namespace tileloss::impl::cuda {

// How a logit becomes an exponent: 2^t, t = scale (u - top), u = the logit or its tanh. Subtracted before it is scaled: then t is
// exactly 0 at the top, and no offset that all columns share costs a digit. Capped logits are compared in double, as float32
// would leave nothing of their differences near the cap.
template <class T, bool kIsPlain>
struct Exponents {
  struct Top {
    float logit = 0;
    double capped = -1;
  };
  struct Power {
    float t, e;  // e = 2^t
  };
  float scale, scale_rest;
  double inner;
  bool has_softcap;

  __device__ __forceinline__ explicit Exponents(const LogitTransform& t)
      : scale(t.exponent_scale),
        scale_rest(static_cast<float>(t.exact_exponent_scale - t.exponent_scale)),
        inner(t.exact_inner),
        has_softcap(!kIsPlain && t.softcap > 0) {}

  __device__ __forceinline__ double capped(float x) const {
    const double less = std::expm1(-2 * std::fabs(inner * x));
    return std::copysign(less / (2 + less), static_cast<double>(x));
  }
  // Of a maximum; finite where that is -inf, so that nothing becomes -inf - -inf.
  __device__ __forceinline__ Top top(float max) const {
    if (has_softcap) return {0, capped(max)};
    return {max == -kInfinity ? 0 : max, 0};
  }
  __device__ __forceinline__ float shifted(float x, const Top& top) const {
    if constexpr (!kIsPlain) {
      if (has_softcap) return static_cast<float>(capped(x) - top.capped);
    }
    return x - top.logit;
  }
  __device__ __forceinline__ Power power(float x, const Top& top) const { return power(shifted(x, top)); }
  // A gradient in float32 has to be right to some last places, in 16 bits to those that are kept.
  __device__ __forceinline__ Power power(float shifted) const {
    const float t = shifted * scale;
    if constexpr (sizeof(T) == 4) {
      return {t, exp2_fine(t, std::fma(shifted, scale, -t) + shifted * scale_rest)};
    } else {
      return {t, exp2_approx(t)};
    }
  }
  __device__ __forceinline__ Power power(const Top& from, const Top& to) const {
    return power(has_softcap ? static_cast<float>(from.capped - to.capped) : from.logit - to.logit);
  }
};

// What a thread has seen of a row, its label left out. Sums are of 2^t.
template <class T, bool kIsPlain>
struct Seen {
  float max = -kInfinity;  // logit, as it lies in memory
  typename Exponents<T, kIsPlain>::Top top;
  float sum = 0;
  float entropy = 0, collision = 0;  // of t 2^t, and of 4^t
  float smoothing = 0, weight = 0;   // of c t, and of c

  __device__ __forceinline__ explicit Seen(const Exponents<T, kIsPlain>& exponents) : top(exponents.top(max)) {}

  __device__ __forceinline__ void move_to(float new_max, const Exponents<T, kIsPlain>& exponents) {
    const auto new_top = exponents.top(new_max);
    const auto [shift, power] = exponents.power(top, new_top);
    const bool is_empty = max == -kInfinity && !exponents.has_softcap;  // all seen was -inf, if anything
    const float factor = is_empty ? 0 : power;
    max = new_max;
    top = new_top;
    if constexpr (!kIsPlain) {
      entropy = factor == 0 ? 0 : factor * (entropy + shift * sum);
      collision *= factor * factor;
      if (weight != 0 && !is_empty) smoothing += shift * weight;
    }
    sum *= factor;
  }
};

template <class T, bool kIsPlain>
__device__ __forceinline__ void see(Seen<T, kIsPlain>& seen, const float (&x)[Group<T>::kCount], int count, int label,
                                    std::int64_t column, const Exponents<T, kIsPlain>& exponents, const SweepJob& job) {
  float max = seen.max;
#pragma unroll
  for (int q = 0; q < Group<T>::kCount; ++q) {
    if (q != label && q < count) max = max_nan(max, x[q]);
  }
  if (!(max == seen.max)) seen.move_to(max, exponents);
#pragma unroll
  for (int q = 0; q < Group<T>::kCount; ++q) {
    if (q == label || q >= count) continue;
    const auto [t, e] = exponents.power(x[q], seen.top);
    seen.sum += e;
    if constexpr (!kIsPlain) {
      if (e != 0) seen.entropy += e * t;
      seen.collision += e * e;
      if ((job.sums & kSmoothingSum) != 0) {
        const float c = job.weight(column + q);
        seen.smoothing += c * t;
        seen.weight += c;
      }
    }
  }
}

// The row's state: what all columns but the label's are, and the label's.
template <class T, bool kIsPlain>
__device__ inline RowState finish_state(const Seen<T, kIsPlain>& others, bool has_label, float label_logit, float label_weight,
                                        const LogitTransform& transform) {
  RowState s;
  s.max = transform.value(others.max);
  const bool is_empty = !(transform.softcap > 0) && others.max == -kInfinity;
  if (has_label) {
    s.target = transform.value(label_logit);
    if (!(s.max >= s.target) && !std::isnan(s.max)) s.max = s.target;
    if (is_empty || std::isnan(s.target)) s.max = s.target;
  }
  if (!std::isfinite(s.max)) return s;
  double sum = others.sum, entropy = others.entropy / transform.log2e, collision = others.collision;
  double smoothing = others.smoothing / transform.log2e;
  if (has_label) {
    const double label = transform.exact_value(label_logit), top = transform.exact_value(others.max);
    const double shift = is_empty ? -static_cast<double>(kInfinity) : top - label;
    if (shift < 0) {
      const double factor = std::exp(shift);
      entropy = factor == 0 ? 0 : factor * (entropy + shift * sum);
      sum *= factor;
      collision = factor * factor * collision + 1;
      if (others.weight != 0) smoothing += shift * others.weight;
    } else {
      const double e = std::exp(-shift);
      if (e != 0) entropy -= e * shift;
      collision += e * e;
      if (shift != 0) smoothing -= shift * label_weight;
    }
  }
  s.sum = static_cast<float>(sum);
  if constexpr (!kIsPlain) {
    s.entropy_sum = static_cast<float>(entropy);
    s.collision_sum = static_cast<float>(collision);
    s.smoothing_sum = static_cast<float>(smoothing);
  }
  return s;
}

// The first column whose logit is the largest, as a column of the whole vocabulary; and of a row whose largest is infinite
// sum_j c_j z_j.
template <class T>
__device__ inline void look_again(const T* row, const SweepJob& job, const LogitTransform& transform, RowState& state,
                                  std::int64_t* columns, double* sums) {
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::int64_t first = kNone;
  double sum = 0;
  for (std::int64_t j = threadIdx.x; j < job.columns; j += blockDim.x) {
    const float x = to_float(load(row + j));
    if (first == kNone && transform.value(x) == state.max) first = j;
    if (std::isinf(state.max)) sum += static_cast<double>(job.weight(j)) * transform.exact_value(x);
  }
  first = reduce_block(first, columns, kNone, [](std::int64_t a, std::int64_t b) { return a < b ? a : b; });
  sum = reduce_block(sum, sums, 0.0, [](double a, double b) { return a + b; });
  state.argmax = first == kNone ? -1 : job.first_column + first;
  if (std::isinf(state.max) && (job.sums & kSmoothingSum) != 0) state.smoothing_sum = static_cast<float>(sum);
}

// kIsPlain: no sums but the one, no softcap.
template <class T, bool kIsPlain>
__global__ void __launch_bounds__(kMaxThreads, kIsPlain && sizeof(T) == 2 ? 2 : 1) forward_rows(SweepJob job) {
  using Parts = float[kWarp];
  TILELOSS_SHARED(Parts, parts);
  const std::int64_t i = blockIdx.x;
  const std::int64_t label = job.rows.label_columns[i];
  if (label == kIgnoredRow || label == kBadLabel) {
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    if (threadIdx.x == 0)
      job.rows.states[i] = label == kIgnoredRow ? RowState() : RowState{kNan, kNan, kNan, kNan, kNan, kNan, -1};
    return;
  }
  const T* const row = job.logits.row<T>(i);
  const LogitTransform transform = *job.transform;
  const Exponents<T, kIsPlain> exponents(transform);
  constexpr int kCount = Group<T>::kCount;
  // The group that holds the label, and its place there.
  const int label_group = label >= 0 ? static_cast<int>(label / kCount) : -1, label_place = static_cast<int>(label % kCount);

  Seen<T, kIsPlain> seen(exponents);
  const auto add = [&](int g, const Group<T>& x, int count) {
    if (g == label_group) {
      see(seen, x.values, count, label_place, std::int64_t{g} * kCount, exponents, job);
    } else {
      see(seen, x.values, count, -1, std::int64_t{g} * kCount, exponents, job);
    }
  };
  for_each_group<T>(
      row, job.columns, is_aligned_to_16(row), [&](int g, const Group<T>& x) { add(g, x, kCount); }, add);

  const float max = reduce_block(seen.max, parts, -kInfinity, [](float a, float b) { return max_nan(a, b); });
  if (!(max == seen.max)) seen.move_to(max, exponents);
  const auto add_up = [&](float x) { return reduce_block(x, parts, 0.0f, [](float a, float b) { return a + b; }); };
  seen.sum = add_up(seen.sum);
  if constexpr (!kIsPlain) {
    seen.entropy = add_up(seen.entropy);
    seen.collision = add_up(seen.collision);
    seen.smoothing = add_up(seen.smoothing);
    seen.weight = add_up(seen.weight);
  }
  RowState state;
  if (threadIdx.x == 0) {
    const float logit = label >= 0 ? to_float(load(row + label)) : 0;
    state = finish_state(seen, label >= 0, logit, label >= 0 ? job.weight(label) : 0, transform);
    if (job.largest != nullptr) job.largest[i] = label >= 0 ? max_nan(seen.max, logit) : seen.max;
    if (std::isnan(state.max)) state = {state.max, state.max, state.max, state.max, state.max, state.max, -1};
  }
  if constexpr (!kIsPlain) {
    TILELOSS_SHARED(float, largest);
    using Columns = std::int64_t[kWarp];
    using Sums = double[kWarp];
    TILELOSS_SHARED(Columns, columns);
    TILELOSS_SHARED(Sums, sums);
    if (threadIdx.x == 0) largest = state.max;
    __syncthreads();
    state.max = largest;
    const bool is_sum_lost = std::isinf(state.max) && (job.sums & kSmoothingSum) != 0;
    if (!std::isnan(state.max) && ((job.sums & kArgmax) != 0 || is_sum_lost))
      look_again(row, job, transform, state, columns, sums);
  }
  if (threadIdx.x == 0) job.rows.states[i] = state;
}

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_ROW_FORWARD_H_
