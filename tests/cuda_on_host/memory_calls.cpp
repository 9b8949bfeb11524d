// Memory of the devices and of the host that both may touch.
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "tests/cuda_on_host/device_code.h"
#include "tests/cuda_on_host/host_calls.h"
#include "tests/cuda_on_host/streams.h"

using cuda_on_host::devices;
using cuda_on_host::Devices;
using cuda_on_host::Queue;
using cuda_on_host::queue_of;
using cuda_on_host::say;
using cuda_on_host::Step;

namespace {

using Lock = std::lock_guard<std::mutex>;

std::uintptr_t number(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

void forget(const void* data) {
  devices().pieces.erase(number(data));
  cuda_on_host::forget_access();
}

// Of write-combined memory of the host's the device has another address.
void* on_device(const Devices::Piece& piece, void* host) {
  return piece.is_write_combined ? static_cast<std::byte*>(host) + (std::ptrdiff_t{1} << 46) : host;
}

struct Span {
  bool is_device = false, is_inside = true;
  unsigned devices = 0;
  bool is_pageable = true;
};
Span span_of(const void* at, std::size_t bytes) {
  const auto* const piece = devices().find(at);
  if (piece == nullptr) return {};
  const bool is_inside = number(at) + bytes <= piece->first + piece->second.bytes;
  if (piece->second.is_host) return {false, is_inside, 0, false};
  return {true, is_inside, 1u << piece->second.device, false};
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, const std::shared_ptr<Queue>& queue) {
  if (bytes == 0) return cudaSuccess;
  const Span target = span_of(to, bytes), source = span_of(from, bytes);
  if (!target.is_inside || !source.is_inside) return cudaErrorInvalidValue;
  if (kind != cudaMemcpyDefault) {
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    const bool fits_target = target.is_device == to_device || (to_device && !target.is_pageable);
    const bool fits_source = source.is_device == from_device || (from_device && !source.is_pageable);
    if (!fits_target || !fits_source) return cudaErrorInvalidValue;
  }
  Step step;
  step.devices = target.devices | source.devices;
  if (source.is_pageable && queue->graph == nullptr) {  // read before the call returns, as CUDA does
    const auto* const begin = static_cast<const std::byte*>(from);
    step.work = [to, staged = std::vector<std::byte>(begin, begin + bytes)] { std::memcpy(to, staged.data(), staged.size()); };
  } else {
    step.work = [=] { std::memmove(to, from, bytes); };
  }
  return devices().give(queue, std::move(step));
}

cudaError_t set(void* data, int value, std::size_t bytes, const std::shared_ptr<Queue>& queue) {
  if (bytes == 0) return cudaSuccess;
  const Span target = span_of(data, bytes);
  if (target.is_pageable || !target.is_inside) return cudaErrorInvalidValue;
  Step step;
  step.devices = target.devices;
  step.work = [=] { std::memset(data, value, bytes); };
  return devices().give(queue, std::move(step));
}

cudaError_t allocate(void** data, std::size_t bytes, int device) {
  *data = nullptr;
  if (devices().properties.devices == 0) return cudaErrorNoDevice;
  if (bytes == 0) return cudaSuccess;
  if (bytes > devices().properties.memory_bytes) return cudaErrorMemoryAllocation;
  try {
    *data = devices().device(device).memory.allocate(bytes);
  } catch (const std::bad_alloc&) {
    return cudaErrorMemoryAllocation;
  }
  devices().pieces[number(*data)] = {bytes, device, false};
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  const Lock lock(devices().mutex);
  if (devices().forbidden_by_capture()) return say(cudaErrorStreamCaptureUnsupported);
  return say(allocate(data, bytes, cuda_on_host::current_device()));
}

// Waits for the device, as CUDA does.
cudaError_t cudaFree(void* data) {
  const Lock lock(devices().mutex);
  if (devices().forbidden_by_capture()) return say(cudaErrorStreamCaptureUnsupported);
  if (data == nullptr) return cudaSuccess;
  cuda_on_host::current_device();
  const auto piece = devices().pieces.find(number(data));
  if (piece == devices().pieces.end() || piece->second.is_host) return say(cudaErrorInvalidValue);
  const int device = piece->second.device;
  devices().finish_device(device);
  devices().device(device).memory.release(data);
  forget(data);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t stream) {
  const Lock lock(devices().mutex);
  return say(allocate(data, bytes, queue_of(stream)->device));
}
// A graph keeps what it frees, for its next run, which finds 0xff in it.
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  const Lock lock(devices().mutex);
  if (data == nullptr) return cudaSuccess;
  const auto piece = devices().pieces.find(number(data));
  if (piece == devices().pieces.end() || piece->second.is_host) return say(cudaErrorInvalidValue);
  const auto queue = queue_of(stream);
  Step step;
  step.devices = 1u << piece->second.device;
  if (queue->graph != nullptr) {
    step.work = [data, bytes = piece->second.bytes] { std::memset(data, 0xff, bytes); };
  } else {
    step.work = [data, device = piece->second.device] {
      devices().device(device).memory.release(data);
      forget(data);
    };
  }
  return say(devices().give(queue, std::move(step)));
}

cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned flags) {
  const Lock lock(devices().mutex);
  if (devices().forbidden_by_capture()) return say(cudaErrorStreamCaptureUnsupported);
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;
  *data = std::malloc(bytes);
  if (*data == nullptr) return say(cudaErrorMemoryAllocation);
  std::memset(*data, 0xff, bytes);
  const bool is_write_combined = (flags & cudaHostAllocWriteCombined) != 0;
  devices().pieces[number(*data)] = {bytes, cuda_on_host::current_device(), true, is_write_combined};
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  const Lock lock(devices().mutex);
  if (devices().forbidden_by_capture()) return say(cudaErrorStreamCaptureUnsupported);
  if (data == nullptr) return cudaSuccess;
  const auto piece = devices().pieces.find(number(data));
  if (piece == devices().pieces.end() || !piece->second.is_host) return say(cudaErrorInvalidValue);
  for (int i = 0; i < devices().properties.devices; ++i) devices().finish_device(i);
  forget(data);
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  const Lock lock(devices().mutex);
  return say(copy(to, from, bytes, kind, queue_of(stream)));
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const Lock lock(devices().mutex);
  if (devices().forbidden_by_capture()) return say(cudaErrorStreamCaptureUnsupported);
  const auto queue = queue_of(nullptr);
  const cudaError_t error = copy(to, from, bytes, kind, queue);
  if (error == cudaSuccess) devices().finish(*queue);
  return say(error);
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  const Lock lock(devices().mutex);
  ++cuda_on_host::counters().queued;
  return say(set(data, value, bytes, queue_of(stream)));
}
cudaError_t cudaMemset(void* data, int value, std::size_t bytes) { return cudaMemsetAsync(data, value, bytes, nullptr); }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const Lock lock(devices().mutex);
  void* const at = const_cast<void*>(data);
  const int current = cuda_on_host::current_device();
  const auto* const piece = devices().find(data);
  if (piece == nullptr) {
    *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, at};
  } else if (piece->second.is_host) {
    *attributes = {cudaMemoryTypeHost, cuda_on_host::number_of(piece->second.device), on_device(piece->second, at), at};
  } else {
    const bool is_reachable = piece->second.device == current || devices().properties.peers_are_mapped;
    const int device = cuda_on_host::number_of(piece->second.device);
    *attributes = {cudaMemoryTypeDevice, device, is_reachable ? at : nullptr, nullptr};
  }
  return say(cudaSuccess);
}
