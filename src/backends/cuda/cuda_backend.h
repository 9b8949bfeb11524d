// The backend of TILELOSS_CUDA.
#ifndef TILELOSS_BACKENDS_CUDA_CUDA_BACKEND_H_
#define TILELOSS_BACKENDS_CUDA_CUDA_BACKEND_H_

#include "backends/backend.h"

namespace tileloss::impl::cuda {

const Backend& cuda_backend();

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_CUDA_BACKEND_H_
