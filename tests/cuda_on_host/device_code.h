// What kernels call, on fibers (threads.h).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <source_location>

#include "tests/cuda_on_host/vector_types.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

// A block's own, 0xff at first, at the same place for all who come here; the key is the function's (a template's instance's) own.
#define TILELOSS_SHARED(type, name)     \
  static constexpr char name##_key = 0; \
  type& name = *static_cast<type*>(cuda_on_host::shared_memory(&name##_key, sizeof(type), alignof(type)))
#define TILELOSS_DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(cuda_on_host::dynamic_shared_memory())

// Of the thread that runs.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace cuda_on_host {

using Place = std::source_location;

void* shared_memory(const void* key, std::size_t bytes, std::size_t alignment);
void* dynamic_shared_memory();
void* peer_of(const void* mine, unsigned rank);

// All threads of the block, of the cluster, come to the same place.
void sync_block(Place at);
void sync_cluster(Place at);
// In two parts: they meet at the one or at the other, as chance has it for the cluster.
void arrive_at_cluster(Place at);
void wait_for_cluster(Place at);
// The lanes of the mask come to the same place. No fence for memory, as on the device.
std::uint64_t exchange(unsigned mask, std::uint64_t value, unsigned source_lane, Place at);
unsigned lane();

// Every thread of a kernel comes here, before it reads or writes what the wrappers below count.
void begin_kernel();

// Copies that go on by themselves, in groups of this thread. Each is done at some time from its begin to where its group is
// waited for: all but the last `others` groups.
void begin_copy(void* to, const void* from, std::size_t bytes, Place at = Place::current());
void end_copy_group();
void wait_for_copies(unsigned others);

inline void cluster_sync(Place at = Place::current()) { sync_cluster(at); }
inline void cluster_arrive(Place at = Place::current()) { arrive_at_cluster(at); }
inline void cluster_wait(Place at = Place::current()) { wait_for_cluster(at); }
unsigned cluster_rank();
unsigned cluster_size();
template <class T>
T* cluster_peer(T* mine, unsigned rank) {
  return static_cast<T*>(peer_of(mine, rank));
}

// ex2.approx.ftz.f32. What kernels call by the names of the C library is the device's, too (device_math.cpp).
float exp2_approx(float x);
float exp2_of_device(float x);  // std::exp2 in a kernel, ex2.approx.f32

// What was given to streams; and, for the kernels' wrappers of loads and stores of global memory, which stop where a device may
// not touch the address, what they moved.
struct Counters {
  std::uint64_t loaded = 0, stored = 0;  // bytes
  std::uint64_t queued = 0;              // kernels, fills and copies
  std::uint64_t overlapping = 0;         // kernels that may begin before the one ahead of them has ended
};
Counters& counters();
void count_load(const void* at, std::size_t bytes);
void count_store(const void* at, std::size_t bytes);

// What is written before a fence is there for who sees what is exchanged after it.
void fence();
void publish();

template <class T>
T shuffle(unsigned mask, T value, unsigned source_lane, Place at) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  return std::bit_cast<T>(static_cast<Bits>(exchange(mask, std::bit_cast<Bits>(value), source_lane, at)));
}

}  // namespace cuda_on_host

inline void __syncthreads(cuda_on_host::Place at = cuda_on_host::Place::current()) { cuda_on_host::sync_block(at); }
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, cuda_on_host::Place at = cuda_on_host::Place::current()) {
  return cuda_on_host::shuffle(mask, value, cuda_on_host::lane() ^ static_cast<unsigned>(flip), at);
}

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline int __popc(unsigned word) { return std::popcount(word); }
inline int atomicExch(int* at, int value) { return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST); }
template <class T>
T atomicAdd(T* at, T value) {
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
inline unsigned long long atomicMax(unsigned long long* at, unsigned long long value) {
  unsigned long long before = __atomic_load_n(at, __ATOMIC_SEQ_CST);
  while (before < value && !__atomic_compare_exchange_n(at, &before, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return before;
}
inline int atomicOr(int* at, int value) { return __atomic_fetch_or(at, value, __ATOMIC_SEQ_CST); }
inline int atomicCAS_system(int* at, int expected, int value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
inline int atomicExch_system(int* at, int value) {
  cuda_on_host::publish();
  return atomicExch(at, value);
}
inline void __threadfence() {}
inline void __threadfence_system() { cuda_on_host::fence(); }

using std::max;
using std::min;
