#include "backends/cpu/isa/kernels.h"
#include "backends/cpu/matmul/matmul_kernels.h"
#include "backends/cpu/simd/simd_avx512_bf16.h"
#include "backends/cpu/sweep/sweeps.h"
#include "backends/cpu/sweep/target_sweep.h"

namespace tileloss::impl::cpu {

const Bfloat16Kernels kAvx512Bf16Kernels = {
    &Sweeps<avx512_bf16::Simd, Bfloat16>::run,
    TargetSweep<avx512_bf16::Simd, Bfloat16>::table(),
    MatmulKernels<avx512_bf16::Simd, 8, 3>::table(),
};

}  // namespace tileloss::impl::cpu
