// The types in which tensors lie in memory.
#pragma once

namespace tileloss::impl::cpu {

enum StorageType { kStorageFloat32 = 0, kStorageBfloat16 = 1, kStorageFloat16 = 2 };
inline constexpr int kStorageTypes = 3;

}  // namespace tileloss::impl::cpu
