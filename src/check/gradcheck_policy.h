// What a policy loss needs besides logits and labels, as a gradcheck config says: drawn or from the file.
#ifndef TILELOSS_CHECK_GRADCHECK_POLICY_H_
#define TILELOSS_CHECK_GRADCHECK_POLICY_H_

#include "check/gradcheck_config.h"
#include "check/gradcheck_run.h"
#include "reference/policy.h"
#include "support/safetensors.h"
#include "support/thread_team.h"

namespace tileloss::tools {

reference::PolicyOptions make_oracle_options(const Function& function, const CheckInputs& inputs);

// inputs.policy as far as the planner needs it: sequences, mask, advantages, and the sizes of the rest.
void draw_policy_layout(const GradcheckConfig& config, CheckInputs& inputs);
// The same, with what the file has beside `matrix`, its logits or hidden states.
void load_policy_layout(const GradcheckConfig& config, const SafetensorsFile& file, const StoredTensor& matrix,
                        CheckInputs& inputs);
// One a row, as 0 and 1.
std::vector<uint8_t> read_mask(const SafetensorsFile& file, const StoredTensor& tensor, int64_t count);
// The oracle's sweep over the rows in use, and old, ref and sampler logp drawn near what it found.
void draw_policy_logps(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs);

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_GRADCHECK_POLICY_H_
