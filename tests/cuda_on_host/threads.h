// The threads of a kernel. Each is a fiber, all on the host's thread that runs the kernel; they change places only where they
// wait.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "tests/cuda_on_host/random.h"
#include "tests/cuda_on_host/vector_types.h"

namespace cuda_on_host {

struct Kernel {
  dim3 grid, block;
  unsigned cluster = 1;  // blocks, along x
  std::size_t dynamic_bytes = 0, most_shared_bytes = 0;
  std::function<void()> body;
  const void* function = nullptr;
  std::vector<std::vector<std::byte>> arguments;  // where PTX runs beside it (ptx_beside.h)
};

// One kernel at a time.
void run(const Kernel& kernel, Random& random);
// Whether the calling thread of the host runs one.
bool is_in_kernel();
// Whether the kernel's thread that runs has come to begin_kernel().
bool has_begun();

}  // namespace cuda_on_host
