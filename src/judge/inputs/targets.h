// What a row is compared with besides its label, as a gradcheck config says: more labels, a teacher's logits or LM head, some
// columns of a teacher, class probabilities.
#pragma once

#include "judge/inputs/checked_function.h"

namespace tileloss::tools {

extern const OwnInputs kSeveralLabels;      // of logprobs, drawn or from a file
extern const OwnInputs kTeacherInputs;      // of distillation, drawn or from a file
extern const OwnInputs kColumnInputs;       // of sparse_distillation, drawn
extern const OwnInputs kProbabilityInputs;  // of soft_cross_entropy, drawn

// -------------------------------------------------------------------------------------- what the last three have in common

// A row as it is drawn: logits, and a teacher's logits, log q of the columns `ids`, or probabilities.
struct TargetRow {
  std::vector<double> logits, target;
  std::vector<int64_t> ids;
  size_t label = 0;
};

// Probabilities of a row: weights e^(2 x), a share `zeros` of them 0, divided by their sum.
void draw_probabilities(Random& random, double zeros, std::vector<double>& probs);
// As many as `row` has ids: distinct columns in any order, the label often among them; normal scores of this std, and a share of
// the mass for the others. Where there are fewer columns an id is -1.
void draw_columns(Random& random, int64_t columns, double std, TargetRow& row);

// Rows that random draws never make. Row i is an ordinary one where i is a multiple of n + 1, n of them asked for; else it is the
// next of them.
struct SpecialRow {
  std::string_view name;
  void (*make)(TargetRow& row);
};

// Their names in the key source.special_rows, of stored logits alone.
void read_special_rows(ConfigReader& source, const GradcheckConfig& config, std::span<const SpecialRow> rows,
                       std::vector<std::string>& out);

// Every row in use: `draw` makes its target, which is then stored; special rows change the logits too. With the LM head `draw`
// has no logits, but for their number.
void draw_target_rows(std::span<const SpecialRow> rows, const std::vector<std::string>& names, ThreadTeam& team,
                      CheckInputs& inputs, const std::function<void(int64_t row, TargetRow& out)>& draw);

}  // namespace tileloss::tools
