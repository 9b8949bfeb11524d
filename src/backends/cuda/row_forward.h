// A row's state, by one block that reads it once, or of one slice by each block of a cluster.
#pragma once

#include "backends/cuda/exponents.h"
#include "backends/cuda/row_source.h"

namespace tileloss::impl::cuda {

// A row's largest logit, in every thread of the block.
template <class T, bool kMayBeMasked>
__device__ inline float largest_of(const T* row, std::int64_t columns, const AllowedColumns<kMayBeMasked>& allowed) {
  using Parts = float[kWarp];
  TILELOSS_SHARED(Parts, parts);
  float largest = -kInfinity;
  for (std::int64_t j = threadIdx.x; j < columns; j += blockDim.x) {
    if (allowed.has(j)) largest = max_nan(largest, to_float(load(row + j)));
  }
  return reduce_block(largest, parts, -kInfinity, [](float a, float b) { return max_nan(a, b); });
}

// What a thread has seen of a row, its label left out. Sums are of 2^t. A gradient in float32 shows each rounding of the first.
template <class T, bool kIsPlain>
struct Seen {
  using Sum = std::conditional_t<sizeof(T) == 4, double, float>;
  float max = -kInfinity;  // logit, as it lies in memory
  typename Exponents<T, kIsPlain>::Top top;
  Sum sum = 0;
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
      entropy = factor == 0 ? 0 : factor * (entropy + shift * static_cast<float>(sum));
      collision *= factor * factor;
      if (weight != 0 && !is_empty) smoothing += shift * weight;
    }
    sum *= factor;
  }
  // Of other columns; both at the larger maximum.
  __device__ __forceinline__ void add(Seen other, const Exponents<T, kIsPlain>& exponents) {
    const float both = max_nan(max, other.max);
    if (!(both == max)) move_to(both, exponents);
    if (!(both == other.max)) other.move_to(both, exponents);
    sum += other.sum;
    if constexpr (!kIsPlain) {
      entropy += other.entropy;
      collision += other.collision;
      smoothing += other.smoothing;
      weight += other.weight;
    }
  }
  // Of all lanes of the warp, in every lane.
  __device__ __forceinline__ void add_lanes(const Exponents<T, kIsPlain>& exponents) {
    float all = max;
#pragma unroll
    for (int k = kWarp / 2; k > 0; k /= 2) all = max_nan(all, __shfl_xor_sync(kAllLanes, all, k));
    if (!(all == max)) move_to(all, exponents);
    each_sum([](auto& x) {
#pragma unroll
      for (int k = kWarp / 2; k > 0; k /= 2) x += __shfl_xor_sync(kAllLanes, x, k);
    });
  }

  // As kNumbers numbers, for other threads.
  static constexpr int kNumbers = (kIsPlain ? 2 : 6) + sizeof(Sum) / 8;
  __device__ __forceinline__ void save(float* to) {
    *to = max;
    each_sum([&](auto& x) { *++to = static_cast<float>(x); });
    if constexpr (sizeof(Sum) == 8) *++to = static_cast<float>(sum - static_cast<float>(sum));
  }
  __device__ __forceinline__ void load(const float* from, const Exponents<T, kIsPlain>& exponents) {
    max = *from;
    top = exponents.top(max);
    each_sum([&](auto& x) { x = *++from; });
    if constexpr (sizeof(Sum) == 8) sum += *++from;
  }

 private:
  template <class Visit>
  __device__ __forceinline__ void each_sum(Visit&& visit) {
    visit(sum);
    if constexpr (!kIsPlain) visit(entropy), visit(collision), visit(smoothing), visit(weight);
  }
};

// Pairs, then pairs of pairs: beside a 1 each number is rounded a few times, and not once for each that comes after it.
template <int kCount>
__device__ __forceinline__ float sum_in_pairs(float (&numbers)[kCount]) {
#pragma unroll
  for (int apart = 1; apart < kCount; apart *= 2) {
#pragma unroll
    for (int q = 0; q + apart < kCount; q += 2 * apart) numbers[q] += numbers[q + apart];
  }
  return numbers[0];
}

