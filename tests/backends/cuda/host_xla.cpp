// A libtileloss_xla.so that gives XLA's calls on the CPU to the handlers of CUDA, on the device of host_library.cpp: so JAX's
// tests run on it. XLA's buffers are copied to that device and back, and what XLA tells its handlers on a GPU is told here.
#include <tileloss/tileloss.h>
#include <xla/ffi/api/c_api.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

extern "C" {
void* cuda_on_host_malloc(int device, std::size_t bytes);
void cuda_on_host_free(void* data);
void* cuda_on_host_stream(int device);
void cuda_on_host_give(void* stream, int device, void (*work)());
void cuda_on_host_wait(void* stream, int device);
// frontends/xla/handler.cpp
XLA_FFI_Error* tileloss_xla_call_on_cuda(XLA_FFI_CallFrame*);
TILELOSS_API XLA_FFI_Error* tileloss_xla_call_on_cpu(XLA_FFI_CallFrame*);
}

namespace {

constexpr int kDevice = 1;

void* stream() {
  static void* const made = cuda_on_host_stream(kDevice);
  return made;
}

void run(std::function<void()> work) {
  static std::function<void()> current;
  current = std::move(work);
  cuda_on_host_give(stream(), kDevice, [] { current(); });
  cuda_on_host_wait(stream(), kDevice);
}

std::size_t bytes_of(const XLA_FFI_Buffer& buffer) {
  std::size_t bytes = 4;
  switch (buffer.dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_U8: bytes = 1; break;
    case XLA_FFI_DataType_BF16:
    case XLA_FFI_DataType_F16: bytes = 2; break;
    case XLA_FFI_DataType_S64: bytes = 8; break;
    default: break;
  }
  for (int64_t i = 0; i < buffer.rank; ++i) bytes *= static_cast<std::size_t>(buffer.dims[i]);
  return bytes;
}

// Those of a call, on the device: a result over an operand stays that.
class Copies {
 public:
  Copies() = default;
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  ~Copies() {
    for (const auto& [host, copy] : copies_) cuda_on_host_free(copy.data);
  }

  // `buffers` with their copies' addresses.
  void add(std::vector<void*>& buffers, bool is_result) {
    for (void*& each : buffers) {
      XLA_FFI_Buffer buffer = *static_cast<const XLA_FFI_Buffer*>(each);
      Copy& copy = copies_[buffer.data];
      const std::size_t bytes = bytes_of(buffer);
      if (copy.data == nullptr && bytes > 0) {
        copy = {cuda_on_host_malloc(kDevice, bytes), bytes, false};
        if (!is_result) run([&] { std::memcpy(copy.data, buffer.data, bytes); });
      }
      copy.is_result |= is_result;
      buffer.data = copy.data;
      all_.push_back(buffer);
    }
    for (std::size_t i = 0; i < buffers.size(); ++i) places_.push_back({&buffers[i], all_.size() - buffers.size() + i});
  }
  void place() {
    for (const auto& [at, index] : places_) *at = &all_[index];
  }
  void give_back() {
    run([&] {
      for (const auto& [host, copy] : copies_) {
        if (copy.is_result) std::memcpy(host, copy.data, copy.bytes);
      }
    });
  }

 private:
  struct Copy {
    void* data = nullptr;
    std::size_t bytes = 0;
    bool is_result = false;
  };
  std::map<void*, Copy> copies_;
  std::vector<XLA_FFI_Buffer> all_;
  std::vector<std::pair<void**, std::size_t>> places_;
};

}  // namespace

XLA_FFI_Error* tileloss_xla_call_on_cpu(XLA_FFI_CallFrame* given) {
  if (given->extension_start != nullptr) return tileloss_xla_call_on_cuda(given);  // what XLA asks of a handler itself
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  XLA_FFI_CallFrame frame = *given;
  XLA_FFI_Api api = *given->api;
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = stream();
    return nullptr;
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
    args->device_ordinal = kDevice;
    return nullptr;
  };
  // XLA has its memory back in the stream's order; here it is kept until the stream is done.
  static std::vector<void*> freed;
  api.XLA_FFI_DeviceMemory_Allocate = [](XLA_FFI_DeviceMemory_Allocate_Args* args) -> XLA_FFI_Error* {
    args->data = cuda_on_host_malloc(kDevice, args->size);
    return nullptr;
  };
  api.XLA_FFI_DeviceMemory_Free = [](XLA_FFI_DeviceMemory_Free_Args* args) -> XLA_FFI_Error* {
    freed.push_back(args->data);
    return nullptr;
  };
  frame.api = &api;
  Copies copies;
  std::vector<void*> operands(given->args.args, given->args.args + given->args.size);
  std::vector<void*> results(given->rets.rets, given->rets.rets + given->rets.size);
  copies.add(operands, false);
  copies.add(results, true);
  copies.place();
  frame.args.args = operands.data();
  frame.rets.rets = results.data();
  XLA_FFI_Error* const error = tileloss_xla_call_on_cuda(&frame);
  copies.give_back();
  for (void* const data : freed) cuda_on_host_free(data);
  freed.clear();
  return error;
}
