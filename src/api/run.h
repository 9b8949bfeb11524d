// Runs a planned problem on the CPU.
#ifndef TILELOSS_API_RUN_H_
#define TILELOSS_API_RUN_H_

#include "api/problem.h"

namespace tileloss::api {

Status run(const Problem& problem, const tileloss_plan& plan, const tileloss_run* run);

}  // namespace tileloss::api

#endif  // TILELOSS_API_RUN_H_
