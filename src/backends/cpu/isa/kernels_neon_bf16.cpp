#include "backends/cpu/isa/kernel_table.h"
#include "backends/cpu/simd/simd_neon_bf16.h"

namespace tileloss::impl::cpu {

const Bfloat16Kernels kNeonBf16Kernels = bfloat16_kernels<neon_bf16::Simd>();

}  // namespace tileloss::impl::cpu
