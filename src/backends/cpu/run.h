// Runs a planned problem on the CPU.
#ifndef TILELOSS_BACKENDS_CPU_RUN_H_
#define TILELOSS_BACKENDS_CPU_RUN_H_

#include "backends/problem.h"

namespace tileloss::impl::cpu {

Status run(const Problem& problem, const tileloss_plan& plan, const tileloss_run& run);

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_RUN_H_
