#include "backends/cpu/isa/kernel_table.h"
#include "backends/cpu/simd/simd_baseline.h"

namespace tileloss::impl::cpu {

const KernelTable kBaselineKernels = kernel_table<baseline::Simd, 4>();

}  // namespace tileloss::impl::cpu
