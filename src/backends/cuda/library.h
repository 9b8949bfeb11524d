// libtileloss_cuda.so, which has the CUDA backend: opened when the first call asks for that device, so that libtileloss.so needs
// nothing of CUDA's. It is searched beside who asks, then as the loader does.
#pragma once

#include <string>

#include "backends/backend.h"

namespace tileloss::impl::cuda {

struct Library {
  const Backend* backend = nullptr;
  std::string missing;  // what is, where there is no backend
};

// Opened once.
const Library& library();

// What libtileloss_cuda.so exports under kEntryPoint: its backend, or null and what is missing, at most `capacity` bytes of it.
using EntryPoint = const Backend*(const char* version, char* missing, std::size_t capacity);
inline constexpr const char* kEntryPoint = "tileloss_cuda_backend";

}  // namespace tileloss::impl::cuda
