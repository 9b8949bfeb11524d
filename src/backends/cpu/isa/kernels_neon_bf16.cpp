#include "backends/cpu/isa/kernels.h"
#include "backends/cpu/matmul/matmul_kernels.h"
#include "backends/cpu/simd/simd_neon_bf16.h"
#include "backends/cpu/sweep/sweeps.h"
#include "backends/cpu/sweep/target_sweep.h"

namespace tileloss::impl::cpu {

const Bfloat16Kernels kNeonBf16Kernels = {
    &Sweeps<neon_bf16::Simd, Bfloat16>::run,
    TargetSweep<neon_bf16::Simd, Bfloat16>::table(),
    MatmulKernels<neon_bf16::Simd, 8, 3>::table(),
};

}  // namespace tileloss::impl::cpu
