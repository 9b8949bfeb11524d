#include "backends/cpu/isa/kernel_table.h"
#include "backends/cpu/simd/simd_avx512_bf16.h"

namespace tileloss::impl::cpu {

const Bfloat16Kernels kAvx512Bf16Kernels = bfloat16_kernels<avx512_bf16::Simd>();

}  // namespace tileloss::impl::cpu
