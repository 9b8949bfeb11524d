// The CUDA runtime, with its errors as a status.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "backends/backend.h"

namespace tileloss::impl::cuda {

// Of arguments only the stream comes this far. The rest is memory, the machine, or nobody's fault: an earlier kernel's error,
// say, which every later call has.
inline tileloss_status code_of(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return TILELOSS_OUT_OF_MEMORY;
    case cudaErrorInvalidResourceHandle:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureUnsupported: return TILELOSS_INVALID_ARGUMENT;
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorInsufficientDriver:
    case cudaErrorInvalidClusterSize:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorNoDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorSymbolNotFound:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorNotSupported: return TILELOSS_UNSUPPORTED;
    default: return TILELOSS_INTERNAL;
  }
}

inline Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // or the caller's next look would find it
  return {code_of(error), std::string("cuda: ") + what + ": " + cudaGetErrorString(error)};
}

// What the driver keeps of a thread: a stack of contexts, whose top is what the runtime's calls go to. It is asked itself: the
// runtime, which names a context by its device alone, takes one of a program's own (cuCtxCreate) for the device's primary one,
// where all that a process keeps for a device is. The driver's errors have the runtime's numbers.
class ThreadContexts {
 public:
  static ThreadContexts& get() {
    static auto* const all = new ThreadContexts();  // for good, as what it holds
    return *all;
  }
  // Makes the device's primary context the current one; `is_pushed`: it was not, and pop() is owed.
  cudaError_t enter(std::int32_t device, bool* is_pushed) {
    Context primary = nullptr, current = nullptr;
    cudaError_t error = error_;
    if (error == cudaSuccess) error = primary_of(device, &primary);
    if (error == cudaSuccess) error = current_(&current);
    if (error != cudaSuccess || current == primary) return error;
    error = push_(primary);
    *is_pushed = error == cudaSuccess;
    return error;
  }
  void pop() const {
    Context context = nullptr;
    pop_(&context);
  }

 private:
  using Context = struct CUctx_st*;

  ThreadContexts() {
    find("cuDevicePrimaryCtxRetain", retain_);
    find("cuCtxGetCurrent", current_);
    find("cuCtxPushCurrent", push_);
    find("cuCtxPopCurrent", pop_);
  }
  cudaError_t primary_of(std::int32_t device, Context* primary) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Context& retained = of_devices_[device];
    const cudaError_t error = retained == nullptr ? retain_(&retained, device) : cudaSuccess;
    *primary = retained;
    return error;
  }
  template <class Function>
  void find(const char* name, Function& function) {
    constexpr unsigned kVersion = 12000;  // has functions of these types
    void* found = nullptr;
    if (error_ == cudaSuccess) error_ = cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault);
    if (error_ == cudaSuccess && found == nullptr) error_ = cudaErrorNotSupported;
    function = reinterpret_cast<Function>(found);
  }

  cudaError_t (*retain_)(Context*, int);
  cudaError_t (*current_)(Context*);
  cudaError_t (*push_)(Context);
  cudaError_t (*pop_)(Context*);
  cudaError_t error_ = cudaSuccess;
  std::mutex mutex_;
  std::map<std::int32_t, Context> of_devices_;
};

// The device's primary context is the calling thread's while this lives; then what was current before is again, even if that was
// nothing. cudaSetDevice could not restore that: it would start a context, some 500 MB, on a GPU that the thread has never used.
class DeviceGuard {
 public:
  explicit DeviceGuard(std::int32_t device) : error_(ThreadContexts::get().enter(device, &is_moved_)) {}
  ~DeviceGuard() {
    if (is_moved_) ThreadContexts::get().pop();
  }
  DeviceGuard(DeviceGuard&& other) noexcept : is_moved_(std::exchange(other.is_moved_, false)), error_(other.error_) {}
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  DeviceGuard& operator=(DeviceGuard&&) = delete;

  Status status() const { return status_of(error_, "the device"); }

 private:
  bool is_moved_ = false;
  cudaError_t error_;
};

// While this lives the thread may do what it has to do once, allocate say, although a stream of the caller's is captured: none of
// it is that stream's.
class ApartFromCapture {
 public:
  ApartFromCapture() { cudaThreadExchangeStreamCaptureMode(&other_); }
  ~ApartFromCapture() { cudaThreadExchangeStreamCaptureMode(&other_); }
  ApartFromCapture(const ApartFromCapture&) = delete;
  ApartFromCapture& operator=(const ApartFromCapture&) = delete;

 private:
  cudaStreamCaptureMode other_ = cudaStreamCaptureModeRelaxed;
};

