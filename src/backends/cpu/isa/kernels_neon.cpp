#include "backends/cpu/head/kept_logits.h"
#include "backends/cpu/isa/kernels.h"
#include "backends/cpu/matmul/matmul_kernels.h"
#include "backends/cpu/simd/simd_neon.h"
#include "backends/cpu/sweep/exp_sum.h"
#include "backends/cpu/sweep/sweeps.h"
#include "backends/cpu/sweep/target_sweep.h"

namespace tileloss::impl::cpu {

const KernelTable kNeonKernels = {
    {&Sweeps<neon::Simd, float>::run, &Sweeps<neon::Simd, Bfloat16>::run, &Sweeps<neon::Simd, Float16>::run},
    {TargetSweep<neon::Simd, float>::table(), TargetSweep<neon::Simd, Bfloat16>::table(),
     TargetSweep<neon::Simd, Float16>::table()},
    &exp_sum<neon::Simd>,
    MatmulKernels<neon::Simd, 8, 3>::table(),
    KeptLogits<neon::Simd>::table(),
};

}  // namespace tileloss::impl::cpu
