// A function of the library as a check knows it: how its inputs are drawn or read, its oracle, and the wrong kernels of its own
// that are planted. What is compared, with which budget, is the oracle's row (judge/oracles/oracle.h).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "judge/inputs/config.h"
#include "judge/inputs/inputs.h"
#include "judge/oracles/wrong_kernel.h"
#include "support/config.h"
#include "support/tensor_file.h"
#include "support/thread_team.h"

namespace tileloss::tools {

// A safetensors file of the config's source, and the tensor in it whose rows are the case's.
struct InputRows {
  const TensorFile& file;
  const StoredTensor& matrix;
};

// What a function takes besides logits or hidden and head, labels and weights. Null: nothing is to be done.
struct OwnInputs {
  // Keys of the config's section source, and others.
  void (*read_source)(ConfigReader& source, GradcheckConfig& config) = nullptr;
  void (*read_keys)(ConfigReader& reader, GradcheckConfig& config) = nullptr;
  // What the planner needs: sizes and types. `rows` null: all is drawn.
  void (*lay_out)(const GradcheckConfig& config, const InputRows* rows, CheckInputs& inputs) = nullptr;
  // Once logits and labels stand; special rows change the logits too.
  void (*draw)(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) = nullptr;
  // Once nothing else changes.
  void (*finish)(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) = nullptr;
};

struct CheckedFunction {
  std::string_view loss;  // the library's name, from logits and with the LM head
  const OwnInputs* inputs;
  MakeOracle make_oracle;
  std::span<const WrongKernel> (*wrong_kernels)() = nullptr;  // null: none
};

// Those of functions.cpp, by the names that `loss` has in a config.
std::vector<std::string> checked_losses();
// Throws ToolError (usage) for another.
const CheckedFunction& checked_function(std::string_view loss);

// The oracle of the config's function over these inputs.
std::unique_ptr<Oracle> make_oracle(const GradcheckConfig& config, const CheckInputs& inputs);
std::vector<WrongOracle> wrong_oracles(const GradcheckConfig& config, const CheckInputs& inputs);

}  // namespace tileloss::tools
