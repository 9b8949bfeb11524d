// What soft_cross_entropy needs besides logits, as a gradcheck config says: class probabilities, drawn.
#ifndef TILELOSS_CHECK_GRADCHECK_PROBS_H_
#define TILELOSS_CHECK_GRADCHECK_PROBS_H_

#include <string>
#include <vector>

#include "check/gradcheck_config.h"
#include "check/gradcheck_run.h"
#include "check/soft_labels_oracle_case.h"
#include "support/thread_team.h"

namespace tileloss::tools {

SoftLabelsOptions make_soft_labels_options(const GradcheckConfig& config, const CheckInputs& inputs);

// Rows that random probabilities never make, dealt out as a teacher's (check/gradcheck_teacher.h).
std::vector<std::string> special_probs_names();

// inputs.probs, once the logits stand; special rows change those too.
void draw_probs(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs);

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_GRADCHECK_PROBS_H_
