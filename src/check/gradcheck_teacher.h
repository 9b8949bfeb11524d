// What distillation needs besides logits and labels, as a gradcheck config says: the teacher's logits, drawn or from a file.
#ifndef TILELOSS_CHECK_GRADCHECK_TEACHER_H_
#define TILELOSS_CHECK_GRADCHECK_TEACHER_H_

#include <string>
#include <vector>

#include "check/gradcheck_config.h"
#include "check/gradcheck_run.h"
#include "reference/distillation.h"
#include "support/safetensors.h"
#include "support/thread_team.h"

namespace tileloss::tools {

// Pairs of rows that random logits never make. Row i is an ordinary one where i is a multiple of n + 1, n of them asked for; else
// it is the next of them.
std::vector<std::string> special_row_names();

// inputs.teacher, which has its memory, once the student's logits stand; special rows change those too.
void draw_teacher(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs);
// inputs.teacher from its file, or near the logits that were read.
void load_teacher(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs);
// The mask that the file has beside `logits`, or one that is drawn.
void load_mask(const GradcheckConfig& config, const SafetensorsFile& file, const StoredTensor& logits, CheckInputs& inputs);

// The rows of a file's tensor as logits lie.
HugeBuffer read_logits(const SafetensorsFile& file, const StoredTensor& tensor, const CheckInputs& inputs);

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_GRADCHECK_TEACHER_H_
