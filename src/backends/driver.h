// The one driver of all devices and functions: which part of a call runs when.
#pragma once

#include "backends/backend.h"

namespace tileloss::impl {

Status run_call(const Backend& backend, const Problem& problem, const tileloss_plan& plan, const tileloss_run& run);

}  // namespace tileloss::impl
