// What a call with the LM head keeps of its logits, and how its work is cut: the planner's side of head/lm_head.h.
#pragma once

#include "backends/cpu/head/lm_head.h"
#include "backends/cpu/plan/plan.h"

namespace tileloss::impl::cpu {

// What the products see.
Compute compute_of(const Problem& problem);

// Schedule, blocks and bytes of a plan whose instruction set and threads are chosen. `budget` 0: half of the logits' size in
// hidden's dtype (of both sides' with a teacher's head) but at least 192 MiB, or what the leanest schedule needs.
Status plan_linear(const Problem& problem, tileloss_schedule hint, std::int64_t row_block, std::int64_t budget,
                   tileloss_plan* plan);

// How a plan cuts the work: what follows of it is not in the plan, so that one in an earlier header's struct says the same.
LinearShape linear_shape(const Problem& problem, const tileloss_plan& plan);
double predict_linear_ms(const Problem& problem, const tileloss_plan& plan);

}  // namespace tileloss::impl::cpu