// Those of these columns that are `in`, a bit each.
template <class T, bool kIsPlain>
__device__ __forceinline__ void see(Seen<T, kIsPlain>& seen, const float (&x)[Group<T>::kCount], unsigned in, std::int64_t column,
                                    const Exponents<T, kIsPlain>& exponents, const SweepJob& job) {
  float max = seen.max;
#pragma unroll
  for (int q = 0; q < Group<T>::kCount; ++q) {
    if ((in >> q & 1) != 0) max = max_nan(max, x[q]);
  }
  if (!(max == seen.max)) seen.move_to(max, exponents);
  constexpr int kCount = Group<T>::kCount;
  float powers[kCount] = {}, entropies[kCount] = {}, collisions[kCount] = {};
#pragma unroll
  for (int q = 0; q < kCount; ++q) {
    if ((in >> q & 1) == 0) continue;
    const auto [t, e] = exponents.power(x[q], seen.top);
    powers[q] = e;
    if constexpr (!kIsPlain) {
      if (e != 0) entropies[q] = e * t;
      collisions[q] = e * e;
      if ((job.sums & kSmoothingSum) != 0) {
        const float c = job.weight(column + q);
        seen.smoothing += c * t;
        seen.weight += c;
      }
    }
  }
  seen.sum += sum_in_pairs(powers);
  if constexpr (!kIsPlain) {
    seen.entropy += sum_in_pairs(entropies);
    seen.collision += sum_in_pairs(collisions);
  }
}

// The exponents of 16-bit rows in one instruction each: t = x scale + bias, bias being -top scale rounded. Of what that rounding
// is t is off by the same for all columns, which is known to the last digit and comes off their sum at the end. For tops of any
// use; the others, masks say, are too large for it.
__device__ __forceinline__ float bias_of(float top, float scale) { return top == -kInfinity ? 0 : -(top * scale); }
__device__ __forceinline__ bool is_bias_fine(float bias) { return std::fabs(bias) <= 0x1p20f; }
__device__ __forceinline__ float bias_error(float bias, float top, float scale) { return std::fma(top, scale, bias); }

// What a thread has seen of a 16-bit row, two numbers at a time. The label is -inf here.
template <class T>
struct SeenPairs {
  static constexpr std::uint32_t kNothing = from_float<T>(-kInfinity).bits;
  std::uint32_t max = kNothing << 16 | kNothing;  // of all low halves, and of all high ones
  float bias = 0, sum = 0;                        // of 2^(x scale + bias)

  __device__ __forceinline__ float top() const {
    float low, high;
    unpack(max, T{}, low, high);
    return max_nan(low, high);
  }
  template <int kGroups>
  __device__ __forceinline__ void see(const uint4 (&groups)[kGroups], float scale) {
    std::uint32_t larger = max;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      larger = max_of_pairs(max_of_pairs(larger, groups[k].x, T{}), groups[k].y, T{});
      larger = max_of_pairs(max_of_pairs(larger, groups[k].z, T{}), groups[k].w, T{});
    }
    if (larger != max) [[unlikely]] {
      max = larger;
      const float moved = bias_of(top(), scale);
      sum = sum == 0 ? 0 : sum * exp2_approx(moved - bias);
      bias = moved;
    }
    float sums[kGroups];
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      Group<T> x = Group<T>::unpacked(groups[k]);
#pragma unroll
      for (float& value : x.values) value = exp2_approx(std::fma(value, scale, bias));
      sums[k] = sum_in_pairs(x.values);
    }
    sum += sum_in_pairs(sums);
  }
};

// A column of some groups, the one at this place, is -inf from now on.
template <class T, int kGroups>
__device__ __forceinline__ void leave_out(uint4 (&groups)[kGroups], int place) {
  const std::uint32_t shift = place % 2 * 16, nothing = std::uint32_t{SeenPairs<T>::kNothing} << shift;
  const std::uint32_t others = 0xffff0000u >> shift;
  const auto without = [&](std::uint32_t word, int number) { return number == place / 2 ? (word & others) | nothing : word; };
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    const uint4 w = groups[k];
    groups[k] = {without(w.x, 4 * k), without(w.y, 4 * k + 1), without(w.z, 4 * k + 2), without(w.w, 4 * k + 3)};
  }
}

