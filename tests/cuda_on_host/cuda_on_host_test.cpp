#include <cuda_runtime.h>
#include <gtest/gtest.h>

namespace tileloss::test {
namespace {

__global__ void sum_of_block(const float* values, float* sums) {
  using Parts = float[32];
  TILELOSS_SHARED(Parts, parts);
  float sum = values[blockIdx.x * blockDim.x + threadIdx.x];
  for (int k = 16; k > 0; k /= 2) sum += __shfl_xor_sync(~0u, sum, k);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) sum += parts[i];
  sums[blockIdx.x] = sum;
}

TEST(CudaOnHost, BlocksAdd) {
  float *values = nullptr, *sums = nullptr;
  ASSERT_EQ(cudaMalloc(&values, 4 * 128 * sizeof(float)), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&sums, 4 * sizeof(float)), cudaSuccess);
  std::vector<float> host(4 * 128);
  for (std::size_t i = 0; i < host.size(); ++i) host[i] = static_cast<float>(i);
  ASSERT_EQ(cudaMemcpy(values, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
  cudaLaunchConfig_t config{.gridDim = {4}, .blockDim = {128}};
  ASSERT_EQ(cudaLaunchKernelEx(&config, sum_of_block, values, sums), cudaSuccess);
  float got[4];
  ASSERT_EQ(cudaMemcpy(got, sums, sizeof got, cudaMemcpyDeviceToHost), cudaSuccess);
  for (int b = 0; b < 4; ++b) EXPECT_EQ(got[b], 128.f * 128 * b + 127 * 64);
}

}  // namespace
}  // namespace tileloss::test
