// The functions fused with the LM head: their matrices, how their work is cut, and their run.
#ifndef TILELOSS_API_LINEAR_H_
#define TILELOSS_API_LINEAR_H_

#include "api/plan.h"
#include "backends/cpu/head/linear.h"

namespace tileloss::api {

// Shapes, dtypes and strides of hidden, head and their gradients, in a pass that has them.
Status resolve_linear(Problem& problem);

// Schedule, blocks and bytes of a plan whose instruction set and threads are chosen. `budget` 0: half of the logits' size in
// hidden's dtype but at least 192 MiB, or what the leanest schedule needs.
Status plan_linear(const Problem& problem, tileloss_schedule wish, std::int64_t row_block, std::int64_t budget,
                   tileloss_plan* plan);

// How a plan cuts the work: what follows of it is not in the plan, so that one in an earlier header's struct says the same.
cpu::LinearShape linear_shape(const Problem& problem, const tileloss_plan& plan);
double predict_linear_ms(const Problem& problem, const tileloss_plan& plan);

cpu::LinearJob linear_job(const Problem& problem, const tileloss_plan& plan, const LossContext& context,
                          const std::int64_t* targets, std::byte* workspace);

}  // namespace tileloss::api

#endif  // TILELOSS_API_LINEAR_H_
