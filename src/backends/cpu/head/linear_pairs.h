// A loss over logits made by an LM head and what a teacher has to say of them: logits, made by a head of its own, class
// probabilities, or some columns. Knows no loss, as lm_head.h.
//
// Rows in use, some at a time: the logits of both sides, in float32 (2 products, or the student's alone); the sweeps over pairs
// of rows, whose gradient goes over the student's logits and from there, as the products see it, to where it waits; and once it
// is there for a whole row chunk, lm_head.h's backward (2 products). With two heads 4 products where a linear cross-entropy has
// 3, and both heads go through the caches once for each of the parts.
//
// The gradient waits in dhead's own memory, until the rows of dhead are written, and what has no room there in the workspace.
#ifndef TILELOSS_BACKENDS_CPU_HEAD_LINEAR_PAIRS_H_
#define TILELOSS_BACKENDS_CPU_HEAD_LINEAR_PAIRS_H_

#include "backends/cpu/head/lm_head.h"
#include "backends/cpu/sweep/pair_driver.h"

namespace tileloss::impl::cpu {

struct LinearPairJob {
  LinearJob student;                                   // says all but what the teacher has to say. It has no saved states
  PairJob pairs;                                       // what that is; its rows are set here
  Operand teacher_hidden, teacher_head, teacher_bias;  // of Teacher::kLogits
};

void run_linear_pairs(const LinearPairJob& job, PairVisitor& visitor, const tileloss_executor* executor);

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_HEAD_LINEAR_PAIRS_H_
