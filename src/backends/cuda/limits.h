// Numbers that kernels and those who launch them agree on.
#pragma once

namespace tileloss::impl::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kMaxThreads = 512;     // of a block, so that one thread may have 128 registers
inline constexpr int kMaxRowThreads = 384;  // of one that sweeps a row, so that in two of them one may have 80
// In a multiprocessor, with 80 registers each: a warp's are in one of its four parts.
inline constexpr int kRowThreadsAtOnce = 4 * (16384 / (80 * kWarp)) * kWarp;
// Blocks that sweep plain rows of 16 bits, of which a multiprocessor is to hold so many; sm_120's code wants more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
inline constexpr int kPlainBlocks = 1;
#else
inline constexpr int kPlainBlocks = 2;
#endif
inline constexpr int kMaxCluster = 8;  // blocks
// Bytes of a block of whole_rows, besides its slice; from sm_90 on its code counts 1024 that CUDA keeps for itself among them.
inline constexpr int kSharedOfWholeRow = 3072;

}  // namespace tileloss::impl::cuda
