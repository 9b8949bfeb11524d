// A libtileloss_cuda.so whose device is the host (tests/cuda_on_host), for libtileloss.so to open in Python's tests; and what
// these need of the device besides (tests/python/cuda_on_host.py).
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "backends/cuda/runtime.h"
#include "tests/cuda_on_host/streams.h"

using tileloss::impl::cuda::DeviceGuard;

#pragma GCC visibility push(default)
extern "C" {

void* cuda_on_host_malloc(int device, std::size_t bytes) {
  const DeviceGuard guard(device);
  void* data = nullptr;
  cudaMalloc(&data, bytes);
  return data;
}

void cuda_on_host_free(void* data) { cudaFree(data); }

// What each device has for who asks from now on.
void cuda_on_host_set_memory(std::size_t bytes) { cuda_on_host::properties().memory_bytes = bytes; }

void* cuda_on_host_stream(int device) {
  const DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}

// Queues `work`, which may touch the device's memory but call nothing of CUDA's.
void cuda_on_host_give(void* stream, int device, void (*work)()) {
  const DeviceGuard guard(device);  // whose default stream a null one is
  const std::lock_guard<std::mutex> lock(cuda_on_host::devices().mutex);
  cuda_on_host::Step step;
  step.work = work;
  step.devices = 1u << device;
  cuda_on_host::devices().give(cuda_on_host::queue_of(static_cast<cudaStream_t>(stream)), std::move(step));
}

void cuda_on_host_wait(void* stream, int device) {
  const DeviceGuard guard(device);
  cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
}

// Bytes of rows that kernels have read and written, and what streams were given, since this was asked last.
void cuda_on_host_count(std::uint64_t* loaded, std::uint64_t* stored, std::uint64_t* queued) {
  const cuda_on_host::Counters found = std::exchange(cuda_on_host::counters(), {});
  *loaded = found.loaded, *stored = found.stored, *queued = found.queued;
}

void cuda_on_host_begin_capture(void* stream) {
  cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeGlobal);
}

// Null: something was done that may not be captured.
void* cuda_on_host_end_capture(void* stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  if (cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph) != cudaSuccess) return nullptr;
  cudaGraphInstantiate(&executable, graph);
  cudaGraphDestroy(graph);
  return executable;
}

void cuda_on_host_replay(void* executable, void* stream) {
  cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable), static_cast<cudaStream_t>(stream));
}

}  // extern "C"
#pragma GCC visibility pop
