// gradcheck's level linear: hidden states and LM head in place of logits, judged by linear_metric.h.
#ifndef TILELOSS_CHECK_GRADCHECK_LINEAR_H_
#define TILELOSS_CHECK_GRADCHECK_LINEAR_H_

#include <functional>
#include <vector>

#include "check/gradcheck_judge.h"
#include "check/gradcheck_oracle.h"
#include "check/gradcheck_run.h"
#include "support/safetensors.h"

namespace tileloss::tools {

// inputs.linear, first as far as the planner needs it.
void set_linear_shape(const GradcheckConfig& config, CheckInputs& inputs);
int64_t head_rows(const GradcheckConfig& config, const SafetensorsFile& file);
void load_linear(const GradcheckConfig& config, const SafetensorsFile& file, CheckInputs& inputs);
void generate_linear(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs);
// NaN where nothing may be read, and the oracle's operands.
void finish_linear(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs);

void add_linear(const LinearTensors& tensors, tileloss_args& args);
// One with its formats alone, then its tensors.
CheckedGradient new_linear_gradient(const GradcheckConfig& config, const CheckInputs& inputs);
void make_linear_gradients(const GradcheckConfig& config, const CheckInputs& inputs, CheckedGradient& gradient);
void add_linear_gradients(const GradcheckConfig& config, const CheckInputs& inputs, const CheckedGradient& gradient,
                          tileloss_args& args);
// The gradient's tensors as matrices; data is null where there is none.
reference::StoredMatrix dhidden_view(const CheckInputs& inputs, const CheckedGradient& gradient);
reference::StoredMatrix dhead_view(const CheckInputs& inputs, const CheckedGradient& gradient);

// The row's outputs, where float32 cannot tell the largest logits apart with the kernel's `argmax` (null: not asked for); the
// magnitude of its loss.
reference::RowOutputs linear_outputs(const reference::SoftmaxRow& softmax, const LinearRow& row, std::optional<double> argmax);
double linear_row_magnitude(const LossOracle& oracle, const reference::SoftmaxRow& softmax, const reference::RowLoss& loss,
                            const LinearRow& row);

void for_each_used_linear_row(const CheckInputs& inputs, const std::function<void(const LinearRow&)>& work);

// The oracle's pass over all rows, once for all that is judged.
class LinearJudge {
 public:
  // The three must outlive it.
  LinearJudge(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results);

  Verdict judge();
  std::vector<MutantVerdict> judge_mutants() const;

 private:
  std::vector<Gate> judge_gradient(const CheckedGradient& gradient) const;
  void check_rows(Verdict& verdict);

  const GradcheckConfig& config_;
  const CheckInputs& inputs_;
  const KernelResults& results_;
  LinearOracleCase oracle_case_;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_GRADCHECK_LINEAR_H_
