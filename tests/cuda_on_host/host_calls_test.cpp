// Streams, events, graphs and memory: work waits until somebody waits for it, and what CUDA refuses is refused.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/cuda_on_host/device_array.h"
#include "tests/cuda_on_host/streams.h"

namespace tileloss::test {
namespace {

using cuda_on_host::begin_kernel;

__global__ void add(int* at, int value) {
  begin_kernel();
  *at += value;
}
__global__ void times(int* at, int factor) {
  begin_kernel();
  *at *= factor;
}
__global__ void set_flag(int* flag) {
  begin_kernel();
  atomicOr(flag, 4);
}

class Stream {
 public:
  explicit Stream(unsigned flags = cudaStreamNonBlocking) { cudaStreamCreateWithFlags(&stream_, flags); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { cudaEventCreate(&event_); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// A number that host and device may touch.
class HostInt {
 public:
  explicit HostInt(int value) {
    cudaHostAlloc(&at_, sizeof(int), cudaHostAllocMapped);
    *at_ = value;
  }
  ~HostInt() { cudaFreeHost(at_); }
  HostInt(const HostInt&) = delete;
  HostInt& operator=(const HostInt&) = delete;
  int* at() const { return at_; }
  int operator*() const { return *at_; }

 private:
  int* at_ = nullptr;
};

template <class... Expected, class... Actual>
cudaError_t launch(cudaStream_t stream, void (*kernel)(Expected...), Actual... arguments) {
  cudaLaunchConfig_t config = {};
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

TEST(CudaOnHostStreams, TheFirstSeedIsTheEnvironments) {
  const auto first_number = [] { return cuda_on_host::Devices().random.below(1 << 30); };
  const char* const given = std::getenv("TILELOSS_CUDA_SEED");
  const std::string before = given == nullptr ? "" : given;
  setenv("TILELOSS_CUDA_SEED", "7", 1);
  EXPECT_EQ(first_number(), cuda_on_host::Random(7).below(1 << 30));
  unsetenv("TILELOSS_CUDA_SEED");
  EXPECT_EQ(first_number(), cuda_on_host::Random(1).below(1 << 30));
  if (given != nullptr) setenv("TILELOSS_CUDA_SEED", before.c_str(), 1);
}

TEST(CudaOnHostStreams, WorkIsDoneWhenSomebodySynchronises) {
  const Stream stream;
  const Event event;
  const HostInt number(0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(launch(stream, add, number.at(), 1), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
    EXPECT_EQ(launch(stream, add, number.at(), 0), cudaSuccess);
    EXPECT_EQ(*number, i);
    const cudaError_t error = i == 0   ? cudaStreamSynchronize(stream)
                              : i == 1 ? cudaDeviceSynchronize()
                                       : cudaEventSynchronize(event);
    EXPECT_EQ(error, cudaSuccess);
    EXPECT_EQ(*number, i + 1);
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaOnHostStreams, EventsTellHowLongTheWorkBetweenThemTook) {
  const Event begin, end;
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorInvalidResourceHandle) << "never recorded";
  const HostInt number(0);
  cudaEventRecord(begin);
  launch(nullptr, add, number.at(), 1);
  cudaEventRecord(end);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorNotReady);
  EXPECT_EQ(cudaEventSynchronize(end), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
  EXPECT_GT(milliseconds, 0);
  cudaGetLastError();
}

TEST(CudaOnHostStreams, AStreamThatDoesNotWaitIsNotWaitedFor) {
  const Stream first, second;
  const HostInt number(1);
  launch(first, add, number.at(), 1);
  launch(second, times, number.at(), 10);
  EXPECT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  EXPECT_EQ(*number, 10);
  EXPECT_EQ(cudaStreamSynchronize(first), cudaSuccess);
  EXPECT_EQ(*number, 11);
}

TEST(CudaOnHostStreams, TheDefaultStreamWaitsForBlockingOnesAndTheyForIt) {
  const Stream blocking(cudaStreamDefault), other;
  const HostInt number(1);
  launch(other, add, number.at(), 1000);
  launch(blocking, add, number.at(), 1);
  launch(nullptr, times, number.at(), 10);
  launch(blocking, add, number.at(), 5);
  EXPECT_EQ(cudaStreamSynchronize(blocking), cudaSuccess);
  EXPECT_EQ(*number, 25);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(*number, 1025);
}

TEST(CudaOnHostStreams, ArgumentsAreCopiedAtTheLaunch) {
  const Stream stream;
  const HostInt number(0);
  int value = 7;
  launch(stream, add, number.at(), value);
  value = 1;
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(*number, 7);
}

TEST(CudaOnHostStreams, WorkOfADestroyedStreamIsDone) {
  const HostInt number(0);
  { launch(Stream(), add, number.at(), 2); }
  EXPECT_EQ(*number, 0);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(*number, 2);
}

TEST(CudaOnHostStreams, SeveralThreadsMayUseThem) {
  const HostInt numbers[] = {HostInt(0), HostInt(0), HostInt(0)};
  std::vector<std::thread> threads;
  for (const HostInt& number : numbers) {
    threads.emplace_back([&number] {
      const Stream stream;
      for (int i = 0; i < 50; ++i) {
        launch(stream, add, number.at(), 1);
        cudaStreamSynchronize(stream);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const HostInt& number : numbers) EXPECT_EQ(*number, 50);
}

TEST(CudaOnHostStreams, ADeviceWritesAFlagOfTheHosts) {
  const HostInt flag(1);
  launch(nullptr, set_flag, flag.at());
  cudaDeviceSynchronize();
  EXPECT_EQ(*flag, 5);
}

TEST(CudaOnHostMemory, CopiesAreDoneInTheStreamsOrder) {
  const Stream stream;
  int value = 3, back = 0;
  int* at = nullptr;
  ASSERT_EQ(cudaMallocAsync(&at, sizeof(int), stream), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(at, &value, sizeof value, cudaMemcpyHostToDevice, stream), cudaSuccess);
  value = 0;  // it was read at the call, as it is not pinned
  launch(stream, add, at, 4);
  EXPECT_EQ(cudaMemcpyAsync(&back, at, sizeof back, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(at, 0, sizeof(int), stream), cudaSuccess);
  EXPECT_EQ(cudaFreeAsync(at, stream), cudaSuccess);
  EXPECT_EQ(back, 0);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(back, 7);
  cudaPointerAttributes attributes;
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, at), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered) << "it is freed";
}

TEST(CudaOnHostMemory, PointersAreKnown) {
  cudaPointerAttributes attributes;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const DeviceArray<int> device(4);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  const HostInt host(0);
  const int local = 0;
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, device.data() + 3), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 1);
  EXPECT_EQ(attributes.devicePointer, nullptr);
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, host.at()), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, &local), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
}

TEST(CudaOnHostMemory, WhatCudaRefusesIsRefused) {
  const DeviceArray<int> device(4);
  int local[8] = {};
  EXPECT_EQ(cudaMemcpy(device.data(), local, 17, cudaMemcpyHostToDevice), cudaErrorInvalidValue) << "past the end";
  EXPECT_EQ(cudaMemcpy(local, device.data(), 16, cudaMemcpyHostToDevice), cudaErrorInvalidValue) << "the other way";
  EXPECT_EQ(cudaMemset(local, 0, 4), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(local), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "it is forgotten";
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, std::size_t{1} << 40), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(std::string(cudaGetErrorString(cudaErrorNotReady)), "cudaErrorNotReady");
}

TEST(CudaOnHostDeathTest, ADevicesMemoryIsItsOwn) {
  const DeviceArray<int> numbers(1024);
  EXPECT_DEATH(numbers.data()[0] = 1, "");
  EXPECT_DEATH(static_cast<void>(*static_cast<volatile int*>(numbers.data())), "");
  const auto run = [](cudaStream_t stream, int* at) {
    launch(stream, add, at, 1);
    cudaStreamSynchronize(stream);
  };
  EXPECT_DEATH(run(nullptr, numbers.data() + 1024), "") << "past its end";
  cudaSetDevice(1);
  EXPECT_DEATH(run(nullptr, numbers.data()), "") << "the other device";
  cudaSetDevice(0);
}

TEST(CudaOnHostLaunches, WrongOnesAreRefused) {
  const auto launch_of = [](dim3 grid, dim3 block, std::size_t dynamic, unsigned cluster) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = dynamic;
    config.attrs = &attribute, config.numAttrs = 1;
    const cudaError_t error = cudaLaunchKernelEx(&config, set_flag, nullptr);
    EXPECT_EQ(cudaGetLastError(), error);
    return error;
  };
  EXPECT_EQ(launch_of(0, 32, 0, 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch_of({1, 1 << 16}, 32, 0, 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch_of(1, 0, 0, 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch_of(1, 1025, 0, 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch_of(1, {1024, 2}, 0, 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch_of(3, 32, 0, 2), cudaErrorInvalidClusterSize);
  EXPECT_EQ(launch_of(16, 32, 0, 16), cudaErrorInvalidClusterSize);
  EXPECT_EQ(launch_of(1, 32, (48 << 10) + 1, 1), cudaErrorInvalidValue) << "more is to be asked for";
  {
    int count = 0;
    cudaLaunchAttribute attribute = {};
    attribute.val.clusterDim = {2, 1, 1};
    cudaLaunchConfig_t config = {};
    config.attrs = &attribute, config.numAttrs = 1, config.dynamicSmemBytes = (48 << 10) + 1;
    EXPECT_EQ(cudaOccupancyMaxActiveClusters(&count, set_flag, &config), cudaErrorInvalidValue);
  }
  EXPECT_EQ(cudaFuncSetAttribute(set_flag, cudaFuncAttributeMaxDynamicSharedMemorySize, 224 << 10), cudaSuccess);
  EXPECT_EQ(cudaFuncSetAttribute(set_flag, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10), cudaErrorInvalidValue);
  EXPECT_EQ(launch_of(1, 32, (224 << 10) + 1, 1), cudaErrorInvalidValue);
  cudaGetLastError();
  EXPECT_EQ(cudaFuncSetAttribute(set_flag, cudaFuncAttributeMaxDynamicSharedMemorySize, 48 << 10), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "none of them runs";
}

TEST(CudaOnHostLaunches, AStreamsDeviceMustBeTheCurrentOne) {
  const HostInt number(0);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const Stream other;
  EXPECT_EQ(launch(other, add, number.at(), 1), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(launch(other, add, number.at(), 1), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  EXPECT_EQ(*number, 1);
}

TEST(CudaOnHostDevices, AContextOfOnesOwnHasMemoryAndStreamsOfItsOwn) {
  const HostInt number(0);
  const Stream stream;
  const DeviceArray<int> there(1);
  cudaPointerAttributes attributes;
  {
    const cuda_on_host::OwnContext own(0);
    int device = 1;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 0);
    EXPECT_EQ(launch(stream, add, number.at(), 1), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(launch(nullptr, add, number.at(), 1), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaPointerGetAttributes(&attributes, there.data()), cudaSuccess);
    EXPECT_TRUE(attributes.type == cudaMemoryTypeDevice && attributes.device == 0 && attributes.devicePointer == nullptr);
  }
  EXPECT_EQ(*number, 1);
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, there.data()), cudaSuccess);
  EXPECT_EQ(attributes.devicePointer, there.data());
}

TEST(CudaOnHostDevices, TheirNumberIsTheTests) {
  int count = 0, value = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 2);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 1), cudaSuccess);
  EXPECT_EQ(value, 9);
  cuda_on_host::properties().devices = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  EXPECT_EQ(count, 0);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrL2CacheSize, 0), cudaErrorNoDevice);
  EXPECT_EQ(launch(nullptr, add, &value, 1), cudaErrorNoDevice);
  cuda_on_host::properties().devices = 2;
  EXPECT_EQ(cudaGetLastError(), cudaErrorNoDevice);
}

TEST(CudaOnHostGraphs, WhatWasCapturedRunsWhenLaunched) {
  const Stream stream;
  const HostInt number(1);
  cudaStreamCaptureStatus status;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  launch(stream, add, number.at(), 1);
  launch(stream, times, number.at(), 3);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(*number, 1) << "nothing runs while it is captured";

  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  EXPECT_EQ(*number, 1);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(*number, 21);
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST(CudaOnHostGraphs, WhatMayNotBeCapturedEndsTheCapture) {
  const DeviceArray<int> numbers(4);
  void* data = nullptr;
  int local = 0;
  const Stream stream, blocking(cudaStreamDefault);
  const auto corrupts = [&](cudaStream_t captured, auto&& call) {
    EXPECT_EQ(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal), cudaSuccess);
    const cudaError_t error = call();
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(captured, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
    return error;
  };
  EXPECT_EQ(corrupts(stream, [&] { return cudaMalloc(&data, 4); }), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(corrupts(stream, [&] { return cudaHostAlloc(&data, 4, 0); }), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(corrupts(stream, [&] { return cudaFree(numbers.data()); }), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(corrupts(stream, [&] { return cudaStreamSynchronize(stream); }), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(corrupts(stream, [&] { return cudaDeviceSynchronize(); }), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(corrupts(stream, [&] { return cudaMemcpy(&local, numbers.data(), 4, cudaMemcpyDeviceToHost); }),
            cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(corrupts(blocking, [&] { return launch(nullptr, add, numbers.data(), 1); }), cudaErrorStreamCaptureImplicit);
  cudaStreamCaptureStatus status;
  cudaGraph_t none = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(cudaStreamIsCapturing(nullptr, &status), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaStreamEndCapture(blocking, &none), cudaSuccess) << "who asks does not end it";
  cudaGraphDestroy(none);
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
  cudaGetLastError();
  cudaGraph_t graph = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  ASSERT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(cudaHostAlloc(&data, 4, 0), cudaSuccess) << "apart from the capture";
  EXPECT_EQ(cudaFreeHost(data), cudaSuccess);
  ASSERT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace tileloss::test
