// The calls of a check: a forward, the function's own way to its gradient, and a backward.
#pragma once

#include "judge/inputs/call.h"
#include "judge/inputs/config.h"
#include "judge/inputs/inputs.h"
#include "judge/strict/strict.h"

namespace tileloss::tools {

KernelResults run_kernels(const GradcheckConfig& config, const CheckInputs& inputs, const KernelCall& kernel = call);

// gradcheck --strict: every call of run_kernels, up to the first with findings. Of a large check only so many rows, and of a
// synthetic LM head only so many classes, that the guarded copies stay below kStrictBytes.
constexpr int64_t kStrictBytes = int64_t{256} << 20;
StrictReport check_strict(const GradcheckConfig& config, const CheckInputs& inputs, ThreadTeam& team,
                          const KernelCall& kernel = call);

}  // namespace tileloss::tools
