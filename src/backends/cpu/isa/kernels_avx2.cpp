#include "backends/cpu/head/kept_logits.h"
#include "backends/cpu/isa/kernels.h"
#include "backends/cpu/matmul/matmul_kernels.h"
#include "backends/cpu/simd/simd_avx2.h"
#include "backends/cpu/sweep/exp_sum.h"
#include "backends/cpu/sweep/sweeps.h"
#include "backends/cpu/sweep/target_sweep.h"

namespace tileloss::impl::cpu {

const KernelTable kAvx2Kernels = {
    {&Sweeps<avx2::Simd, float>::run, &Sweeps<avx2::Simd, Bfloat16>::run, &Sweeps<avx2::Simd, Float16>::run},
    {TargetSweep<avx2::Simd, float>::table(), TargetSweep<avx2::Simd, Bfloat16>::table(),
     TargetSweep<avx2::Simd, Float16>::table()},
    &exp_sum<avx2::Simd>,
    MatmulKernels<avx2::Simd, 4, 3>::table(),
    KeptLogits<avx2::Simd>::table(),
};

}  // namespace tileloss::impl::cpu
