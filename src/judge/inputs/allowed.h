// The columns that each row's softmax runs over, as a gradcheck config says: drawn, or from a file.
//
//   allowed       all      every bit is set
//                 sparse   a fiftieth of the columns, here and there, as top-k and top-p leave them
//                 half     each column or not, at random
//                 runs     runs of columns, many words empty or full, as a grammar leaves them
//                 shared   as half, one set for all rows: its row stride is 0
//   allowed_rows  rows that these draws never make, dealt out in turn: row i is an ordinary one where i is a multiple of n + 1,
//                 n of them asked for; else it is the next of them
//
// A drawn set holds the row's label. Bits of padding are random, and so are the words of rows that are not in use. Every fourth
// row of drawn logits, a teacher's too, holds NaN and infinity outside its set; drawn class probabilities are 0 there, but in
// rows with the label outside.
#pragma once

#include "judge/inputs/checked_function.h"

namespace tileloss::tools {

// Keys of the config, the file's tensor already read.
void read_allowed(ConfigReader& reader, GradcheckConfig& config);
// The words' number; of a file the words. `rows` null: all is drawn.
void lay_out_allowed(const GradcheckConfig& config, const InputRows* rows, CheckInputs& inputs);
// Once the labels stand.
void draw_allowed(const GradcheckConfig& config, CheckInputs& inputs);
// Once the target stands: what is to stand outside the sets of drawn logits.
void clear_outside(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs);

}  // namespace tileloss::tools
