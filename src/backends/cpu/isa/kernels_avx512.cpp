#include "backends/cpu/isa/kernel_table.h"
#include "backends/cpu/simd/simd_avx512.h"

namespace tileloss::impl::cpu {

const KernelTable kAvx512Kernels = kernel_table<avx512::Simd, 8>();

}  // namespace tileloss::impl::cpu
