// Numbers of the C ABI as the enums that tileloss.h has them from, of which the compiler knows when a switch forgets one.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace tileloss::impl {

// `kAny`: any enumerator of that enum. A number that is none of them passes through, as the compilers let an enum hold whatever
// its underlying type does.
template <auto kAny>
TILELOSS_HOST_DEVICE constexpr auto as_enum(std::int32_t number) {
  return static_cast<decltype(kAny)>(number);
}

}  // namespace tileloss::impl
