#include "backends/cpu/head/kept_logits.h"
#include "backends/cpu/isa/kernels.h"
#include "backends/cpu/matmul/matmul_kernels.h"
#include "backends/cpu/simd/simd_baseline.h"
#include "backends/cpu/sweep/exp_sum.h"
#include "backends/cpu/sweep/sweeps.h"
#include "backends/cpu/sweep/target_sweep.h"

namespace tileloss::impl::cpu {

const KernelTable kBaselineKernels = {
    {&Sweeps<baseline::Simd, float>::run, &Sweeps<baseline::Simd, Bfloat16>::run, &Sweeps<baseline::Simd, Float16>::run},
    {TargetSweep<baseline::Simd, float>::table(), TargetSweep<baseline::Simd, Bfloat16>::table(),
     TargetSweep<baseline::Simd, Float16>::table()},
    &exp_sum<baseline::Simd>,
    MatmulKernels<baseline::Simd, 4, 3>::table(),
    KeptLogits<baseline::Simd>::table(),
};

}  // namespace tileloss::impl::cpu