// The devices' memory, on their default streams.
class CudaMemory final : public DeviceMemory {
 public:
  Status allocate(std::int32_t device_index, std::size_t bytes, void** data) override {
    const DeviceGuard guard(device_index);
    return guard.status().ok() ? status_of(cudaMalloc(data, bytes), "memory") : guard.status();
  }
  void release(std::int32_t device_index, void* data) override {
    const DeviceGuard guard(device_index);
    cudaFree(data);
  }
  Status copy(std::int32_t device_index, void* to, const void* from, std::size_t bytes) override {
    const DeviceGuard guard(device_index);
    if (!guard.status().ok()) return guard.status();
    return status_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, nullptr), "a copy");
  }
  Status synchronise(std::int32_t device_index) override {
    const DeviceGuard guard(device_index);
    return guard.status().ok() ? status_of(cudaDeviceSynchronize(), "the device") : guard.status();
  }
  Status time(std::int32_t device_index, const std::function<void()>& queue, double* milliseconds) override {
    const DeviceGuard guard(device_index);
    if (!guard.status().ok()) return guard.status();
    const Event begin, end;
    cudaError_t error = begin.record();
    queue();
    if (error == cudaSuccess) error = end.record();
    float elapsed = 0;
    if (error == cudaSuccess) error = end.since(begin, &elapsed);
    *milliseconds = elapsed;
    return status_of(error, "the device's clock");
  }

 private:
  // On the current device's default stream.
  class Event {
   public:
    Event() { error_ = cudaEventCreate(&event_); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    cudaError_t record() const { return error_ != cudaSuccess ? error_ : cudaEventRecord(event_, nullptr); }
    cudaError_t since(const Event& begin, float* milliseconds) const {
      const cudaError_t error = cudaEventSynchronize(event_);
      return error != cudaSuccess ? error : cudaEventElapsedTime(milliseconds, begin.event_, event_);
    }

   private:
    cudaEvent_t event_ = nullptr;
    cudaError_t error_;
  };
};

// Memory in a stream's order, given back there.
struct FreeOnStream {
  cudaStream_t stream;
  void operator()(std::byte* data) const { cudaFreeAsync(data, stream); }
};
using StreamMemory = std::unique_ptr<std::byte, FreeOnStream>;

// Lets a kernel's blocks have all the shared memory that the current device has for one, and the multiprocessors as many blocks
// as they have memory for: left to itself the driver kept a quarter of it as cache on an H100, and with it one block of five. The
// same whatever a launch needs, which another thread's launch of that kernel could take away otherwise; and no work of a
// stream's: allowed while it is captured.
inline cudaError_t allow_shared_memory(const void* kernel) {
  static std::mutex mutex;
  static auto& allowed = *new std::set<std::pair<const void*, int>>();  // for good, as what calls it
  int device = 0, most = 0;
  cudaFuncAttributes own = {};
  cudaError_t error = cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  if (error != cudaSuccess || allowed.contains({kernel, device})) return error;
  error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&own, kernel);
  most -= static_cast<int>(own.sharedSizeBytes);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess) allowed.emplace(kernel, device);
  return error;
}

// Whether launches may overlap: TILELOSS_CUDA_PDL=1, as it was at the first launch.
inline bool may_overlap() {
  static const bool is_asked_for = [] {
    const char* const asked = std::getenv("TILELOSS_CUDA_PDL");
    return asked != nullptr && std::string_view(asked) == "1";
  }();
  return is_asked_for;
}

// Whether a kernel's code on the current device waits in begin_kernel(): made of PTX for sm_90 or later, which no device before
// sm_90 takes. What the driver makes of sm_80's PTX for a later device does not. Asked once, as allow_shared_memory() does.
inline cudaError_t find_wait(const void* kernel, bool* waits) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::pair<const void*, int>, bool>();
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find({kernel, device});
  if (found == known.end()) {
    cudaFuncAttributes own = {};
    if (const cudaError_t error = cudaFuncGetAttributes(&own, kernel); error != cudaSuccess) return error;
    found = known.emplace(std::pair(kernel, device), own.ptxVersion >= 90).first;
  }
  *waits = found->second;
  return cudaSuccess;
}

// Clusters of `cluster` blocks each, with so much shared memory besides what the kernel itself has.
class Launch {
 public:
  Launch(std::int64_t clusters, int cluster, int threads, std::int64_t shared_bytes, cudaStream_t stream) {
    config_.gridDim = dim3(static_cast<unsigned>(clusters * cluster));
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config_.stream = stream;
    config_.attrs = attributes_;
    if (cluster > 1) {
      auto& size = add(cudaLaunchAttributeClusterDimension).clusterDim;
      size.x = static_cast<unsigned>(cluster);
      size.y = size.z = 1;
    }
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  const cudaLaunchConfig_t& config() const { return config_; }
  // Its blocks may be there before the kernel ahead of it in the stream has ended, for which they wait themselves.
  void overlap() { add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1; }

 private:
  cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) {
    cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
    attribute.id = id;
    return attribute.val;
  }

  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
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
  template <class... Expected, class... Given>
  void launch_clusters(void (*kernel)(Expected...), std::int64_t clusters, int cluster, int threads, std::int64_t shared_bytes,
                       const Given&... given) {
    if (clusters == 0 || !status_.ok()) return;
    if (clusters > std::numeric_limits<std::int32_t>::max() / cluster)
      return keep({TILELOSS_UNSUPPORTED, "cuda: a kernel's blocks: expected at most 2^31 - 1, got " + std::to_string(clusters) +
                                             (cluster > 1 ? " times " + std::to_string(cluster) : "")});
    Launch launch(clusters, cluster, threads, shared_bytes, stream_);
    const auto* const address = reinterpret_cast<const void*>(kernel);
    if (shared_bytes > 0) keep(allow_shared_memory(address), "a kernel's shared memory");
    bool waits = false;
    if (may_overlap()) keep(find_wait(address, &waits), "a kernel's code");
    if (waits) launch.overlap();
    keep(cudaLaunchKernelEx(&launch.config(), kernel, given...), "a kernel could not be launched");
  }

 private:
  cudaStream_t stream_;
  Status status_;
};

}  // namespace tileloss::impl::cuda
