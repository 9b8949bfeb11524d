// One of the kernels that sentryward_test.py verifies, alone, and that its arguments lie where that says.
#include <cstddef>

#include "backends/cuda/row_whole.h"
#include "losses/cross_entropy.h"

namespace tileloss::impl {

using cuda::SweepJob;
using Coefficients = device::CoefficientsOf<CrossEntropy>;

template __global__ void cuda::whole_rows<Bfloat16, true, false, Coefficients>(SweepJob, Coefficients, bool);

static_assert(offsetof(SweepJob, dlogits) == 32 && offsetof(SweepJob, columns) == 64 && offsetof(SweepJob, slices) == 88 &&
              offsetof(SweepJob, transform) == 96 && offsetof(SweepJob, rows.label_columns) == 112 &&
              offsetof(SweepJob, rows.results) == 136 && sizeof(SweepJob) == 176);
static_assert(sizeof(Coefficients) == 16);

}  // namespace tileloss::impl
