// A device in the CPU's place: calls with views of the host's memory run on it, over copies. So tools and tests that know the
// host's memory alone run on a device.
#pragma once

#include "backends/backend.h"

namespace tileloss::impl::device {

// For the rest of the process. Both live as long; `device` has a memory. Plans are `planner`'s: the device's own, or the CPU's,
// in whose place the device then makes one of its own, with these hints.
void take_the_cpus_place(const Backend& device, std::int32_t device_index, const Backend& planner,
                         tileloss_plan_options (*hints)(const Problem&) = nullptr);

}  // namespace tileloss::impl::device
