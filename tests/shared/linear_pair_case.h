// A test case for linear_distillation: a LinearCase for the student, another that lends its hidden states, head and bias as the
// teacher's; and its judgement by the oracle and the bound of judge/gates/linear_metric.h.
#pragma once

#include "tests/shared/linear_case.h"

namespace tileloss::test {

struct LinearPairSpec {
  LinearCaseSpec student;  // row.extra_outputs: those of the pair too
  std::int64_t teacher_hidden = 16;
  MatrixLayout teacher_layout = MatrixLayout::kRows;  // of its hidden states and its head
  double teacher_logit_std = 2;
  bool teacher_bias = false;
  bool teacher_is_student = false;  // the same tensors
};

class LinearPair {
 public:
  explicit LinearPair(const LinearPairSpec& spec);

  LinearCase& student() { return student_; }
  const LinearCase& student() const { return student_; }
  tileloss_args& args() { return student_.args(); }
  CheckResult check(const tileloss_distillation_options& options) const;

 private:
  const LinearCase& teacher() const { return is_student_ ? student_ : teacher_; }

  LinearCase student_, teacher_;
  const bool is_student_;
};

}  // namespace tileloss::test
