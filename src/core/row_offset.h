// Where a row lies.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace tileloss::impl {

// Elements before row i of a matrix whose rows may come in groups of `group_rows`, 0: they do not.
TILELOSS_HOST_DEVICE inline std::int64_t row_offset(std::int64_t i, std::int64_t row_stride, std::int64_t group_rows,
                                                    std::int64_t group_stride) {
  const std::int64_t group = group_rows > 0 ? i / group_rows : 0;
  return group * group_stride + (i - group * group_rows) * row_stride;
}

}  // namespace tileloss::impl
