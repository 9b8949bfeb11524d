// Kernels on the host: what is right comes out the same for any order of blocks and threads; what is wrong is found.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/cuda_on_host/device_array.h"

namespace tileloss::test {
namespace {

using cuda_on_host::begin_kernel;

constexpr int kSeeds = 24;
constexpr unsigned kAll = ~0u;

enum class Fault {
  kNone,
  kNoBarrier,
  kNoSecondBarrier,
  kNoClusterBarrier,
  kLooksEarly,
  kLeavesEarly,
  kPastTheEnd,
  kReadsPastTheEnd,
  kNoFence,
  kNoWait,
  kWaitsForTooFew,
  kFillsEarly,
  kNotAligned,
  kNeverBegins,
  kReadsBeforeItBegins
};

template <class... Expected, class... Actual>
cudaError_t launch(dim3 grid, dim3 block, unsigned cluster, std::size_t dynamic, void (*kernel)(Expected...),
                   Actual... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = dynamic;
  config.attrs = &attribute, config.numAttrs = cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

std::vector<float> numbers(std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 7) - 2;
  return values;
}

__device__ float sum_of_warp(float value) {
  for (int k = 16; k > 0; k /= 2) value += __shfl_xor_sync(kAll, value, k);
  return value;
}

// What all threads get. It may be called again.
template <Fault kFault>
__device__ float sum_of_block(float value) {
  using Parts = float[32];
  TILELOSS_SHARED(Parts, parts);
  const unsigned warps = blockDim.x / 32;
  value = sum_of_warp(value);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  if (kFault != Fault::kNoBarrier) __syncthreads();
  value = threadIdx.x % 32 < warps ? parts[threadIdx.x % 32] : 0;
  if (kFault != Fault::kNoSecondBarrier) __syncthreads();
  return sum_of_warp(value);
}

template <Fault kFault>
__global__ void sums_of_blocks(const float* values, float* sums) {
  begin_kernel();
  const float first = sum_of_block<kFault>(values[blockIdx.x * blockDim.x + threadIdx.x]);
  const float second = sum_of_block<kFault>(first + static_cast<float>(threadIdx.x));
  sums[blockIdx.x * blockDim.x + threadIdx.x] = second;
}

template <Fault kFault>
std::vector<float> sums_of_blocks_with(int seed, unsigned blocks, unsigned threads) {
  cuda_on_host::set_seed(static_cast<std::uint64_t>(seed));
  const DeviceArray<float> values(numbers(std::size_t{blocks} * threads)), sums(std::size_t{blocks} * threads);
  EXPECT_EQ(launch(blocks, threads, 1, 0, sums_of_blocks<kFault>, values.data(), sums.data()), cudaSuccess);
  return sums.get();
}

std::vector<float> expected_sums_of_blocks(unsigned blocks, unsigned threads) {
  const std::vector<float> values = numbers(std::size_t{blocks} * threads);
  std::vector<float> sums;
  for (unsigned b = 0; b < blocks; ++b) {
    float first = 0, second = 0;  // whole numbers: exact in any order
    for (unsigned i = 0; i < threads; ++i) first += values[b * threads + i];
    for (unsigned i = 0; i < threads; ++i) second += first + static_cast<float>(i);
    sums.insert(sums.end(), threads, second);
  }
  return sums;
}

template <class Run>
int seeds_with_other_results(const Run& run, const std::vector<float>& expected) {
  int others = 0;
  for (int seed = 1; seed <= kSeeds; ++seed) others += run(seed) == expected ? 0 : 1;
  return others;
}

// A race: thread sanitizer stops at it (with halt_on_error), else many orders come to something else.
#if defined(__SANITIZE_THREAD__)
constexpr bool kSeesRaces = true;
#else
constexpr bool kSeesRaces = false;
#endif
template <class Run>
void expect_race(const Run& run, const std::vector<float>& expected, int seeds) {
  if (kSeesRaces) {
    EXPECT_DEATH(run(1), "data race");
  } else {
    EXPECT_GT(seeds_with_other_results(run, expected), seeds);
  }
}

TEST(CudaOnHost, SumsOfBlocksAreTheSameForAnySeed) {
  for (const unsigned threads : {32u, 128u, 1024u}) {
    const auto run = [&](int seed) { return sums_of_blocks_with<Fault::kNone>(seed, 5, threads); };
    EXPECT_EQ(seeds_with_other_results(run, expected_sums_of_blocks(5, threads)), 0) << threads << " threads";
  }
}

TEST(CudaOnHost, AMissingBarrierIsFound) {
  const auto run = [](int seed) { return sums_of_blocks_with<Fault::kNoBarrier>(seed, 2, 128); };
  expect_race(run, expected_sums_of_blocks(2, 128), kSeeds / 2);
}

TEST(CudaOnHost, AWriteBeforeTheOthersHaveReadIsFound) {
  const auto run = [](int seed) { return sums_of_blocks_with<Fault::kNoSecondBarrier>(seed, 8, 128); };
  expect_race(run, expected_sums_of_blocks(8, 128), kSeeds / 4);
}

__global__ void running_count(float* counts) {
  begin_kernel();
  if (threadIdx.x == 0) counts[blockIdx.x] = blockIdx.x == 0 ? 1 : counts[blockIdx.x - 1] + 1;
}

TEST(CudaOnHost, ABlockThatNeedsAnothersResultIsFound) {
  const auto run = [](int seed) {
    cuda_on_host::set_seed(static_cast<std::uint64_t>(seed));
    const DeviceArray<float> counts(8);
    launch(8, 32, 1, 0, running_count, counts.data());
    return counts.get();
  };
  expect_race(run, {1, 2, 3, 4, 5, 6, 7, 8}, kSeeds - 2);
}

// Rows of a cluster: a block keeps its part in dynamic shared memory, adds it, and reads the sums of its peers.
template <Fault kFault>
__global__ void sums_of_clusters(const float* values, float* sums) {
  begin_kernel();
  TILELOSS_DYNAMIC_SHARED(float, held);
  TILELOSS_SHARED(float, mine);
  if (kFault != Fault::kLooksEarly) cuda_on_host::cluster_sync();
  held[threadIdx.x] = values[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  const float own = sum_of_block<Fault::kNone>(held[blockDim.x - 1 - threadIdx.x]);
  if (threadIdx.x == 0) mine = own;
  if (kFault != Fault::kNoClusterBarrier && kFault != Fault::kLooksEarly) cuda_on_host::cluster_sync();
  float sum = 0;
  for (unsigned rank = 0; rank < cuda_on_host::cluster_size(); ++rank) sum += *cuda_on_host::cluster_peer(&mine, rank);
  if (kFault != Fault::kLeavesEarly) cuda_on_host::cluster_sync();
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum + static_cast<float>(cuda_on_host::cluster_rank());
}

template <Fault kFault>
std::vector<float> sums_of_clusters_with(int seed, unsigned clusters, unsigned size, unsigned threads) {
  cuda_on_host::set_seed(static_cast<std::uint64_t>(seed));
  const std::size_t count = std::size_t{clusters} * size * threads;
  const DeviceArray<float> values(numbers(count)), sums(count);
  EXPECT_EQ(launch(clusters * size, threads, size, threads * sizeof(float), sums_of_clusters<kFault>, values.data(), sums.data()),
            cudaSuccess);
  return sums.get();
}

std::vector<float> expected_sums_of_clusters(unsigned clusters, unsigned size, unsigned threads) {
  const std::vector<float> values = numbers(std::size_t{clusters} * size * threads);
  std::vector<float> sums;
  for (unsigned c = 0; c < clusters; ++c) {
    float sum = 0;
    for (unsigned i = 0; i < size * threads; ++i) sum += values[c * size * threads + i];
    for (unsigned i = 0; i < size * threads; ++i) sums.push_back(sum + static_cast<float>(i / threads));
  }
  return sums;
}

TEST(CudaOnHost, SumsOfClustersAreTheSameForAnySeed) {
  for (const unsigned size : {2u, 4u, 8u}) {
    const auto run = [&](int seed) { return sums_of_clusters_with<Fault::kNone>(seed, 3, size, 64); };
    EXPECT_EQ(seeds_with_other_results(run, expected_sums_of_clusters(3, size, 64)), 0) << size << " blocks";
  }
}

TEST(CudaOnHost, AMissingClusterBarrierIsFound) {
  const auto run = [](int seed) { return sums_of_clusters_with<Fault::kNoClusterBarrier>(seed, 3, 4, 64); };
  expect_race(run, expected_sums_of_clusters(3, 4, 64), kSeeds / 2);
}

TEST(CudaOnHostDeathTest, AReadOfAPeerThatMayNotHaveBegunStops) {
  EXPECT_DEATH(sums_of_clusters_with<Fault::kLooksEarly>(1, 3, 4, 64), "the shared memory of a block that may not have begun");
}

TEST(CudaOnHostDeathTest, AReadOfAPeerThatHasLeftStops) {
  EXPECT_DEATH(for (int seed = 1; seed <= kSeeds; ++seed) sums_of_clusters_with<Fault::kLeavesEarly>(seed, 3, 4, 64);
               , "the shared memory of a block that has left");
}

// A block's numbers come in two groups of copies to two halves of its memory, four numbers a thread; then the first half is
// filled again. What each thread adds up others brought.
template <Fault kFault>
__global__ void sums_of_copies(const float* values, float* sums) {
  begin_kernel();
  TILELOSS_DYNAMIC_SHARED(float, held);
  const unsigned count = 4 * blockDim.x, mine = 4 * threadIdx.x + (kFault == Fault::kNotAligned ? 1 : 0);
  for (unsigned half = 0; half < 2; ++half) {
    cuda_on_host::begin_copy(held + half * count + mine, values + half * count + mine, 16);
    cuda_on_host::end_copy_group();
  }
  float sum = 0;
  const auto add = [&](unsigned half) {
    for (unsigned i = 0; i < 4; ++i) sum += held[half * count + (threadIdx.x + i * blockDim.x)];
  };
  if (kFault != Fault::kNoWait) cuda_on_host::wait_for_copies(kFault == Fault::kWaitsForTooFew ? 2 : 1);
  __syncthreads();
  add(0);
  if (kFault != Fault::kFillsEarly) __syncthreads();
  cuda_on_host::begin_copy(held + mine, values + 2 * count + mine, 16);
  cuda_on_host::end_copy_group();
  cuda_on_host::wait_for_copies(0);
  __syncthreads();
  add(0);
  add(1);
  sums[threadIdx.x] = sum;
}

template <Fault kFault>
std::vector<float> sums_of_copies_with(int seed) {
  constexpr unsigned kThreads = 64;
  cuda_on_host::set_seed(static_cast<std::uint64_t>(seed));
  const DeviceArray<float> values(numbers(3 * 4 * kThreads)), sums(kThreads);
  EXPECT_EQ(launch(1, kThreads, 1, 2 * 4 * kThreads * sizeof(float), sums_of_copies<kFault>, values.data(), sums.data()),
            cudaSuccess);
  return sums.get();
}

std::vector<float> expected_sums_of_copies() {
  const std::vector<float> values = numbers(3 * 256);
  std::vector<float> sums(64);
  for (unsigned i = 0; i < 3 * 256; ++i) sums[i % 64] += values[i];
  return sums;
}

TEST(CudaOnHost, CopiesAreThereOnceTheyAreWaitedFor) {
  EXPECT_EQ(seeds_with_other_results(sums_of_copies_with<Fault::kNone>, expected_sums_of_copies()), 0);
}

TEST(CudaOnHost, FaultsOfCopiesAreFound) {
  const std::vector<float> expected = expected_sums_of_copies();
  EXPECT_EQ(seeds_with_other_results(sums_of_copies_with<Fault::kNoWait>, expected), kSeeds);
  EXPECT_EQ(seeds_with_other_results(sums_of_copies_with<Fault::kWaitsForTooFew>, expected), kSeeds);
  expect_race(sums_of_copies_with<Fault::kFillsEarly>, expected, kSeeds / 4);
}

TEST(CudaOnHostDeathTest, CopiesHaveRules) {
  EXPECT_DEATH(sums_of_copies_with<Fault::kNotAligned>(1), "a copy that is not aligned");
  float outside[4];
  EXPECT_DEATH(
      {
        launch(
            1, 1, 1, 0, +[](float* to) { cuda_on_host::begin_copy(to, to, 4); }, static_cast<float*>(outside));
        cudaDeviceSynchronize();
      },
      "a copy to what is no shared memory of the block");
}

__global__ void lanes(unsigned* results) {
  begin_kernel();
  const unsigned lane = threadIdx.x, half = lane < 16 ? 0xffffu : 0xffff0000u;
  unsigned* const mine = results + lane * 4;
  mine[0] = __shfl_xor_sync(kAll, lane, 7);
  mine[1] = __shfl_xor_sync(half, lane, 3);
  mine[2] = static_cast<unsigned>(__shfl_xor_sync(kAll, 1e300 * lane, 1) / 1e300 + 0.5);
  mine[3] = lane < 16 ? __shfl_xor_sync(half, lane, 16) : 0;  // what no lane of the mask has
}

TEST(CudaOnHost, LanesExchangeWhatCudaSays) {
  for (int seed = 1; seed <= kSeeds; ++seed) {
    cuda_on_host::set_seed(static_cast<std::uint64_t>(seed));
    const DeviceArray<unsigned> results(128);
    launch(1, 32, 1, 0, lanes, results.data());
    const std::vector<unsigned> got = results.get();
    for (unsigned i = 0; i < 32; ++i) {
      const std::vector<unsigned> expected = {i ^ 7, i ^ 3, i ^ 1, i < 16 ? kAll : 0u};
      EXPECT_EQ(std::vector<unsigned>(&got[i * 4], &got[i * 4] + 4), expected) << "lane " << i << ", seed " << seed;
    }
  }
}

__global__ void indices(unsigned* counts) {
  begin_kernel();
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  counts[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1;
}

TEST(CudaOnHost, EachThreadOfEachBlockRunsOnce) {
  const DeviceArray<unsigned> counts(std::vector<unsigned>(2 * 3 * 4 * 5 * 6 * 7));
  ASSERT_EQ(launch({2, 3, 4}, {5, 6, 7}, 1, 0, indices, counts.data()), cudaSuccess);
  EXPECT_EQ(counts.get(), std::vector<unsigned>(2 * 3 * 4 * 5 * 6 * 7, 1));
}

// The last one to come. Atomic, so that it is no race.
__global__ void last_block(int* last) {
  begin_kernel();
  atomicExch(last, static_cast<int>(blockIdx.x));
}
__global__ void last_thread(int* last) {
  begin_kernel();
  atomicExch(last, static_cast<int>(threadIdx.x));
}

TEST(CudaOnHost, TheOrderOfBlocksAndThreadsDependsOnTheSeed) {
  std::set<int> blocks, threads;
  for (int seed = 1; seed <= kSeeds; ++seed) {
    cuda_on_host::set_seed(static_cast<std::uint64_t>(seed));
    const DeviceArray<int> last(1);
    launch(16, 32, 1, 0, last_block, last.data());
    blocks.insert(last.get()[0]);
    launch(1, 64, 1, 0, last_thread, last.data());
    threads.insert(last.get()[0]);
  }
  EXPECT_GT(blocks.size(), 8u);
  EXPECT_GT(threads.size(), 8u);
}

__global__ void two_barriers() {
  begin_kernel();
  if (threadIdx.x < 64) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void some_return() {
  begin_kernel();
  if (threadIdx.x == 5) return;
  __syncthreads();
}
__global__ void some_lanes() {
  begin_kernel();
  if (threadIdx.x != 5) __shfl_xor_sync(kAll, 0, 1);
}
__global__ void another_lane() {
  begin_kernel();
  __shfl_xor_sync(1u << (threadIdx.x + 1) % 32, 0, 1);
}
__global__ void a_block_and_its_cluster() {
  begin_kernel();
  if (cuda_on_host::cluster_rank() == 0) {
    __syncthreads();
  } else {
    cuda_on_host::cluster_sync();
  }
}

void run_and_wait(unsigned blocks, unsigned threads, void (*kernel)(), unsigned cluster = 1) {
  launch(blocks, threads, cluster, 0, kernel);
  cudaDeviceSynchronize();
}

TEST(CudaOnHostDeathTest, DivergentBarriersStop) {
  EXPECT_DEATH(run_and_wait(2, 128, two_barriers), "divergent barrier(.|\n)*__syncthreads at .*cuda_on_host_test");
  EXPECT_DEATH(run_and_wait(2, 128, some_return),
               "divergent barrier: deadlock(.|\n)*__syncthreads at .*(.|\n)*5, 0, 0.*has left");
  EXPECT_DEATH(run_and_wait(1, 64, some_lanes), "divergent barrier: deadlock");
  EXPECT_DEATH(run_and_wait(1, 32, another_lane), "a lane that its mask does not name");
  EXPECT_DEATH(run_and_wait(2, 32, a_block_and_its_cluster, 2), "divergent barrier: deadlock");
}

template <Fault kFault>
__global__ void publishes(int* numbers) {
  begin_kernel();
  numbers[0] = 1;
  if (kFault != Fault::kNoFence) __threadfence_system();
  atomicExch_system(&numbers[1], 1);
}

TEST(CudaOnHostDeathTest, WhatIsPublishedNeedsAFence) {
  const DeviceArray<int> numbers(2);
  launch(1, 1, 1, 0, publishes<Fault::kNone>, numbers.data());
  EXPECT_EQ(numbers.get(), std::vector<int>({1, 1}));
  EXPECT_DEATH(
      {
        launch(1, 1, 1, 0, publishes<Fault::kNoFence>, numbers.data());
        cudaDeviceSynchronize();
      },
      "publishes what it wrote without a fence");
}

template <Fault kFault>
__global__ void begins(const float* from) {
  if (kFault == Fault::kReadsBeforeItBegins) cuda_on_host::count_load(from, sizeof(float));
  if (kFault != Fault::kNeverBegins || threadIdx.x != 31) begin_kernel();
  cuda_on_host::count_load(from, sizeof(float));
}
template <Fault kFault>
void begins_with() {
  const DeviceArray<float> from(1);
  launch(2, 32, 1, 0, begins<kFault>, from.data());
  cudaDeviceSynchronize();
}

TEST(CudaOnHostDeathTest, AKernelBeginsBeforeItReadsAndEvenWhereItDoesNot) {
  begins_with<Fault::kNone>();
  EXPECT_DEATH(begins_with<Fault::kReadsBeforeItBegins>(), "a kernel reads 4 bytes at .* before begin_kernel");
  EXPECT_DEATH(begins_with<Fault::kNeverBegins>(), "a kernel reads 4 bytes at .* before begin_kernel");
  EXPECT_DEATH(run_and_wait(
                   1, 32, +[] {}),
               "a kernel that has not called begin_kernel");
}

template <Fault kFault>
__global__ void shared_ends(float* result) {
  begin_kernel();
  using Held = float[33];
  TILELOSS_SHARED(Held, fixed);
  TILELOSS_DYNAMIC_SHARED(float, dynamic);
  const unsigned count = kFault == Fault::kNone ? 0 : 1;
  if (threadIdx.x != 0) return;
  if (kFault == Fault::kPastTheEnd) dynamic[31 + count] = 1;
  if (kFault == Fault::kReadsPastTheEnd) *result = *(fixed + 33 + count);  // aligned to 8
  *result = fixed[32] + dynamic[31];
}

template <Fault kFault>
void shared_ends_with() {
  const DeviceArray<float> result(1);
  launch(1, 32, 1, 32 * sizeof(float), shared_ends<kFault>, result.data());
  if (!std::isnan(result.get()[0])) std::abort();
}

TEST(CudaOnHost, SharedMemoryHoldsNoNumbersAtFirst) { shared_ends_with<Fault::kNone>(); }

TEST(CudaOnHostDeathTest, SharedMemoryHasEnds) {
  EXPECT_DEATH(shared_ends_with<Fault::kPastTheEnd>(), "");
  EXPECT_DEATH(shared_ends_with<Fault::kReadsPastTheEnd>(), "");
}

// How far a function is from the right results, rounded, in units in the last place: the least and the most.
template <class Real>
__global__ void apply(Real (*function)(Real), Real* values) {
  begin_kernel();
  Real& x = values[blockIdx.x * blockDim.x + threadIdx.x];
  x = function(x);
}
template <class Real>
std::vector<Real> on_device(Real (*function)(Real), const std::vector<Real>& x) {
  const DeviceArray<Real> values(x);
  launch(static_cast<unsigned>(x.size()), 1, 1, 0, apply<Real>, function, values.data());
  return values.get();
}
using Range = std::pair<std::int64_t, std::int64_t>;
template <class Real>
Range units_off(Real (*function)(Real), long double (*right)(long double), Real first, Real last) {
  using Bits = std::conditional_t<sizeof(Real) == 4, std::int32_t, std::int64_t>;
  constexpr int kCount = 4096;
  std::vector<Real> x(kCount);
  for (int i = 0; i < kCount; ++i) x[i] = first + (last - first) * static_cast<Real>(i) / (kCount - 1);
  const std::vector<Real> got = on_device(function, x);
  Range range = {0, 0};
  for (int i = 0; i < kCount; ++i) {
    const std::int64_t off = std::bit_cast<Bits>(got[i]) - std::bit_cast<Bits>(static_cast<Real>(right(x[i])));
    range = {std::min(range.first, off), std::max(range.second, off)};
  }
  return range;
}

TEST(CudaOnHost, AFunctionIsOffBothWaysByAsMuchAsIsDocumented) {
  EXPECT_EQ(units_off<float>(cuda_on_host::exp2_approx, std::exp2, -125, 3), Range(-2, 2));
  EXPECT_EQ(units_off<float>(std::exp2, std::exp2, -125, 3), Range(-2, 2));
  EXPECT_EQ(units_off<double>(std::cosh, std::cosh, -9, 9), Range(-1, 1));
  EXPECT_EQ(units_off<double>(std::exp, std::exp, -700, 9), Range(-1, 1));
  EXPECT_EQ(units_off<double>(std::exp2, std::exp2, -1000, 9), Range(-1, 1));
  EXPECT_EQ(units_off<double>(std::expm1, std::expm1, -20, 2), Range(-1, 1));
  EXPECT_EQ(units_off<double>(std::log, std::log, 0.01, 1e6), Range(-1, 1));
  EXPECT_EQ(units_off<double>(std::log1p, std::log1p, -0.9, 1e6), Range(-1, 1));
  EXPECT_EQ(units_off<double>(std::tanh, std::tanh, -9, 9), Range(-1, 1));
}

TEST(CudaOnHost, AFunctionHasItsDocumentedSpecialValues) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> powers = on_device<float>(cuda_on_host::exp2_approx, {-kInfinity, -126.5f, -0.0f, 1e-40f, kInfinity});
  EXPECT_EQ(powers, std::vector<float>({0, 0, 1, 1, kInfinity}));
  EXPECT_TRUE(std::isnan(on_device<float>(cuda_on_host::exp2_approx, {kNan})[0]));
  EXPECT_EQ(on_device<double>(std::exp, {-kInfinity, 0, kInfinity}), std::vector<double>({0, 1, kInfinity}));
  EXPECT_EQ(on_device<double>(std::log, {0, 1, kInfinity}), std::vector<double>({-kInfinity, 0, kInfinity}));
}

TEST(CudaOnHost, TheHostsFunctionsAreItsOwn) {
  int right = 0;  // the C library's is all but exact
  for (int k = -900; k < 900; ++k) {
    const double x = k / 100.;
    right += std::exp(x) == static_cast<double>(std::exp(static_cast<long double>(x))) ? 1 : 0;
  }
  EXPECT_GT(right, 1500);
}

__global__ void large_shared() {
  begin_kernel();
  using Large = char[200 << 10];
  TILELOSS_SHARED(Large, first);
  TILELOSS_SHARED(Large, second);
  first[0] = second[0] = 0;
}

TEST(CudaOnHostDeathTest, SharedMemoryHasASize) {
  EXPECT_DEATH(run_and_wait(1, 32, large_shared), "more shared memory than a block can have");
}

__global__ void counted(const float* from, float* to, unsigned past) {
  begin_kernel();
  cuda_on_host::count_load(from + threadIdx.x + past, sizeof(float));
  cuda_on_host::count_store(to + threadIdx.x, sizeof(float));
  to[threadIdx.x] = from[threadIdx.x];
}

TEST(CudaOnHost, BytesAreCounted) {
  const DeviceArray<float> from(numbers(64)), to(64);
  cuda_on_host::counters() = {};
  launch(1, 64, 1, 0, counted, from.data(), to.data(), 0u);
  EXPECT_EQ(to.get(), numbers(64));
  EXPECT_EQ(cuda_on_host::counters().loaded, 256u);
  EXPECT_EQ(cuda_on_host::counters().stored, 256u);
}

TEST(CudaOnHostDeathTest, AKernelThatIsGivenWrongMemoryStops) {
  const std::vector<float> host = numbers(64);
  const DeviceArray<float> from(host), to(64);
  const auto run = [&](const float* at, unsigned past) {
    launch(1, 64, 1, 0, counted, at, to.data(), past);
    cudaDeviceSynchronize();
  };
  EXPECT_DEATH(run(host.data(), 0), "a kernel reads 4 bytes at .* not the device's memory");
  EXPECT_DEATH(run(from.data(), 1), "a kernel reads 4 bytes at .* not the device's memory");
  const void* const between = reinterpret_cast<const char*>(from.data()) + 2;
  EXPECT_DEATH(run(static_cast<const float*>(between), 0), "a kernel reads 4 bytes at .* not aligned");
}

}  // namespace
}  // namespace tileloss::test
