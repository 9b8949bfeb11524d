// Kernels as nvcc compiled them beside those of the host's compiler. Where TILELOSS_TEST_PTX names a folder with the PTX of all
// kernels, some launches of each run both ways, and the devices' memory has to be the same afterwards but for rounding. A
// difference, or a kernel without PTX, ends the process aloud.
#pragma once

#include "tests/cuda_on_host/random.h"
#include "tests/cuda_on_host/threads.h"

namespace cuda_on_host {

void run_beside_ptx(const Kernel& kernel, Random& random);

}  // namespace cuda_on_host