// Groups g, g + kWarp, ..., but the label.
template <class T, bool kIsPlain, int kGroups>
__device__ __forceinline__ void see_groups(Seen<T, kIsPlain>& seen, const uint4 (&words)[kGroups],
                                           const unsigned (&allowed)[kGroups], int g, const Span& span, std::int64_t label,
                                           const Exponents<T, kIsPlain>& exponents, const SweepJob& job) {
  constexpr int kCount = Group<T>::kCount;
  constexpr unsigned kAll = (1u << kCount) - 1;
  const int label_group = label >= 0 ? static_cast<int>(label / kCount) : -1, label_place = static_cast<int>(label % kCount);
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    const int at = g + k * kWarp;
    const std::int64_t column = std::int64_t{at} * kCount;
    unsigned in = allowed[k];
    if (kGroups == 1 && at >= span.whole) in &= (1u << (job.columns - column)) - 1;
    if (at == label_group) in &= ~(1u << label_place);
    const Group<T> x = Group<T>::unpacked(words[k]);
    if (in == kAll) {
      see(seen, x.values, kAll, column, exponents, job);
    } else {
      see(seen, x.values, in, column, exponents, job);
    }
  }
}

// This thread's columns of a span, but the label's.
template <bool kAtOnce, class T, bool kIsPlain, class Source>
__device__ __forceinline__ void see_span(Seen<T, kIsPlain>& seen, const Source& source, const Span& span, std::int64_t label,
                                         const Exponents<T, kIsPlain>& exponents, const SweepJob& job) {
  for_each_visit<kAtOnce>(span, [&](int g, auto groups) {
    uint4 words[decltype(groups)::value];
    unsigned allowed[decltype(groups)::value];
    source.load(g, words, allowed);
    see_groups(seen, words, allowed, g, span, label, exponents, job);
  });
}

// The same, and as fast as it goes. `again`: where they can be found another time. The sum of a row of 16 bits is that of its
// pairs whatever else is asked for, so that logp has the same bits with an entropy and without.
template <class T, bool kIsPlain, class Source, class Again>
__device__ __forceinline__ Seen<T, kIsPlain> see_slice(const Source& source, const Again& again, const Span& span,
                                                       std::int64_t label, const Exponents<T, kIsPlain>& exponents,
                                                       const SweepJob& job) {
  Seen<T, kIsPlain> seen(exponents);
  if constexpr (sizeof(T) == 2) {
    if (!exponents.has_softcap) {
      constexpr int kCount = Group<T>::kCount;
      const int label_group = label >= 0 ? static_cast<int>(label / kCount) : -1;
      Span::Visit of_label = {-1, -1, 0};
      if (span.has(label_group)) of_label = span.visit_of(label_group);
      int until_label = of_label.thread == static_cast<int>(threadIdx.x) ? of_label.number : -1;
      const int place = of_label.group * kCount + static_cast<int>(label % kCount);
      const float scale = exponents.scale;
      SeenPairs<T> pairs;
      for_each_visit<true>(span, [&](int g, auto groups) {
        uint4 words[decltype(groups)::value];
        unsigned allowed[decltype(groups)::value];
        source.load(g, words, allowed);
        if constexpr (!kIsPlain) see_groups(seen, words, allowed, g, span, label, exponents, job);
        if (until_label-- == 0) [[unlikely]]
          leave_out<T>(words, place);
        pairs.see(words, scale);
      });
      if (is_bias_fine(pairs.bias)) {
        seen.max = pairs.top();
        seen.top = exponents.top(seen.max);
        seen.sum = pairs.sum * std::exp2(-bias_error(pairs.bias, seen.top.logit, scale));
      } else if constexpr (kIsPlain) {
        see_span<false>(seen, again, span, label, exponents, job);
      }
      return seen;
    }
  }
  see_span<Source::kAtOnce>(seen, source, span, label, exponents, job);
  return seen;
}

