// A pair of rows (check/pair_row.h) whose logits come from two LM heads: what float32 sums over H may get wrong in either side's
// logits comes to the budgets.
#ifndef TILELOSS_CHECK_LINEAR_PAIR_H_
#define TILELOSS_CHECK_LINEAR_PAIR_H_

#include "check/linear_metric.h"
#include "check/pair_row.h"

namespace tileloss::tools {

class LinearPairErrors {
 public:
  // `pair` of the rows' logits, which must outlive it. `student`, `teacher`: the same row of each side.
  LinearPairErrors(const reference::DistillationOptions& options, const PairRow& pair, const LinearRow& student,
                   const LinearRow& teacher);

  // For OutputMetric::add: of the divergence and the teacher's entropy; and of the loss, given what it is of stored logits.
  double output_magnitude() const { return pair_.output_magnitude() + more_; }
  double loss_magnitude(double of_stored) const { return of_stored * (1 + more_ / pair_.output_magnitude()); }
  double logp_magnitude() const { return of_logp_; }
  // Whether those errors may have made another column the largest of either side.
  bool is_agreement_open() const;
  // What an error that all columns share does to a gradient whose scale is set.
  void set_blur(reference::GradientRow& gradient) const;

 private:
  const reference::DistillationOptions& options_;
  const PairRow& pair_;
  double of_student_, of_teacher_;  // of z
  double more_, of_logp_;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_LINEAR_PAIR_H_
