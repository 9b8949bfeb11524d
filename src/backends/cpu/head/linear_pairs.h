// A loss over a student's and a teacher's logits, each made by an LM head of its own. Knows no loss, as lm_head.h.
//
// Rows in use, some at a time: the logits of both sides, in float32 (2 products); the sweeps over pairs of rows, whose gradient
// goes over the student's logits and from there, as the products see it, to where it waits; and once it is there for a whole row
// chunk, lm_head.h's backward (2 products). 4 products where a linear cross-entropy has 3, and both heads go through the caches
// once for each of the parts.
//
// The gradient waits in dhead's own memory, until the rows of dhead are written, and what has no room there in the workspace.
#ifndef TILELOSS_BACKENDS_CPU_HEAD_LINEAR_PAIRS_H_
#define TILELOSS_BACKENDS_CPU_HEAD_LINEAR_PAIRS_H_

#include "backends/cpu/head/lm_head.h"
#include "backends/cpu/sweep/pair_driver.h"

namespace tileloss::impl::cpu {

struct LinearPairJob {
  LinearJob student;  // says all but the teacher's side. It has no saved states
  Operand teacher_hidden, teacher_head, teacher_bias;
  LogitTransform teacher_transform;
  Divergence divergence;
};

void run_linear_pairs(const LinearPairJob& job, PairVisitor& visitor, const tileloss_executor* executor);

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_HEAD_LINEAR_PAIRS_H_
