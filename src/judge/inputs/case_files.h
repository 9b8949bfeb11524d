// A case's tensors in safetensors files: its inputs, for something else than the library to compute on, and the outputs that it
// gives back, to be judged in place of a kernel's. The tensors have the names and dtypes of tileloss_args; values of rows come as
// [N] or [B,T].
#pragma once

#include <vector>

#include "judge/inputs/call.h"
#include "judge/inputs/config.h"
#include "support/json.h"
#include "support/tensor_file.h"

namespace tileloss::tools {

// Takes from the config what concerns the library's own kernels alone: the section kernel, head_layout, mutants, strict. Throws
// ToolError (usage) for accumulate: outputs are judged as they are.
void forget_kernels(GradcheckConfig& config);

// The inputs of a config that has forgotten the kernels, by their names in tileloss_args; they point into `inputs`. Values of
// rows are [N], the head is [V,H]. What may not be read holds NaN; what is not given is not there.
std::vector<StoredTensor> input_tensors(const GradcheckConfig& config, const CheckInputs& inputs);
// What else a caller has to know: the call that `config`, as it was read, describes in words of tileloss.h, and what it asks of
// whoever makes it.
Json described_case(const GradcheckConfig& config, const CheckInputs& inputs);

// The outputs that the file has; at least one. A gradient may be of any float type, and is judged as stored in that. Throws
// ToolError (usage) naming the tensor, what was expected and what is there.
KernelResults read_outputs(const TensorFile& file, const GradcheckConfig& config, const CheckInputs& inputs);

}  // namespace tileloss::tools
