// A test case for functions on two matrices of logits: a LogitsCase for the student, another that lends its logits as the
// teacher's; and its judgement by the oracle and the error metric.
#ifndef TILELOSS_TESTS_SHARED_PAIR_CASE_H_
#define TILELOSS_TESTS_SHARED_PAIR_CASE_H_

#include <deque>
#include <string>
#include <vector>

#include "reference/distillation.h"
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
  std::deque<GuardBuffer> outputs_;
};

// What a row's results are held to, from either side's softmax.
struct PairBudget {
  double max = 0;               // of both rows, as far as rounding z counts
  std::vector<double> z;        // as far below it as float32's errors in log p and in log q allow for
  double others_distance = 0;   // the same of the others together
  std::vector<double> logs;     // |log p| + |log q| of each column, as far as the column counts
  double output_magnitude = 4;  // of the divergence and its like: the sizes of p log p, q log p, ...
  double mean_magnitude = 0;    // of the mean in the gradient

  PairBudget(const reference::SoftmaxRow& student, const reference::SoftmaxRow& teacher);
  // The magnitudes of a gradient whose p g and p mean all but cancel in the surest column; a sure label's is made without that.
  // `factor`: what multiplies the divergence.
  void widen(const reference::DistillationOptions& options, const reference::SoftmaxRow& student, double factor,
             std::vector<double>& magnitude) const;
};

reference::DistillationOptions make_oracle_options(const tileloss_distillation_options& options);
// T^2, or 1.
double divergence_factor(const reference::DistillationOptions& options);
// Whether a saturated softcap, or rounding, may have made another column the largest.
bool is_argmax_open(const reference::SoftmaxRow& row);

CheckResult check_distillation(const PairCase& c, const tileloss_distillation_options& options);

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_SHARED_PAIR_CASE_H_
