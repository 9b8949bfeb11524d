// The backend of TILELOSS_CUDA.
#pragma once

#include "backends/backend.h"

namespace tileloss::impl::cuda {

const Backend& cuda_backend();

}  // namespace tileloss::impl::cuda
