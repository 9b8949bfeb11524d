// gradcheck's level linear: hidden states and LM head in place of logits, judged by linear_metric.h.
#ifndef TILELOSS_CHECK_GRADCHECK_LINEAR_H_
#define TILELOSS_CHECK_GRADCHECK_LINEAR_H_

#include <functional>
#include <vector>

#include "check/gradcheck_judge.h"
#include "check/gradcheck_oracle.h"
#include "check/gradcheck_rows.h"
#include "check/gradcheck_run.h"
#include "support/safetensors.h"

namespace tileloss::tools {

// inputs.linear, and of distillation inputs.teacher_linear, first as far as the planner needs it.
void set_linear_shape(const GradcheckConfig& config, CheckInputs& inputs);
int64_t head_rows(const GradcheckConfig& config, const SafetensorsFile& file);
void load_linear(const GradcheckConfig& config, const SafetensorsFile& file, CheckInputs& inputs);
void generate_linear(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs);
// NaN where nothing may be read, and the oracle's operands.
void finish_linear(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs);

void add_linear(const CheckInputs& inputs, tileloss_args& args);
// One with its formats alone, then its tensors.
CheckedGradient new_linear_gradient(const GradcheckConfig& config, const CheckInputs& inputs);
void make_linear_gradients(const GradcheckConfig& config, const CheckInputs& inputs, CheckedGradient& gradient);
void add_linear_gradients(const GradcheckConfig& config, const CheckInputs& inputs, const CheckedGradient& gradient,
                          tileloss_args& args);
// The gradient's tensors as matrices; data is null where there is none.
reference::StoredMatrix dhidden_view(const CheckInputs& inputs, const CheckedGradient& gradient);
reference::StoredMatrix dhead_view(const CheckInputs& inputs, const CheckedGradient& gradient);

// `teacher`: the same row of distillation's teacher, without `errors`; null for other losses.
using LinearRowWork = std::function<void(const LinearRow& row, const LinearRow* teacher)>;
void for_each_linear_row(const CheckInputs& inputs, std::span<const int64_t> rows, const LinearRowWork& work);
void for_each_used_linear_row(const CheckInputs& inputs, const LinearRowWork& work);

// What a row is held against, besides the scratch's softmax and gradient.
struct ExpectedLinearRow {
  reference::RowLoss loss;
  double loss_magnitude = 0;
  ExpectedRow outputs;
  OutputMagnitudes magnitudes;
};
// `outputs`: the kernel's, which decide where float32 cannot tell the largest logits apart.
ExpectedLinearRow compute_linear_row(const LossOracle& oracle, const CheckInputs& inputs, const LinearRow& row,
                                     const LinearRow* teacher, const RowOutputValues& outputs, Scratch& scratch);

// The oracle's pass over all rows, once for all that is judged.
class LinearJudge {
 public:
  // The three must outlive it.
  LinearJudge(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results);

  Verdict judge();
  std::vector<MutantVerdict> judge_mutants() const;

 private:
  // Kernels of distillation that get their dlogits wrong, in the first rows.
  void judge_wrong_pairs(std::vector<MutantVerdict>& verdicts) const;
  std::vector<Gate> judge_gradient(const CheckedGradient& gradient) const;
  void check_rows(Verdict& verdict);

  const GradcheckConfig& config_;
  const CheckInputs& inputs_;
  const KernelResults& results_;
  LinearOracleCase oracle_case_;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_GRADCHECK_LINEAR_H_
