// A test case for functions on two matrices of logits: a LogitsCase for the student, another that lends its logits as the
// teacher's; and its judgement by the oracle and the error metric.
#pragma once

#include <string>

#include "oracle/distillation.h"
#include "tests/shared/logits_case.h"

namespace tileloss::test {

struct PairCaseSpec {
  LogitsCaseSpec student;  // extra_outputs: those of the pair too
  std::string teacher_distribution = "normal";
  bool teacher_is_student = false;  // the same logits
  std::int64_t teacher_stride_extra = 0;
};

class PairCase {
 public:
  explicit PairCase(const PairCaseSpec& spec);

  LogitsCase& student() { return student_; }
  const LogitsCase& student() const { return student_; }
  const LogitsCase& teacher() const { return teacher_; }
  tileloss_args& args() { return student_.args(); }
  const tileloss_args& args() const { return student_.args(); }
  // Not after seal().
  void set_logits(std::int64_t row, std::int64_t column, double student, double teacher);
  void seal();

  struct Open {};
  PairCase(const PairCaseSpec& spec, Open);

 private:
  void make_outputs(const PairCaseSpec& spec);

  LogitsCase student_, teacher_;
};

CheckResult check_distillation(const PairCase& c, const tileloss_distillation_options& options);

}  // namespace tileloss::test
