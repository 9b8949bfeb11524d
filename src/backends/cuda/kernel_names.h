// The kernels that take rows of logits, by the names that plans, tools and messages give them.
#pragma once

#include <tileloss/tileloss.h>

namespace tileloss::impl::cuda {

inline constexpr const char *kAuto = "auto", *kTwoReads = "two_reads", *kCluster = "cluster";
inline constexpr const char* kKernelNames[] = {kAuto, kTwoReads, kCluster};  // by tileloss_cuda_kernel

}  // namespace tileloss::impl::cuda
