// The types in which tensors lie in memory.
#ifndef TILELOSS_BACKENDS_CPU_SIMD_STORAGE_TYPE_H_
#define TILELOSS_BACKENDS_CPU_SIMD_STORAGE_TYPE_H_

namespace tileloss::impl::cpu {

enum StorageType { kStorageFloat32 = 0, kStorageBfloat16 = 1, kStorageFloat16 = 2 };
inline constexpr int kStorageTypes = 3;

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SIMD_STORAGE_TYPE_H_
