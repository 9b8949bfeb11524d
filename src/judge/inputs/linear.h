// gradcheck's level linear: hidden states and LM heads in place of logits, drawn or from a file.
#pragma once

#include "judge/inputs/config.h"
#include "judge/inputs/inputs.h"
#include "support/tensor_file.h"

namespace tileloss::tools {

// With rows of `hidden`, first as far as the planner needs it.
LinearTensors make_linear(const GradcheckConfig& config, int64_t hidden, const CheckInputs& inputs);
int64_t head_rows(const GradcheckConfig& config, const TensorFile& file);
// Of inputs.linear, as make_linear().
void add_low_rank(const GradcheckConfig& config, int64_t rank, CheckInputs& inputs);
// inputs.linear.
void load_linear(const GradcheckConfig& config, const TensorFile& file, CheckInputs& inputs);
// hidden ~ normal, head ~ std / sqrt(H) normal: logits of that std, to which a low-rank part gives half their variance.
void draw_linear(double std, uint64_t seed, ThreadTeam& team, LinearTensors& tensors);
// NaN where nothing may be read, and the oracle's operands.
void finish_linear(const GradcheckConfig& config, ThreadTeam& team, const CheckInputs& inputs, LinearTensors& tensors);

int64_t matrix_bytes(const oracle::StoredMatrix& matrix);
// A row that lies side by side, put where the view has it.
void put_row(const oracle::StoredMatrix& view, HugeBuffer& buffer, int64_t row, const char* from);

}  // namespace tileloss::tools
