// What kernels use of the machine: every instruction that C++ has no name for, a wrapper each. For nvcc, and for g++ over the
// tests' own cuda_runtime.h, which runs kernels on the host.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "backends/cuda/limits.h"
#include "core/number_formats.h"

#if defined(__CUDACC__)
// A variable of the block's, not initialised.
#define TILELOSS_SHARED(type, name) __shared__ type name
// What the launch gives it besides, one array a kernel.
#define TILELOSS_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

namespace tileloss::impl::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

// 2^x, as the special function unit has it: to two units in the last place, 0 for what is not normal.
#if defined(__CUDACC__)
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
using cuda_on_host::exp2_approx;
#endif

// 2^(x + rest) to the last place but one, 0 for what is not normal; x is not much above 0, the rest its rounding.
__device__ __forceinline__ float exp2_fine(float x, float rest) {
  if (x < -126) return 0;
  const float n = std::rint(x), f = x - n + rest;  // from -1/2 to 1/2
  float p = 1.535336188319500e-4f;
  p = std::fma(p, f, 1.339887440266574e-3f);
  p = std::fma(p, f, 9.618437357674640e-3f);
  p = std::fma(p, f, 5.550332471162809e-2f);
  p = std::fma(p, f, 2.402264791363012e-1f);
  p = std::fma(p, f, 6.931472028550421e-1f);
  p = std::fma(p, f, 1.0f);
  if (!(x < 1)) return std::isnan(x) ? x : std::exp2(x);
  return p * std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
}

// The larger one; NaN where one is.
__device__ __forceinline__ float max_nan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a > b || std::isnan(a) ? a : b;
#endif
}

// Two numbers of a word of memory.
__device__ __forceinline__ void unpack(std::uint32_t word, Bfloat16 /*format*/, float& low, float& high) {
  low = __uint_as_float(word << 16);
  high = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unpack(std::uint32_t word, Float16 /*format*/, float& low, float& high) {
#if defined(__CUDA_ARCH__)
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(word));
#else
  low = to_float(Float16{static_cast<std::uint16_t>(word)});
  high = to_float(Float16{static_cast<std::uint16_t>(word >> 16)});
#endif
}
__device__ __forceinline__ std::uint32_t pack(float low, float high, Bfloat16 /*format*/) {
#if defined(__CUDA_ARCH__)
  std::uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return from_float<Bfloat16>(low).bits | std::uint32_t{from_float<Bfloat16>(high).bits} << 16;
#endif
}
__device__ __forceinline__ std::uint32_t pack(float low, float high, Float16 /*format*/) {
#if defined(__CUDA_ARCH__)
  std::uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return from_float<Float16>(low).bits | std::uint32_t{from_float<Float16>(high).bits} << 16;
#endif
}

// The larger ones of two words of two numbers each; NaN where one is.
template <class T>
__device__ __forceinline__ std::uint32_t max_of_pairs(std::uint32_t a, std::uint32_t b, T format) {
#if defined(__CUDA_ARCH__)
  std::uint32_t word;
  if constexpr (std::is_same_v<T, Bfloat16>) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  }
  return word;
#else
  float low[2], high[2];
  unpack(a, format, low[0], high[0]);
  unpack(b, format, low[1], high[1]);
  return pack(max_nan(low[0], low[1]), max_nan(high[0], high[1]), format);
#endif
}

// What sweeps read and write of rows, so that the host can count it and see that it is theirs.
template <class Value>
__device__ __forceinline__ Value load(const Value* from) {
#if !defined(__CUDACC__)
  cuda_on_host::count_load(from, sizeof(Value));
#endif
  return *from;
}
template <class Value>
__device__ __forceinline__ void store(Value* to, Value value) {
#if !defined(__CUDACC__)
  cuda_on_host::count_store(to, sizeof(Value));
#endif
  *to = value;
}
// Its line is on its way to the L2 cache from now on.
__device__ __forceinline__ void prefetch(const void* from) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" : : "l"(__cvta_generic_to_global(from)));
#else
  static_cast<void>(from);
#endif
}
// In one instruction: the compiler makes four of it. `to` is aligned to 16.
__device__ __forceinline__ void store_16_bytes(void* to, uint4 words) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
#else
  store(static_cast<uint4*>(to), words);
#endif
}

// The first statement of every kernel. The kernel that is ahead in the stream may still run, where the launch let it (Launch):
// what it wrote is there past this, and nothing of memory is touched before. Only then may the next kernel's blocks come in, so
// one that waits for this kernel has waited for all that came before it, too, and so has a kernel of somebody else's that reads
// some things before it waits. They take no room from this one's: they come when each of its blocks has been here.
#if defined(__CUDACC__)
__device__ __forceinline__ void begin_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#else
using cuda_on_host::begin_kernel;
#endif

// Copies into the block's memory that go on while the thread does: in groups, each of what was begun since the last one ended.
// They are there for the thread that began them, once it has waited for their group.
__device__ __forceinline__ void begin_copy_of_16_bytes(void* to_shared, const void* from) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(to_shared))), "l"(from)
               : "memory");
