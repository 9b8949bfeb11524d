// Single elements of any storage type.
#pragma once

#include <cstdint>

#include "backends/cpu/simd/storage_type.h"
#include "core/number_formats.h"

namespace tileloss::impl::cpu {

inline constexpr std::int64_t kElementBytes[] = {4, 2, 2};

inline void store_element(StorageType storage, void* data, std::int64_t at, float value) {
  switch (storage) {
    case kStorageBfloat16: static_cast<Bfloat16*>(data)[at] = from_float<Bfloat16>(value); break;
    case kStorageFloat16: static_cast<Float16*>(data)[at] = from_float<Float16>(value); break;
    case kStorageFloat32: static_cast<float*>(data)[at] = value; break;
  }
}

inline float load_element(StorageType storage, const void* data, std::int64_t at) {
  switch (storage) {
    case kStorageBfloat16: return to_float(static_cast<const Bfloat16*>(data)[at]);
    case kStorageFloat16: return to_float(static_cast<const Float16*>(data)[at]);
    case kStorageFloat32: break;
  }
  return static_cast<const float*>(data)[at];
}

}  // namespace tileloss::impl::cpu
