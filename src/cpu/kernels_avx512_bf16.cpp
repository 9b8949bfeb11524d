#include "cpu/exp_sum.h"
#include "cpu/kept_logits.h"
#include "cpu/kernels.h"
#include "cpu/matmul_kernels.h"
#include "cpu/simd_avx512_bf16.h"
#include "cpu/sweeps.h"

namespace tileloss::cpu {

const KernelTable kAvx512Bf16Kernels = {
    {&Sweeps<avx512_bf16::Simd, float>::run, &Sweeps<avx512_bf16::Simd, Bfloat16>::run, &Sweeps<avx512_bf16::Simd, Float16>::run},
    &exp_sum<avx512_bf16::Simd>,
    MatmulKernels<avx512_bf16::Simd, 8, 3>::table(),
    KeptLogits<avx512_bf16::Simd>::table(),
};

}  // namespace tileloss::cpu
