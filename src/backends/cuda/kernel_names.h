// The kernels that take rows of logits, by the names that plans, tools and messages give them.
#ifndef TILELOSS_BACKENDS_CUDA_KERNEL_NAMES_H_
#define TILELOSS_BACKENDS_CUDA_KERNEL_NAMES_H_

#include <tileloss/tileloss.h>

namespace tileloss::impl::cuda {

inline constexpr const char *kAuto = "auto", *kTwoReads = "two_reads", *kCluster = "cluster";
inline constexpr const char* kKernelNames[] = {kAuto, kTwoReads, kCluster};  // by tileloss_cuda_kernel

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_KERNEL_NAMES_H_
