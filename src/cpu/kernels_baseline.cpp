#include "cpu/exp_sum.h"
#include "cpu/kept_logits.h"
#include "cpu/kernels.h"
#include "cpu/matmul_kernels.h"
#include "cpu/simd_baseline.h"
#include "cpu/sweeps.h"

namespace tileloss::cpu {

const KernelTable kBaselineKernels = {
    {&Sweeps<baseline::Simd, float>::run, &Sweeps<baseline::Simd, Bfloat16>::run, &Sweeps<baseline::Simd, Float16>::run},
    &exp_sum<baseline::Simd>,
    MatmulKernels<baseline::Simd, 4, 3>::table(),
    KeptLogits<baseline::Simd>::table(),
};

}  // namespace tileloss::cpu
