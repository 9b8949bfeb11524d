// A libtileloss_cuda.so whose device is the host (tests/cuda_on_host), for libtileloss.so to open in Python's tests; and what
// these need of the device besides (tests/python/cuda_on_host.py).
#include <cuda_runtime.h>

#include "tests/cuda_on_host/streams.h"

#pragma GCC visibility push(default)
extern "C" {

void* cuda_on_host_malloc(int device, std::size_t bytes) {
  void* data = nullptr;
  cudaSetDevice(device);
  cudaMalloc(&data, bytes);
  cudaSetDevice(0);
  return data;
}

void cuda_on_host_free(void* data) { cudaFree(data); }

void* cuda_on_host_stream(int device) {
  cudaStream_t stream = nullptr;
  cudaSetDevice(device);
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaSetDevice(0);
  return stream;
}

// Does what the stream was given, and then `work`, which may touch the device's memory but call nothing of CUDA's.
void cuda_on_host_run(void* stream, int device, void (*work)()) {
  {
    const std::lock_guard<std::mutex> lock(cuda_on_host::devices().mutex);
    cuda_on_host::Step step;
    step.work = work;
    step.devices = 1u << device;
    cuda_on_host::devices().give(cuda_on_host::queue_of(static_cast<cudaStream_t>(stream)), std::move(step));
  }
  cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
}

}  // extern "C"
#pragma GCC visibility pop
