#include "backends/cpu/head/kept_logits.h"
#include "backends/cpu/isa/kernels.h"
#include "backends/cpu/matmul/matmul_kernels.h"
#include "backends/cpu/simd/simd_baseline.h"
#include "backends/cpu/sweep/exp_sum.h"
#include "backends/cpu/sweep/pair_sweep.h"
#include "backends/cpu/sweep/sweeps.h"

namespace tileloss::impl::cpu {

const KernelTable kBaselineKernels = {
    {&Sweeps<baseline::Simd, float>::run, &Sweeps<baseline::Simd, Bfloat16>::run, &Sweeps<baseline::Simd, Float16>::run},
    {PairSweep<baseline::Simd, float>::table(), PairSweep<baseline::Simd, Bfloat16>::table(),
     PairSweep<baseline::Simd, Float16>::table()},
    &exp_sum<baseline::Simd>,
    MatmulKernels<baseline::Simd, 4, 3>::table(),
    KeptLogits<baseline::Simd>::table(),
};

}  // namespace tileloss::impl::cpu
