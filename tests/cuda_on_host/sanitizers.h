// What sanitizers are told of fibers. Thread sanitizer's calls are there when the program has it: the files that run fibers are
// compiled without it, so that what they do is no thread's doing.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" {
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
}

namespace cuda_on_host {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kHasAddressSanitizer = true;
#else
constexpr bool kHasAddressSanitizer = false;
#endif
inline bool has_thread_sanitizer() { return &__tsan_create_fiber != nullptr; }

// All that was done before a release comes before what follows the acquire of the same address.
inline void acquire(const void* address) {
  if (has_thread_sanitizer()) __tsan_acquire(const_cast<void*>(address));
}
inline void release(const void* address) {
  if (has_thread_sanitizer()) __tsan_release(const_cast<void*>(address));
}

}  // namespace cuda_on_host
