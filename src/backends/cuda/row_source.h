// Where a sweep finds a row's columns, and which of them are whose. Columns go to slices, threads and rounds by their number
// alone, wherever the row lies and whatever kernel reads it: so its bits depend on neither.
#pragma once

#include "backends/cuda/allowed_columns.h"

namespace tileloss::impl::cuda {

inline constexpr int kGroupsAtOnce = 4;

// Groups of neighbouring columns, 16 bytes each. The threads of a block take it in rounds of kGroupsAtOnce groups each, a warp
// groups that lie together; what is left of it then, the ragged end of a row, too, in rounds of one.
struct Span {
  int begin, end;
  int whole;  // groups from here on are ragged

  __device__ __forceinline__ static int round() { return kGroupsAtOnce * static_cast<int>(blockDim.x); }
  __device__ __forceinline__ int rounds() const { return max(min(end, whole) - begin, 0) / round(); }

  struct Visit {
    int thread;
    int number;  // of the thread's visits
    int group;   // of those that it has at once
  };
  // The first group of this thread's rounds.
  __device__ __forceinline__ int first() const {
    const int thread = static_cast<int>(threadIdx.x);
    return begin + thread / kWarp * (kGroupsAtOnce * kWarp) + thread % kWarp;
  }
  __device__ __forceinline__ bool has(int g) const { return g >= begin && g < end; }
  __device__ __forceinline__ Visit visit_of(int g) const {
    const int number = min((g - begin) / round(), rounds()), left = g - begin - number * round();
    if (number == rounds()) {
      const int step = static_cast<int>(blockDim.x);
      return {left % step, number + left / step, 0};
    }
    const int in_warp = left % (kGroupsAtOnce * kWarp);
    return {left / (kGroupsAtOnce * kWarp) * kWarp + in_warp % kWarp, number, in_warp / kWarp};
  }
};

// A cluster's block holds a slice of a row.
template <class T>
__device__ __forceinline__ Span slice_of(const SweepJob& job, int slice) {
  constexpr int kCount = Group<T>::kCount;
  const int groups = static_cast<int>((job.columns + kCount - 1) / kCount), each = (groups + job.slices - 1) / job.slices;
  const int begin = min(slice * each, groups);
  return {begin, min(begin + each, groups), static_cast<int>(job.columns / kCount)};
}
template <class T>
__device__ __forceinline__ Span all_of(const SweepJob& job) {
  constexpr int kCount = Group<T>::kCount;
  return {0, static_cast<int>((job.columns + kCount - 1) / kCount), static_cast<int>(job.columns / kCount)};
}

// visit(g, groups) for this thread's groups g, g + kWarp, ... of a span, so many of them; a std::integral_constant. Those of a
// round at once, or one by one.
template <bool kAtOnce, class Visit>
__device__ __forceinline__ void for_each_visit(const Span& span, Visit&& visit) {
  const int thread = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  const int end_of_rounds = span.begin + span.rounds() * Span::round();
  int g = span.first();
#pragma unroll 1
  for (; g < end_of_rounds; g += Span::round()) {
    if constexpr (kAtOnce) {
      visit(g, std::integral_constant<int, kGroupsAtOnce>());
    } else {
#pragma unroll 1
      for (int k = 0; k < kGroupsAtOnce; ++k) visit(g + k * kWarp, std::integral_constant<int, 1>());
    }
  }
#pragma unroll 1
  for (g = end_of_rounds + thread; g < span.end; g += step) visit(g, std::integral_constant<int, 1>());
}

// A row in the GPU's memory: vectors where it is aligned to 16 bytes, single columns elsewhere, nothing outside it.
template <class T, bool kMayBeMasked>
struct RowInMemory {
  static constexpr bool kAtOnce = true;  // so that loads are under way
  static constexpr int kCount = Group<T>::kCount;
  const T* data;
  std::int64_t columns;
  bool is_aligned;
  AllowedColumns<kMayBeMasked> allowed;

  __device__ __forceinline__ RowInMemory(const SweepJob& job, std::int64_t i, bool is_gradient = false)
      : data(job.logits.row<T>(i)), columns(job.columns), is_aligned(is_aligned_to_16(data)), allowed(job, i, is_gradient) {}

