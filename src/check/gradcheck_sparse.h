// What sparse_distillation needs besides logits, as a gradcheck config says: some columns of a teacher, drawn.
#ifndef TILELOSS_CHECK_GRADCHECK_SPARSE_H_
#define TILELOSS_CHECK_GRADCHECK_SPARSE_H_

#include <string>
#include <vector>

#include "check/gradcheck_config.h"
#include "check/gradcheck_run.h"
#include "check/sparse_oracle_case.h"
#include "support/thread_team.h"

namespace tileloss::tools {

SparseOptions make_sparse_options(const Function& function);

// Rows that a random teacher never makes, dealt out as a whole teacher's (check/gradcheck_teacher.h).
std::vector<std::string> special_columns_names();

// inputs.teacher_ids and teacher_logprobs, once the logits stand; special rows change those too. In rows that are not in use ids
// that are no columns, and NaN.
void draw_columns(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs);

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_GRADCHECK_SPARSE_H_
