#include "cpu/exp_sum.h"
#include "cpu/kept_logits.h"
#include "cpu/kernels.h"
#include "cpu/matmul_kernels.h"
#include "cpu/simd_avx512.h"
#include "cpu/sweeps.h"

namespace tileloss::cpu {

const KernelTable kAvx512Kernels = {
    {&Sweeps<avx512::Simd, float>::run, &Sweeps<avx512::Simd, Bfloat16>::run, &Sweeps<avx512::Simd, Float16>::run},
    &exp_sum<avx512::Simd>,
    MatmulKernels<avx512::Simd, 8, 3>::table(),
    KeptLogits<avx512::Simd>::table(),
};

}  // namespace tileloss::cpu
