#include "cpu/exp_sum.h"
#include "cpu/kept_logits.h"
#include "cpu/kernels.h"
#include "cpu/matmul_kernels.h"
#include "cpu/simd_avx2.h"
#include "cpu/sweeps.h"

namespace tileloss::cpu {

const KernelTable kAvx2Kernels = {
    {&Sweeps<avx2::Simd, float>::run, &Sweeps<avx2::Simd, Bfloat16>::run, &Sweeps<avx2::Simd, Float16>::run},
    &exp_sum<avx2::Simd>,
    MatmulKernels<avx2::Simd, 4, 3>::table(),
    KeptLogits<avx2::Simd>::table(),
};

}  // namespace tileloss::cpu
