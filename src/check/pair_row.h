// A student's row beside its teacher's: the oracle's values, and what float32 may get wrong in them.
//
// The budgets are the metric's (check/error_metric.h), in terms of both rows:
//   gradient   |z - m| of both sides count for a column; where terms p g and p mean(g) all but cancel, as in the surest column,
//   each
//              of them is a term (a sure label's column is made without that), with every logarithm of a ratio counted as two.
//   outputs    the magnitude of the divergence, the teacher's entropy and the loss: sum (p + q)(|log p| + |log q|), and with a
//              transform what z is rounded by; where the label has a temperature of its own, its logarithm's magnitude too.
#ifndef TILELOSS_CHECK_PAIR_ROW_H_
#define TILELOSS_CHECK_PAIR_ROW_H_

#include <cstdint>
#include <span>
#include <vector>

#include "check/error_metric.h"
#include "check/row_outputs.h"
#include "reference/distillation.h"
#include "reference/oracle.h"

namespace tileloss::tools {

// Under a transform z is rounded itself: its size, as far as that counts.
double size_of_z(const reference::SoftmaxRow& row);
// Of the student's rows at its own temperature and at the label's, the one whose z lie further apart.
const reference::SoftmaxRow& wider_row(const reference::DistillationRow& values);
// 0 where the label has no temperature of its own; else what float32 may get wrong in its logarithm, with what its z may be wrong
// by (check/row_outputs.h).
double label_magnitude(const reference::DistillationRow& values, double error_of_z = 0);
// Whether a saturated softcap, or rounding, may have made another column the largest.
bool is_argmax_open(const reference::SoftmaxRow& row);

// The buffers are kept from row to row.
class PairRow {
 public:
  // `student`, `teacher`: the logits of the valid columns. Throws std::invalid_argument as reference::DistillationRow does.
  void compute(const reference::DistillationOptions& options, std::span<const double> student, std::span<const double> teacher,
               std::int64_t label);

  const reference::DistillationRow& values() const { return values_; }
  const reference::SoftmaxRow& student() const { return values_.student(); }
  const reference::SoftmaxRow& teacher() const { return teacher_; }
  std::span<const double> student_logits() const { return student_logits_; }
  std::span<const double> teacher_logits() const { return teacher_logits_; }

  ExpectedRow expected() const;
  OutputMagnitudes magnitudes() const;
  double output_magnitude() const { return output_magnitude_; }
  // Whether a saturated softcap, or rounding, may have made another column the largest of either side.
  bool is_agreement_open() const;

  // Raises the magnitude of each component of a gradient whose divergence is multiplied by `factor`.
  void add_mean_magnitude(double factor, std::span<double> magnitude) const;
  // `gradient`: of this row, its magnitude raised.
  RowReference reference(const reference::GradientRow& gradient) const;

 private:
  void set_budget();

  reference::DistillationRow values_;
  reference::SoftmaxRow teacher_;
  std::vector<double> student_logits_, teacher_logits_;
  reference::Divergence divergence_ = reference::Divergence::kForwardKl;
  double square_ = 1;           // what the oracle's divergence is multiplied by
  double max_ = 0;              // of both rows, as far as rounding z counts
  std::vector<double> z_;       // as far below it as float32's errors in log p and in log q allow for
  double others_distance_ = 0;  // the same of the others together
  std::vector<double> logs_;    // |log p| + |log q| of each column, as far as the column counts
  double output_magnitude_ = 0;
  double mean_magnitude_ = 0;  // of the mean in the gradient
};

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_PAIR_ROW_H_
