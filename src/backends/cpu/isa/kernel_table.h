// What an instruction set's file compiles for its Simd.
#pragma once

#include "backends/cpu/head/kept_logits.h"
#include "backends/cpu/isa/kernels.h"
#include "backends/cpu/matmul/matmul_kernels.h"
#include "backends/cpu/sweep/exp_sum.h"
#include "backends/cpu/sweep/sweeps.h"
#include "backends/cpu/sweep/target_sweep.h"

namespace tileloss::impl::cpu {

// kRows: of a product's tile.
template <class Simd, int kRows>
constexpr KernelTable kernel_table() {
  return {
      {&Sweeps<Simd, float>::run, &Sweeps<Simd, Bfloat16>::run, &Sweeps<Simd, Float16>::run},
      {TargetSweep<Simd, float>::table(), TargetSweep<Simd, Bfloat16>::table(), TargetSweep<Simd, Float16>::table()},
      &exp_sum<Simd>,
      MatmulKernels<Simd, kRows, 3>::table(),
      KeptLogits<Simd>::table(),
  };
}

template <class Simd>
constexpr Bfloat16Kernels bfloat16_kernels() {
  return {&Sweeps<Simd, Bfloat16>::run, TargetSweep<Simd, Bfloat16>::table(), MatmulKernels<Simd, 8, 3>::table()};
}

}  // namespace tileloss::impl::cpu
