// What a policy loss takes, drawn or from the file; and the mask of every function that takes one.
#pragma once

#include <vector>

#include "judge/inputs/checked_function.h"

namespace tileloss::tools {

// One a row, as 0 and 1: what the file has, or drawn.
std::vector<uint8_t> make_mask(const GradcheckConfig& config, const InputRows* rows, int64_t count);

// Sequences, advantages, and old, ref and sampler logp near what the oracle finds in the rows.
extern const OwnInputs kPolicyInputs;

}  // namespace tileloss::tools
