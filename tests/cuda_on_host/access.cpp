// What the kernels' wrappers of loads and stores call.
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "tests/cuda_on_host/device_code.h"
#include "tests/cuda_on_host/streams.h"
#include "tests/cuda_on_host/threads.h"

namespace cuda_on_host {
namespace {

thread_local bool has_fenced = false;

std::uintptr_t found_begin = 0, found_end = 0;  // the piece that was found last

void check_access(const char* what, const void* data, std::size_t bytes) {
  if (!has_begun()) {
    std::fprintf(stderr, "cuda_on_host: a kernel %s %zu bytes at %p before begin_kernel()\n", what, bytes, data);
    std::abort();
  }
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  if (at % bytes != 0) {
    std::fprintf(stderr, "cuda_on_host: a kernel %s %zu bytes at %p, which is not aligned to that\n", what, bytes, data);
    std::abort();
  }
  if (at >= found_begin && at + bytes <= found_end) return;
  const auto* const piece = devices().find(data);
  if (piece == nullptr || at + bytes > piece->first + piece->second.bytes) {
    std::fprintf(stderr, "cuda_on_host: a kernel %s %zu bytes at %p, which is not the device's memory\n", what, bytes, data);
    std::abort();
  }
  found_begin = piece->first, found_end = piece->first + piece->second.bytes;
}

}  // namespace

Counters& counters() {
  static Counters all;
  return all;
}
void count_load(const void* at, std::size_t bytes) {
  check_access("reads", at, bytes);
  counters().loaded += bytes;
}
void count_store(const void* at, std::size_t bytes) {
  check_access("writes", at, bytes);
  counters().stored += bytes;
}

void fence() { has_fenced = true; }
void publish() {
  if (std::exchange(has_fenced, false)) return;
  std::fprintf(stderr, "cuda_on_host: a kernel publishes what it wrote without a fence\n");
  std::abort();
}

void forget_access() { found_begin = found_end = 0; }

}  // namespace cuda_on_host
