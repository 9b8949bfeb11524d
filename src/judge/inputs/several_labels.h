// Several labels a row, as a gradcheck config says: drawn, or those of a file.
#ifndef TILELOSS_JUDGE_INPUTS_SEVERAL_LABELS_H_
#define TILELOSS_JUDGE_INPUTS_SEVERAL_LABELS_H_

#include "judge/inputs/checked_function.h"

namespace tileloss::tools {

extern const OwnInputs kSeveralLabels;  // of logprobs

}  // namespace tileloss::tools

#endif  // TILELOSS_JUDGE_INPUTS_SEVERAL_LABELS_H_
