// A libtileloss_xla.so that gives XLA's calls on the CPU to the handlers of CUDA, on the device of host_library.cpp: so JAX's
// tests run on it. XLA's buffers are copied to that device and back, and what XLA tells its handlers on a GPU is told here. Its
// pool has taken all of the device's memory, as it does at JAX's start: during a call nobody else finds any.
#include <tileloss/tileloss.h>
#include <xla/ffi/api/c_api.h>

#include <bit>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

extern "C" {
void* cuda_on_host_malloc(int device, std::size_t bytes);
void cuda_on_host_free(void* data);
void cuda_on_host_set_memory(std::size_t bytes);
void* cuda_on_host_stream(int device);
void cuda_on_host_give(void* stream, int device, void (*work)());
void cuda_on_host_wait(void* stream, int device);
// frontends/xla/handler.cpp
XLA_FFI_Error* tileloss_xla_call_on_cuda(XLA_FFI_CallFrame*);
TILELOSS_API XLA_FFI_Error* tileloss_xla_call_on_cpu(XLA_FFI_CallFrame*);
// For tests: what XLA's pool has, and by how much its memory is off the 256 bytes that it is aligned to otherwise.
TILELOSS_API void host_xla_set_pool(std::size_t bytes, std::size_t offset);
}

namespace {

constexpr int kDevice = 1;
constexpr std::size_t kMemory = std::size_t{80} << 30;

const XLA_FFI_Api* xla = nullptr;  // what XLA itself gives to its handlers
std::size_t pool_bytes = kMemory, pool_offset = 0;
// XLA has its memory back in the stream's order; here it is kept until the stream is done.
std::vector<void*> freed;

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

XLA_FFI_Error* refusal(XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, code};
  return xla->XLA_FFI_Error_Create(&args);
}

XLA_FFI_Error* allocate_scratch(XLA_FFI_DeviceMemory_Allocate_Args* args) {
  constexpr std::size_t kMaxAlignment = 16;
  if (!std::has_single_bit(args->alignment) || args->alignment > kMaxAlignment)
    return refusal(XLA_FFI_Error_Code_INVALID_ARGUMENT, "Unsupported alignment");
  if (args->size > pool_bytes) return refusal(XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "Out of memory");
  cuda_on_host_set_memory(kMemory);
  args->data = static_cast<std::byte*>(cuda_on_host_malloc(kDevice, args->size + pool_offset)) + pool_offset;
  cuda_on_host_set_memory(0);
  return nullptr;
}

XLA_FFI_Error* free_scratch(XLA_FFI_DeviceMemory_Free_Args* args) {
  freed.push_back(static_cast<std::byte*>(args->data) - pool_offset);
  return nullptr;
}

}  // namespace

void host_xla_set_pool(std::size_t bytes, std::size_t offset) { pool_bytes = bytes, pool_offset = offset; }

XLA_FFI_Error* tileloss_xla_call_on_cpu(XLA_FFI_CallFrame* given) {
  if (given->extension_start != nullptr) return tileloss_xla_call_on_cuda(given);  // what XLA asks of a handler itself
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  XLA_FFI_CallFrame frame = *given;
  xla = given->api;
  XLA_FFI_Api api = *xla;
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = stream();
    return nullptr;
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
    args->device_ordinal = kDevice;
    return nullptr;
  };
  api.XLA_FFI_DeviceMemory_Allocate = allocate_scratch;
  api.XLA_FFI_DeviceMemory_Free = free_scratch;
  frame.api = &api;
  Copies copies;
  std::vector<void*> operands(given->args.args, given->args.args + given->args.size);
  std::vector<void*> results(given->rets.rets, given->rets.rets + given->rets.size);
  copies.add(operands, false);
  copies.add(results, true);
  copies.place();
  frame.args.args = operands.data();
  frame.rets.rets = results.data();
  cuda_on_host_set_memory(0);
  XLA_FFI_Error* const error = tileloss_xla_call_on_cuda(&frame);
  cuda_on_host_set_memory(kMemory);
  copies.give_back();
  for (void* const data : freed) cuda_on_host_free(data);
  freed.clear();
  return error;
}
