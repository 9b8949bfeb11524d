#include "tests/cuda_on_host/host_calls.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "tests/cuda_on_host/device_code.h"
#include "tests/cuda_on_host/ptx_beside.h"
#include "tests/cuda_on_host/streams.h"
#include "tests/cuda_on_host/threads.h"

using cuda_on_host::Device;
using cuda_on_host::Devices;
using cuda_on_host::devices;
using cuda_on_host::Graph;
using cuda_on_host::Queue;
using cuda_on_host::queue_of;
using cuda_on_host::say;
using cuda_on_host::Step;

struct CUstream_st {
  std::shared_ptr<Queue> queue;
};
struct CUevent_st {
  std::shared_ptr<Queue> queue;  // null: never recorded
  std::uint64_t number = 0;
  std::shared_ptr<Graph> graph;  // recorded in a capture
  std::shared_ptr<std::optional<std::chrono::steady_clock::time_point>> reached;
};
struct CUctx_st {
  int device;
};
struct CUgraph_st {
  std::shared_ptr<Graph> graph;
};
struct CUgraphExec_st {
  std::vector<Step> steps;
};

namespace {

constexpr int kSharedOfKernels = 2656;  // as much as sm_90's code says of any that asks for more

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local std::vector<int> contexts;  // of this thread, by their devices; the last one is current

using Lock = std::lock_guard<std::mutex>;

bool is_device(int index) { return index >= 0 && index < devices().properties.devices; }

CUctx_st* context_of(int device) {
  static CUctx_st all[Devices::kMost];
  all[device].device = device;
  return &all[device];
}

cudaError_t retain_context(CUctx_st** context, int device) {
  const Lock lock(devices().mutex);
  if (!is_device(device)) return devices().properties.devices == 0 ? cudaErrorNoDevice : cudaErrorInvalidDevice;
  devices().started |= 1u << device;
  *context = context_of(device);
  return cudaSuccess;
}
cudaError_t current_context(CUctx_st** context) {
  const Lock lock(devices().mutex);
  *context = contexts.empty() ? nullptr : context_of(contexts.back());
  return cudaSuccess;
}
cudaError_t push_context(CUctx_st* context) {
  contexts.push_back(context->device);
  return cudaSuccess;
}
cudaError_t pop_context(CUctx_st** /*context*/) {
  if (contexts.empty()) return cudaErrorInvalidContext;
  contexts.pop_back();
  return cudaSuccess;
}

// Of a block's shared memory, as far as was asked for it.
std::size_t most_dynamic_bytes(const void* kernel) {
  const auto asked = devices().not_dynamic_bytes.find(kernel);
  const bool has_asked = asked != devices().not_dynamic_bytes.end();
  return static_cast<std::size_t>(has_asked ? devices().properties.shared_bytes_of_block - asked->second : 48 << 10);
}

// Of what the device's code was made.
int ptx_version() { return std::min(devices().properties.compute_capability, devices().properties.ptx_version); }

}  // namespace

