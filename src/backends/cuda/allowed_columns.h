// The columns that a row's softmax runs over, by the bits of tileloss_args.allowed: how sweeps look at them, and how many they
// are.
#pragma once

#include "backends/cuda/sweep_job.h"

namespace tileloss::impl::cuda {

// Which of a row's columns its softmax runs over. What is made for rows that all do has none of this; what may be asked either
// way looks whether there are words.
template <bool kMayBeMasked>
struct AllowedColumns {
  const std::uint32_t* words = nullptr;

  AllowedColumns() = default;
  // Row i's. Of a row without any all columns get their gradient, which is NaN.
  __device__ __forceinline__ AllowedColumns(const SweepJob& job, std::int64_t i, bool is_gradient = false) {
    if constexpr (kMayBeMasked) {
      if (!is_gradient || job.rows.classes == nullptr || job.rows.classes[i].count != 0) words = job.allowed.from(i, 0).words;
    }
  }
  // Of groups g, g + kWarp, ... of kCount columns each, a bit a column. A word serves a thread and its neighbours.
  template <int kCount, int kGroups>
  __device__ __forceinline__ void find(int g, unsigned (&in)[kGroups]) const {
    constexpr unsigned kAll = (1u << kCount) - 1, kInWord = 32 / kCount;
    const std::uint32_t* const from = words + static_cast<unsigned>(g) / kInWord;
    const unsigned shift = static_cast<unsigned>(g) % kInWord * kCount;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      in[k] = kAll;
      if constexpr (kMayBeMasked) {
        if (words != nullptr) in[k] = cuda::load(from + k * kWarp / kInWord) >> shift & kAll;
      }
    }
  }
  template <int kCount>
  __device__ __forceinline__ unsigned bits(int g) const {
    unsigned in[1];
    find<kCount>(g, in);
    return in[0];
  }
  __device__ __forceinline__ bool has(std::int64_t column) const { return bits<1>(static_cast<int>(column)) != 0; }
  // Those of these columns are on their way from memory, by the threads of the block.
  __device__ __forceinline__ void prefetch(std::int64_t begin, std::int64_t end) const {
    if constexpr (kMayBeMasked) {
      constexpr std::int64_t kLine = 1024;  // columns of 128 bytes
      for (std::int64_t j = begin + threadIdx.x * kLine; words != nullptr && j < end; j += blockDim.x * kLine)
        cuda::prefetch(words + j / 32);
    }
  }
};

// Whether all columns of some groups are allowed.
template <class T, int kGroups>
__device__ __forceinline__ bool are_all(const unsigned (&allowed)[kGroups]) {
  unsigned all = allowed[0];
#pragma unroll
  for (int k = 1; k < kGroups; ++k) all &= allowed[k];
  return all == (1u << Group<T>::kCount) - 1;
}

// A group's columns as they lie in memory, -inf where one is not allowed: for a softmax without softcap that is all.
template <class T>
__device__ __forceinline__ uint4 leave_out_others(uint4 group, unsigned allowed) {
  constexpr int kCount = Group<T>::kCount, kInWord = kCount / 4, kBits = 32 / kInWord;
  constexpr std::uint32_t kColumn = kInWord == 1 ? 0xffffffffu : 0xffffu;
  const std::uint32_t nothing =
      std::bit_cast<std::conditional_t<kInWord == 1, std::uint32_t, std::uint16_t>>(from_float<T>(-kInfinity));
  std::uint32_t all[4] = {group.x, group.y, group.z, group.w};
#pragma unroll
  for (int q = 0; q < kCount; ++q) {
    const int shift = q % kInWord * kBits;
    if ((allowed >> q & 1) == 0) all[q / kInWord] = (all[q / kInWord] & ~(kColumn << shift)) | nothing << shift;
  }
  return {all[0], all[1], all[2], all[3]};
}

}  // namespace tileloss::impl::cuda
