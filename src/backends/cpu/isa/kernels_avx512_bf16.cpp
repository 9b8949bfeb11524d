#include "backends/cpu/head/kept_logits.h"
#include "backends/cpu/isa/kernels.h"
#include "backends/cpu/matmul/matmul_kernels.h"
#include "backends/cpu/simd/simd_avx512_bf16.h"
#include "backends/cpu/sweep/exp_sum.h"
#include "backends/cpu/sweep/pair_sweep.h"
#include "backends/cpu/sweep/sweeps.h"

namespace tileloss::impl::cpu {

const KernelTable kAvx512Bf16Kernels = {
    {&Sweeps<avx512_bf16::Simd, float>::run, &Sweeps<avx512_bf16::Simd, Bfloat16>::run, &Sweeps<avx512_bf16::Simd, Float16>::run},
    {PairSweep<avx512_bf16::Simd, float>::table(), PairSweep<avx512_bf16::Simd, Bfloat16>::table(),
     PairSweep<avx512_bf16::Simd, Float16>::table()},
    &exp_sum<avx512_bf16::Simd>,
    MatmulKernels<avx512_bf16::Simd, 8, 3>::table(),
    KeptLogits<avx512_bf16::Simd>::table(),
};

}  // namespace tileloss::impl::cpu