#elif !defined(__CUDACC__)
  cuda_on_host::count_load(from, 16);
  cuda_on_host::begin_copy(to_shared, from, 16);
#endif
}
__device__ __forceinline__ void end_copy_group() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#elif !defined(__CUDACC__)
  cuda_on_host::end_copy_group();
#endif
}
// For all groups of this thread but the last `kOthers`.
template <int kOthers>
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;" : : "n"(kOthers) : "memory");
#elif !defined(__CUDACC__)
  cuda_on_host::wait_for_copies(kOthers);
#endif
}

// The blocks of a cluster: a block alone where the GPU has no clusters.
#if defined(__CUDACC__)
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ unsigned cluster_size() {
  unsigned size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
  return size;
}
// All threads of the cluster have come here, and what each of them wrote before is there for the others.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
// The same in two parts: past the second all threads have come to the first. Of what a thread does in between nothing is said.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// What lies in the shared memory of block `rank` where `mine` lies in this one's.
template <class T>
__device__ __forceinline__ T* cluster_peer(T* mine, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  T* peer;
  asm("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(mine), "r"(rank));
  return peer;
#else
  return mine;
#endif
}
#else
using cuda_on_host::cluster_arrive;
using cuda_on_host::cluster_peer;
using cuda_on_host::cluster_rank;
using cuda_on_host::cluster_size;
using cuda_on_host::cluster_sync;
using cuda_on_host::cluster_wait;
#endif

// Neighbouring columns of a row, 16 bytes of them.
template <class T>
struct Group {
  static constexpr int kCount = 16 / sizeof(T);
  float values[kCount];

  __device__ __forceinline__ static Group unpacked(uint4 words) {
    const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
    Group g;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(T) == 4) {
        g.values[w] = __uint_as_float(all[w]);
      } else {
        unpack(all[w], T{}, g.values[2 * w], g.values[2 * w + 1]);
      }
    }
    return g;
  }
  // Of the first `count` columns; the others are -inf.
  __device__ __forceinline__ static Group load_some(const T* from, int count) {
    Group g;
#pragma unroll
    for (int q = 0; q < kCount; ++q) g.values[q] = q < count ? to_float(load(from + q)) : -std::numeric_limits<float>::infinity();
    return g;
  }
  __device__ __forceinline__ uint4 packed() const {
    std::uint32_t all[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(T) == 4) {
        all[w] = __float_as_uint(values[w]);
      } else {
        all[w] = pack(values[2 * w], values[2 * w + 1], T{});
      }
    }
    return {all[0], all[1], all[2], all[3]};
  }
  __device__ __forceinline__ void store(T* to) const { store_16_bytes(to, packed()); }
  __device__ __forceinline__ void store_some(T* to, int count) const {
#pragma unroll
    for (int q = 0; q < kCount; ++q) {
      if (q < count) cuda::store(to + q, from_float<T>(values[q]));
    }
  }
};

// whole(g, group), or some(g, group, columns) where it is not aligned to 16 bytes or not whole, for each group of a row that is
// this thread's: by column number, wherever the row lies, so that its bits do not depend on that. `is_aligned`: of all that the
// visits write, too. Some groups are under way at a time.
template <class T, class Whole, class Some>
__device__ __forceinline__ void for_each_group(const T* row, std::int64_t columns, bool is_aligned, Whole&& whole, Some&& some) {
  constexpr int kCount = Group<T>::kCount, kAtOnce = 4;
  const int groups = static_cast<int>(columns / kCount), rest = static_cast<int>(columns % kCount);
  const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  const auto* const words = reinterpret_cast<const uint4*>(row);
  int g = first;
  if (is_aligned) {
    for (; g + (kAtOnce - 1) * step < groups; g += kAtOnce * step) {
      uint4 loaded[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) loaded[k] = load(words + g + k * step);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) whole(g + k * step, Group<T>::unpacked(loaded[k]));
    }
#pragma unroll 1
    for (; g < groups; g += step) whole(g, Group<T>::unpacked(load(words + g)));
  } else {
#pragma unroll 1
    for (; g < groups; g += step) some(g, Group<T>::load_some(row + std::int64_t{g} * kCount, kCount), kCount);
  }
  if (rest > 0 && groups % step == first) some(groups, Group<T>::load_some(row + std::int64_t{groups} * kCount, rest), rest);
}

__device__ __forceinline__ bool is_aligned_to_16(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

// Of all threads of a block of whole warps, in every thread of it, in a fixed order. `parts` has a place for each warp; nobody
// may read or write it before all threads have come here again or to another barrier.
template <class T, class Combine>
__device__ __forceinline__ T reduce_block(T value, T* parts, T nothing, Combine&& combine) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll
  for (int k = kWarp / 2; k > 0; k /= 2) value = combine(value, __shfl_xor_sync(kAllLanes, value, k));
  if (warps == 1) return value;
  __syncthreads();
  if (lane == 0) parts[warp] = value;
  __syncthreads();
  value = lane < warps ? parts[lane] : nothing;
#pragma unroll
  for (int k = kWarp / 2; k > 0; k /= 2) value = combine(value, __shfl_xor_sync(kAllLanes, value, k));
  return value;
}

}  // namespace tileloss::impl::cuda
