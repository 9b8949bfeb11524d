#include "backends/cpu/isa/kernel_table.h"
#include "backends/cpu/simd/simd_neon.h"

namespace tileloss::impl::cpu {

const KernelTable kNeonKernels = kernel_table<neon::Simd, 8>();

}  // namespace tileloss::impl::cpu