// The row's state: what all columns but the label's are, and the label's.
template <class T, bool kIsPlain>
__device__ inline RowState finish_state(const Seen<T, kIsPlain>& others, bool has_label, float label_logit, float label_weight,
                                        const LogitTransform& transform, bool has_others = true) {
  RowState s;
  s.max = has_others ? transform.value(others.max) : -kInfinity;
  const bool is_empty = !has_others || (!(transform.softcap > 0) && others.max == -kInfinity);
  if (has_label) {
    s.label_logit = transform.value(label_logit);
    if (!(s.max >= s.label_logit) && !std::isnan(s.max)) s.max = s.label_logit;
    if (is_empty || std::isnan(s.label_logit)) s.max = s.label_logit;
  }
  if (!std::isfinite(s.max)) return s;
  // In float32, as the blocks of an LM head keep it: for the same bits.
  double sum = static_cast<float>(others.sum), entropy = others.entropy / transform.log2e, collision = others.collision;
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

// All of it, where a column is NaN or the label is no class.
__device__ inline RowState or_nan(const RowState& state, std::int64_t label) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  if (std::isnan(state.max) || label == kBadLabel) return {kNan, kNan, kNan, kNan, kNan, kNan, -1};
  return state;
}

// The first column whose logit is the largest, as a column of the whole vocabulary; and of a row whose largest is infinite
// sum_j c_j z_j. Of some columns.
struct SecondLook {
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::int64_t first;
  double sum;
};
template <class T, class Source>
__device__ __forceinline__ SecondLook look_again(const Source& source, const Span& span, const SweepJob& job,
                                                 const LogitTransform& transform, float max) {
  constexpr int kCount = Group<T>::kCount;
  SecondLook found = {SecondLook::kNone, 0};
  for_each_visit<false>(span, [&](int g, auto /*groups*/) {
    uint4 words[1];
    unsigned allowed[1];
    source.load(g, words, allowed);
    const Group<T> x = Group<T>::unpacked(words[0]);
#pragma unroll
    for (int q = 0; q < kCount; ++q) {
      const std::int64_t j = std::int64_t{g} * kCount + q;
      if (j >= job.columns) break;
      if ((allowed[0] >> q & 1) == 0) continue;
      if (found.first == SecondLook::kNone && transform.value(x.values[q]) == max) found.first = j;
      if (std::isinf(max)) found.sum += static_cast<double>(job.weight(j)) * transform.exact_value(x.values[q]);
    }
  });
  return found;
}

