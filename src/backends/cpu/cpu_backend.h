// The CPU as a backend.
#ifndef TILELOSS_BACKENDS_CPU_CPU_BACKEND_H_
#define TILELOSS_BACKENDS_CPU_CPU_BACKEND_H_

#include "backends/backend.h"

namespace tileloss::impl::cpu {

const Backend& cpu_backend();

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_CPU_BACKEND_H_
