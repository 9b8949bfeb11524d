// One table per instruction set that is compiled in.
#pragma once

#include "backends/cpu/sweep/row_kernel.h"

namespace tileloss::impl::cpu {

extern const KernelTable kBaselineKernels;
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kNeonKernels;
// What AVX-512 BF16 and NEON with BF16 do otherwise than AVX-512 and NEON, which they have the rest from.
struct Bfloat16Kernels {
  RowFunction run;
  TargetTable target;
  MatmulTable matmul;
};
extern const Bfloat16Kernels kAvx512Bf16Kernels, kNeonBf16Kernels;
// Products in tile registers, for the instruction set that has the rest from AVX-512 BF16.
extern const MatmulTable kAmxMatmul;

}  // namespace tileloss::impl::cpu