// The row's state, in the first thread of the cluster's first block, from what each thread has seen of its block's span; the
// others get none. `parts` is of each block.
using WarpSums = float[kWarp * 7];
template <class T, bool kIsPlain, class Source>
__device__ __forceinline__ RowState state_of_cluster(Seen<T, kIsPlain> seen, WarpSums& parts, const Source& source,
                                                     const Span& span, std::int64_t i, std::int64_t label, float label_logit,
                                                     const SweepJob& job, const LogitTransform& transform, float& largest) {
  constexpr int kNumbers = Seen<T, kIsPlain>::kNumbers;
  const Exponents<T, kIsPlain> exponents(transform);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const unsigned ranks = cluster_size();
  const bool is_first = cluster_rank() == 0 && threadIdx.x == 0;
  if (lane == 0) seen.save(parts + warp * kNumbers);
  cluster_sync();
  RowState state;
  if (cluster_rank() == 0 && warp == 0) {
    // Some of the other blocks' at once: all of them one after the other would be most of what the cluster waits for.
    constexpr unsigned kAtOnce = kIsPlain ? kMaxCluster : 1;
    const bool has_warp = lane < static_cast<int>(blockDim.x) / kWarp;
    seen = Seen<T, kIsPlain>(exponents);
#pragma unroll 1
    for (unsigned from = 0; from < ranks && has_warp; from += kAtOnce) {
      float others[kAtOnce][kNumbers];
#pragma unroll
      for (unsigned k = 0; k < kAtOnce; ++k) {
        if (from + k >= ranks) continue;
        const float* const peer = cluster_peer(&parts[lane * kNumbers], from + k);
#pragma unroll
        for (int n = 0; n < kNumbers; ++n) others[k][n] = peer[n];
      }
#pragma unroll
      for (unsigned k = 0; k < kAtOnce; ++k) {
        if (from + k >= ranks) continue;
        Seen<T, kIsPlain> other(exponents);
        other.load(others[k], exponents);
        seen.add(other, exponents);
      }
    }
    seen.add_lanes(exponents);
  }
  if (is_first) {
    largest = label >= 0 ? max_nan(seen.max, label_logit) : seen.max;
    // A softcap makes a column of -inf finite, but none of none.
    const bool has_others = kIsPlain || job.rows.classes == nullptr || job.rows.classes[i].count > (label >= 0 ? 1 : 0);
    state = or_nan(finish_state(seen, label >= 0, label_logit, label >= 0 ? job.weight(label) : 0, transform, has_others), label);
  }
  if constexpr (!kIsPlain) {
    if ((job.sums & (kArgmax | kSmoothingSum)) == 0) return state;
    TILELOSS_SHARED(float, max);
    TILELOSS_SHARED(SecondLook, found);
    using Columns = std::int64_t[kWarp];
    using Sums = double[kWarp];
    TILELOSS_SHARED(Columns, columns);
    TILELOSS_SHARED(Sums, sums);
    for (unsigned rank = 0; is_first && rank < ranks; ++rank) *cluster_peer(&max, rank) = state.max;
    cluster_sync();
    const bool is_sum_lost = std::isinf(max) && (job.sums & kSmoothingSum) != 0;
    if (std::isnan(max) || ((job.sums & kArgmax) == 0 && !is_sum_lost)) return state;
    SecondLook own = look_again<T>(source, span, job, transform, max);
    own.first = reduce_block(own.first, columns, SecondLook::kNone, [](auto a, auto b) { return a < b ? a : b; });
    own.sum = reduce_block(own.sum, sums, 0.0, [](double a, double b) { return a + b; });
    if (threadIdx.x == 0) found = own;
    cluster_sync();
    for (unsigned rank = 1; is_first && rank < ranks; ++rank) {
      const SecondLook other = *cluster_peer(&found, rank);
      own = {min(own.first, other.first), own.sum + other.sum};
    }
    state.argmax = own.first == SecondLook::kNone ? -1 : job.first_column + own.first;
    if (is_sum_lost) state.smoothing_sum = static_cast<float>(own.sum);
  }
  return state;
}

// kIsPlain: no sums but the one, no softcap.
template <class T, bool kIsPlain, bool kMayBeMasked>
__global__ void __launch_bounds__(kMaxRowThreads, kIsPlain && sizeof(T) == 2 ? kPlainBlocks : 1)
    forward_rows(const __grid_constant__ SweepJob job) {
  begin_kernel();
  TILELOSS_SHARED(WarpSums, parts);
  const std::int64_t i = blockIdx.x;
  const std::int64_t label = job.rows.label_columns[i];
  if (label == kIgnoredRow) {
    if (threadIdx.x == 0) job.rows.states[i] = RowState();
    return;
  }
  const RowInMemory<T, kMayBeMasked> row(job, i);
  row.prefetch_allowed(all_of<T>(job));
  const LogitTransform& transform = *job.transform;  // no copy: its registers are the sweep's
  const Exponents<T, kIsPlain> exponents(transform);
  Seen<T, kIsPlain> seen(exponents);
  for (int slice = 0; slice < job.slices; ++slice) {
    Seen<T, kIsPlain> of_slice = see_slice(row, row, slice_of<T>(job, slice), label, exponents, job);
    of_slice.add_lanes(exponents);
    seen.add(of_slice, exponents);
  }
  const float label_logit = threadIdx.x == 0 && label >= 0 ? to_float(load(row.data + label)) : 0;
  float largest;
  const RowState state = state_of_cluster(seen, parts, row, all_of<T>(job), i, label, label_logit, job, transform, largest);
  if (threadIdx.x != 0) return;
  job.rows.states[i] = state;
  if (job.largest != nullptr) job.largest[i] = largest;
}

}  // namespace tileloss::impl::cuda
