#include "backends/cpu/head/kept_logits.h"
#include "backends/cpu/isa/kernels.h"
#include "backends/cpu/matmul/matmul_kernels.h"
#include "backends/cpu/simd/simd_avx512.h"
#include "backends/cpu/sweep/exp_sum.h"
#include "backends/cpu/sweep/sweeps.h"
#include "backends/cpu/sweep/target_sweep.h"

namespace tileloss::impl::cpu {

const KernelTable kAvx512Kernels = {
    {&Sweeps<avx512::Simd, float>::run, &Sweeps<avx512::Simd, Bfloat16>::run, &Sweeps<avx512::Simd, Float16>::run},
    {TargetSweep<avx512::Simd, float>::table(), TargetSweep<avx512::Simd, Bfloat16>::table(),
     TargetSweep<avx512::Simd, Float16>::table()},
    &exp_sum<avx512::Simd>,
    MatmulKernels<avx512::Simd, 8, 3>::table(),
    KeptLogits<avx512::Simd>::table(),
};

}  // namespace tileloss::impl::cpu