  __device__ __forceinline__ int count(int g) const {
    const std::int64_t left = columns - std::int64_t{g} * kCount;
    return left < kCount ? static_cast<int>(left) : kCount;
  }
  __device__ __forceinline__ bool is_vector(int g) const { return is_aligned && count(g) == kCount; }
  __device__ __forceinline__ const uint4* vector(int g) const { return reinterpret_cast<const uint4*>(data) + g; }
  // The words of a span are on their way from now on, before all that waits for them.
  __device__ __forceinline__ void prefetch_allowed(const Span& span) const {
    allowed.prefetch(std::int64_t{span.begin} * kCount, min(std::int64_t{span.end} * kCount, columns));
  }
  // What this thread reads first.
  __device__ __forceinline__ void prefetch(const Span& span) const {
    for (int k = 0, g = span.first(); k < kGroupsAtOnce && g < span.end; ++k, g += kWarp) cuda::prefetch(vector(g));
  }
  // -inf where the row has no more columns. Columns of 16 bits stay as they are: as floats, of some groups at once, they would
  // take more registers than a thread has.
  __device__ __forceinline__ uint4 by_columns(int g) const {
    const T* const from = data + std::int64_t{g} * kCount;
    if constexpr (sizeof(T) == 4) {
      return Group<T>::load_some(from, count(g)).packed();
    } else {
      const int some = count(g);
      std::uint32_t words[4] = {};
#pragma unroll
      for (int q = 0; q < kCount; ++q) {
        const T column = q < some ? cuda::load(from + q) : from_float<T>(-kInfinity);
        words[q / 2] |= std::uint32_t{column.bits} << q % 2 * 16;
      }
      return {words[0], words[1], words[2], words[3]};
    }
  }

  // With which columns are allowed. A group of none is not read.
  template <int kGroups>
  __device__ __forceinline__ void load(int g, uint4 (&words)[kGroups], unsigned (&in)[kGroups]) const {
    allowed.template find<kCount>(g, in);
#pragma unroll
    for (int k = 0; k < kGroups; ++k) words[k] = {};
    // Several at once are whole ones.
    if (kGroups > 1 ? is_aligned : is_vector(g)) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        if (in[k] != 0) words[k] = cuda::load(vector(g) + k * kWarp);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        if (in[k] != 0) words[k] = by_columns(g + k * kWarp);
      }
    }
    if (are_all<T>(in)) return;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) words[k] = leave_out_others<T>(words[k], in[k]);
  }
};

// A slice of it in the block's own memory. Each thread brings the groups there that it will visit, so that no other waits for
// them.
template <class T, bool kIsArriving, bool kMayBeMasked>
struct RowHeld {
  static constexpr int kAhead = 8;  // visits whose groups may be on their way during one
  static constexpr bool kAtOnce = false;
  static constexpr bool is_aligned = true;
  const uint4* held;  // of group `begin`
  int begin;
  AllowedColumns<kMayBeMasked> allowed;

  __device__ __forceinline__ static void bring(const RowInMemory<T, kMayBeMasked>& row, const Span& span, uint4* to) {
    int groups_of_copies = 1;  // with the last, which has all that is left
    if (row.is_aligned) {
      for_each_visit<true>(span, [&](int g, auto groups) {
        uint4* const at = to + (g - span.begin);
        unsigned in[decltype(groups)::value];
        row.allowed.template find<Group<T>::kCount>(g, in);
        if (groups > 1 || g < span.whole) {
#pragma unroll
          for (int k = 0; k < groups; ++k) {
            if (in[k] != 0) begin_copy_of_16_bytes(at + k * kWarp, row.vector(g) + k * kWarp);
          }
        } else {
          *at = row.by_columns(g);
        }
        if (groups_of_copies < kAhead) end_copy_group(), ++groups_of_copies;
      });
    } else {
      for_each_visit<false>(span, [&](int g, auto /*groups*/) { to[g - span.begin] = row.by_columns(g); });
    }
    for (; groups_of_copies <= kAhead; ++groups_of_copies) end_copy_group();
  }
  template <int kGroups>
  __device__ __forceinline__ void load(int g, uint4 (&words)[kGroups], unsigned (&in)[kGroups]) const {
    // An empty group more for each visit: what is not in the last kAhead has arrived.
    if constexpr (kIsArriving) end_copy_group(), wait_for_copies<kAhead>();
#pragma unroll
    for (int k = 0; k < kGroups; ++k) words[k] = held[g - begin + k * kWarp];
    allowed.template find<Group<T>::kCount>(g, in);
    if (are_all<T>(in)) return;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) words[k] = leave_out_others<T>(words[k], in[k]);
  }
};

}  // namespace tileloss::impl::cuda