namespace cuda_on_host {

cudaError_t say(cudaError_t error) {
  if (devices().properties.lasting_error != cudaSuccess) error = devices().properties.lasting_error;
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}
bool is_apart_from_captures() { return capture_mode == cudaStreamCaptureModeRelaxed; }
int current_device() {
  if (contexts.empty()) contexts.push_back(0);
  devices().started |= 1u << contexts.back();
  return contexts.back();
}
std::shared_ptr<Queue> queue_of(cudaStream_t stream) {
  const int device = current_device();
  return stream != nullptr ? stream->queue : devices().device(device).default_queue;
}

}  // namespace cuda_on_host

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorDevicesUnavailable: return "cudaErrorDevicesUnavailable";
    case cudaErrorInvalidDeviceFunction: return "cudaErrorInvalidDeviceFunction";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidContext: return "cudaErrorInvalidContext";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNoKernelImageForDevice: return "cudaErrorNoKernelImageForDevice";
    case cudaErrorUnsupportedPtxVersion: return "cudaErrorUnsupportedPtxVersion";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorSymbolNotFound: return "cudaErrorSymbolNotFound";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorSystemDriverMismatch: return "cudaErrorSystemDriverMismatch";
    case cudaErrorCompatNotSupportedOnDevice: return "cudaErrorCompatNotSupportedOnDevice";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    case cudaErrorInvalidClusterSize: return "cudaErrorInvalidClusterSize";
  }
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = devices().properties.driver;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  const Lock lock(devices().mutex);
  if (devices().properties.driver < 13000) return say(cudaErrorInsufficientDriver);
  *count = devices().properties.devices;
  return say(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  const Lock lock(devices().mutex);
  if (devices().properties.devices == 0) return say(cudaErrorNoDevice);
  *device = contexts.empty() ? 0 : cuda_on_host::number_of(contexts.back());
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  const Lock lock(devices().mutex);
  if (devices().properties.devices == 0) return say(cudaErrorNoDevice);
  if (!is_device(device)) return say(cudaErrorInvalidDevice);
  if (contexts.empty()) contexts.push_back(device);
  contexts.back() = device;
  devices().started |= 1u << device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const Lock lock(devices().mutex);
  const cuda_on_host::Properties& properties = devices().properties;
  if (!is_device(device)) return say(properties.devices == 0 ? cudaErrorNoDevice : cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrL2CacheSize: *value = properties.l2_bytes; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.compute_capability / 10; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = properties.shared_bytes_of_multiprocessor; return cudaSuccess;
    case cudaDevAttrPageableMemoryAccess: *value = properties.reads_pageable_memory; return cudaSuccess;
    case cudaDevAttrPageableMemoryAccessUsesHostPageTables: *value = properties.uses_host_page_tables; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = properties.shared_bytes_of_block; return cudaSuccess;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1 << 10; return cudaSuccess;
  }
  return say(cudaErrorInvalidValue);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned /*version*/,
                                             unsigned long long /*flags*/, cudaDriverEntryPointQueryResult* /*result*/) {
  const std::string_view wanted = name;
  *function = wanted == "cuDevicePrimaryCtxRetain" ? reinterpret_cast<void*>(retain_context)
              : wanted == "cuCtxGetCurrent"        ? reinterpret_cast<void*>(current_context)
              : wanted == "cuCtxPushCurrent"       ? reinterpret_cast<void*>(push_context)
              : wanted == "cuCtxPopCurrent"        ? reinterpret_cast<void*>(pop_context)
                                                   : nullptr;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const Lock lock(devices().mutex);
  if (devices().forbidden_by_capture()) return say(cudaErrorStreamCaptureUnsupported);
  devices().finish_device(cuda_on_host::current_device());
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const Lock lock(devices().mutex);
  if (devices().properties.devices == 0) return say(cudaErrorNoDevice);
  *stream = new CUstream_st{devices().add_queue(cuda_on_host::current_device(), flags != cudaStreamNonBlocking)};
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock(devices().mutex);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Lock lock(devices().mutex);
  const auto queue = queue_of(stream);
  if (queue->graph != nullptr) queue->graph->is_valid = false;
  if (devices().forbidden_by_capture() || queue->graph != nullptr) return say(cudaErrorStreamCaptureUnsupported);
  devices().finish(*queue);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock(devices().mutex);
  const auto queue = queue_of(stream);
  const auto reached = std::make_shared<std::optional<std::chrono::steady_clock::time_point>>();
  Step step;
  step.work = [reached] { *reached = std::chrono::steady_clock::now(); };
  const cudaError_t error = devices().give(queue, std::move(step));
  if (error != cudaSuccess) return say(error);
  event->reached = reached;
  event->queue = queue, event->number = devices().calls(), event->graph = queue->graph;
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Lock lock(devices().mutex);
  if (event->graph != nullptr || devices().forbidden_by_capture()) return say(cudaErrorStreamCaptureUnsupported);
  if (event->queue != nullptr) devices().finish(*event->queue, event->number);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const Lock lock(devices().mutex);
  for (const cudaEvent_t event : {begin, end}) {
    if (event->queue == nullptr || event->graph != nullptr) return say(cudaErrorInvalidResourceHandle);
  }
  if (!begin->reached->has_value() || !end->reached->has_value()) return say(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(**end->reached - **begin->reached).count();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const Lock lock(devices().mutex);
  const auto queue = queue_of(stream);
  if (devices().captured_beside(*queue) != nullptr) return say(cudaErrorStreamCaptureImplicit);
  *status = queue->graph == nullptr  ? cudaStreamCaptureStatusNone
            : queue->graph->is_valid ? cudaStreamCaptureStatusActive
                                     : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const Lock lock(devices().mutex);
  const auto queue = queue_of(stream);
  if (queue->is_default || queue->graph != nullptr) return say(cudaErrorStreamCaptureUnsupported);
  queue->graph = std::make_shared<Graph>();
  queue->graph->mode = mode;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const Lock lock(devices().mutex);
  *graph = nullptr;
  const auto queue = queue_of(stream);
  const std::shared_ptr<Graph> captured = queue->graph;
  if (captured == nullptr) return say(cudaErrorInvalidValue);
  queue->graph = nullptr;
  if (!captured->is_valid) return say(cudaErrorStreamCaptureInvalidated);
  *graph = new CUgraph_st{captured};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long /*flags*/) {
  *executable = new CUgraphExec_st{graph->graph->steps};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const Lock lock(devices().mutex);
  const auto queue = queue_of(stream);
  for (const Step& step : executable->steps) {
    const cudaError_t error = devices().give(queue, step);
    if (error != cudaSuccess) return say(error);
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*kernel*/) {
  attributes->sharedSizeBytes = kSharedOfKernels;
  attributes->ptxVersion = ptx_version();
  return cudaSuccess;
}
// Of the shape alone.
cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void* kernel, const cudaLaunchConfig_t* config) {
  const Lock lock(devices().mutex);
  if (config->numAttrs == 0) return say(cudaErrorInvalidValue);
  if (config->dynamicSmemBytes > most_dynamic_bytes(kernel)) return say(cudaErrorInvalidValue);
  const unsigned blocks = config->attrs[0].val.clusterDim.x;
  *count = blocks > static_cast<unsigned>(devices().properties.largest_cluster) ? 0 : devices().properties.multiprocessors / 16;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  const Lock lock(devices().mutex);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  const int rest = devices().properties.shared_bytes_of_block - value;
  if (value < 0 || rest < kSharedOfKernels) return say(cudaErrorInvalidValue);
  devices().not_dynamic_bytes[kernel] = rest;
  return cudaSuccess;
}

namespace cuda_on_host {

Properties& properties() { return devices().properties; }

OwnContext::OwnContext(int device) { contexts.push_back(device + Devices::kMostDevices); }
OwnContext::~OwnContext() { contexts.pop_back(); }

void set_seed(std::uint64_t seed) {
  const Lock lock(devices().mutex);
  devices().random = Random(seed);
}

cudaError_t queue_kernel(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> body,
                         ArgumentBytes arguments) {
  const Lock lock(devices().mutex);
  if (devices().properties.devices == 0) return say(cudaErrorNoDevice);
  if (devices().properties.compute_capability < 80) return say(cudaErrorNoKernelImageForDevice);  // as nvcc is told
  Kernel launch{config.gridDim, config.blockDim, 1, config.dynamicSmemBytes, 0, std::move(body), kernel, std::move(arguments)};
  bool overlaps = false;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      overlaps = attribute.val.programmaticStreamSerializationAllowed != 0;
    if (attribute.id != cudaLaunchAttributeClusterDimension) continue;
    const auto& cluster = attribute.val.clusterDim;
    if (cluster.x == 0 || cluster.y != 1 || cluster.z != 1) return say(cudaErrorInvalidClusterSize);
    if (cluster.x > static_cast<unsigned>(devices().properties.largest_cluster)) return say(cudaErrorInvalidClusterSize);
    launch.cluster = cluster.x;
  }
  const dim3 &grid = launch.grid, &block = launch.block;
  const bool has_blocks = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x < 1u << 31 && grid.y < 1u << 16 && grid.z < 1u << 16;
  const bool has_threads = block.x > 0 && block.y > 0 && block.z > 0 && block.x <= 1024 && block.y <= 1024 && block.z <= 64 &&
                           block.x * block.y * block.z <= 1024;
  if (!has_blocks || !has_threads) return say(cudaErrorInvalidConfiguration);
  if (grid.x % launch.cluster != 0) return say(cudaErrorInvalidClusterSize);
  if (launch.cluster > 1 && devices().properties.compute_capability < 90) return say(cudaErrorInvalidClusterSize);
  if (overlaps && ptx_version() < 90) return say(cudaErrorNotSupported);  // its begin_kernel() would not wait
  if (launch.dynamic_bytes > most_dynamic_bytes(kernel)) return say(cudaErrorInvalidValue);
  launch.most_shared_bytes = static_cast<std::size_t>(devices().properties.shared_bytes_of_block);
  const auto queue = queue_of(config.stream);
  if (queue->device != current_device()) return say(cudaErrorInvalidResourceHandle);
  Step step;
  step.devices = 1u << queue->device;
  step.work = [launch = std::move(launch)] { run_beside_ptx(launch, devices().random); };
  ++counters().queued;
  counters().overlapping += overlaps ? 1 : 0;
  return say(devices().give(queue, std::move(step)));
}

}  // namespace cuda_on_host
