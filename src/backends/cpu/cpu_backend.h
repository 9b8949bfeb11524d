// The CPU as a backend.
#pragma once

#include "backends/backend.h"

namespace tileloss::impl::cpu {

const Backend& cpu_backend();

}  // namespace tileloss::impl::cpu
