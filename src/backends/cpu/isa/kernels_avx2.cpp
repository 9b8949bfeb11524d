#include "backends/cpu/isa/kernel_table.h"
#include "backends/cpu/simd/simd_avx2.h"

namespace tileloss::impl::cpu {

const KernelTable kAvx2Kernels = kernel_table<avx2::Simd, 4>();

}  // namespace tileloss::impl::cpu
