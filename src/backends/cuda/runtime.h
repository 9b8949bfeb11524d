// The CUDA runtime, with its errors as a status.
#ifndef TILELOSS_BACKENDS_CUDA_RUNTIME_H_
#define TILELOSS_BACKENDS_CUDA_RUNTIME_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>

#include "backends/backend.h"

namespace tileloss::impl::cuda {

inline Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // or the caller's next look would find it
  const tileloss_status code = error == cudaErrorMemoryAllocation ? TILELOSS_OUT_OF_MEMORY : TILELOSS_UNSUPPORTED;
  return {code, std::string("cuda: ") + what + ": " + cudaGetErrorString(error)};
}

// The calling thread's device, while this lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(std::int32_t device) {
    cudaGetDevice(&before_);
    if (before_ != device) cudaSetDevice(device);
    is_moved_ = before_ != device;
  }
  ~DeviceGuard() {
    if (is_moved_) cudaSetDevice(before_);
  }
  DeviceGuard(DeviceGuard&& other) noexcept : before_(other.before_), is_moved_(std::exchange(other.is_moved_, false)) {}
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  DeviceGuard& operator=(DeviceGuard&&) = delete;

 private:
  int before_ = 0;
  bool is_moved_ = false;
};

// The devices' memory, on their default streams.
class CudaMemory final : public DeviceMemory {
 public:
  Status allocate(std::int32_t device_index, std::size_t bytes, void** data) override {
    const DeviceGuard guard(device_index);
    return status_of(cudaMalloc(data, bytes), "memory");
  }
  void release(std::int32_t device_index, void* data) override {
    const DeviceGuard guard(device_index);
    cudaFree(data);
  }
  Status copy(std::int32_t device_index, void* to, const void* from, std::size_t bytes) override {
    const DeviceGuard guard(device_index);
    return status_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, nullptr), "a copy");
  }
  Status synchronise(std::int32_t device_index) override {
    const DeviceGuard guard(device_index);
    return status_of(cudaDeviceSynchronize(), "the device");
  }
};

// Kernels in the order of a stream. The first error is kept, and nothing is launched after it.
class Queue {
 public:
  explicit Queue(cudaStream_t stream) : stream_(stream) {}

  cudaStream_t stream() const { return stream_; }
  const Status& status() const { return status_; }
  void keep(cudaError_t error, const char* what) { keep(status_of(error, what)); }
  void keep(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  template <class... Expected, class... Given>
  void launch(void (*kernel)(Expected...), std::int64_t blocks, int threads, const Given&... given) {
    launch_clusters(kernel, blocks, 1, threads, 0, given...);
  }
  // Of `cluster` blocks each, with so much shared memory besides what the kernel itself has.
  template <class... Expected, class... Given>
  void launch_clusters(void (*kernel)(Expected...), std::int64_t clusters, int cluster, int threads, std::int64_t shared_bytes,
                       const Given&... given) {
    if (clusters == 0 || !status_.ok()) return;
    cudaLaunchAttribute size = {};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = static_cast<unsigned>(cluster);
    size.val.clusterDim.y = size.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(clusters * cluster));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config.stream = stream_;
    if (cluster > 1) config.attrs = &size, config.numAttrs = 1;
    // No work of a stream's: allowed while it is captured.
    if (shared_bytes > 0)
      keep(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
           "a kernel's shared memory");
    keep(cudaLaunchKernelEx(&config, kernel, given...), "a kernel could not be launched");
  }

 private:
  cudaStream_t stream_;
  Status status_;
};

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_RUNTIME_H_
