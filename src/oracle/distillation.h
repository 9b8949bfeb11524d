// The distillation losses in double, from their definitions: a student's and a teacher's logits (or a sparse teacher's list)
// give a divergence D of p = softmax(z) and q = softmax(zt), and the gradient by the student's logits.
//
//   loss_i = w_i (a CE_i + b D_i), a = label_weight, b = divergence_weight
//   mean: the sum over rows in use, over the sum of their w_i or num_items; a denominator of 0 gives 0
//
// z = softcap(logit_scale x) / T, and zt by the teacher's own transform. CE_i = -log p_y is of the same z, or where a label
// temperature is given of softcap(logit_scale x) divided by that, and never multiplied by T^2. D_i is multiplied by the student's
// T^2 with scale_by_temperature_squared. a = 0: no cross-entropy, also where it is infinite; b = 0: no D.
//
// A sparse teacher gives the ids of k columns and their log q, taken as they are: no transform, no temperature.
//   Tail::kIgnore       the sums over the listed columns alone, p of the whole softmax; D may be negative
//   Tail::kLump         one more class, of all other columns if there are any: q = max(0, 1 - sum q), p the sum of theirs
//   Tail::kRenormalise  both divided by their sums over the listed columns (TRL's top-k losses), so that D is of the
//                       distributions given that the token is listed; no gradient elsewhere. The cross-entropy is of the whole p
//
// Cost: some 35 ms a row of 152 thousand columns, value and gradient, 90 with JSD; 80 more with a softcap (tanh in long double).
//
// Special values, of z and zt. Here p_j = 0 is z_j = -inf, and q_j = 0 is zt_j = -inf. Where only an exp is 0 in double, the
// logarithms are finite, and so is D; terms with that p_j or q_j as a factor are 0.
//   outside the row's set                 as z_j = zt_j = -inf, whatever either logit is; a sparse teacher's column there is as
//                                         one that is not listed, of none of the classes. An empty set: a row of -inf
//   row not in use                        all outputs and the gradient 0; logits may be anything and are not read
//   any NaN, any +inf, or all -inf        loss, D and the row's gradient NaN, whatever the weights are; that side's entropy NaN,
//   its lse
//                                         NaN, inf, -inf; the other side's outputs as ever; logp NaN if it is the student's side
//   q_j = 0 = p_j                         no part in any sum, gradient 0
//   one of the two is 0                   as divergence.cpp says of each divergence
//   p_y = 0 at the label, a > 0           loss +inf, logp -inf; gradient as the formula p - [j = y]
//   a sparse teacher without columns      D = 0 with Tail::kIgnore and kRenormalise; with kLump the tail is all there is
//   columns without any p, or any q       with Tail::kRenormalise as a row of NaN
//   lumped tail without p, with q         as p_j = 0 < q_j; gradient 0 in its columns
//   weight 0, or a denominator of 0       as the product, where D or CE is infinite: NaN; the scalar of a denominator of 0 is 0
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "oracle/divergence.h"
#include "oracle/oracle.h"

namespace tileloss::oracle {

// generated: enums tail
enum class Tail { kLump, kIgnore, kRenormalise };
// end of generated

struct DistillationOptions {
  static constexpr double kNotGiven = std::numeric_limits<double>::quiet_NaN();

  Divergence divergence = Divergence::kForwardKl;
  double beta = 0.5;
  Transform student;
  Transform teacher = {kNotGiven, kNotGiven, kNotGiven, TemperatureOn::kLogits};  // not given: the student's
  bool scale_by_temperature_squared = false;
  double label_weight = 0.0, divergence_weight = 1.0;
  double label_temperature = kNotGiven;  // not given: the student's
  Reduction reduction = Reduction::kMean;
  double num_items = kNotGiven;
  std::int64_t ignore_index = -100;
  std::int64_t valid_vocab = -1;  // columns past it are padding, of both sides: not read, gradient 0. -1: there are none
};

// The teacher's, the student's where it is not given.
Transform teacher_transform(const DistillationOptions& options);

// Throws std::invalid_argument on values outside their range.
void check_options(const DistillationOptions& options);

// A default-constructed DistillationOutputs is what a row that is not in use gives.
struct DistillationOutputs {
  double divergence = 0.0;  // D_i, T^2 included; without any weight
  double student_entropy = 0.0;
  double teacher_entropy = 0.0;  // of q as the divergence sees it: of a sparse teacher's classes
  double logp = 0.0;             // at the label, at the label's temperature; NaN if there is none
  double student_lse = 0.0;
  double teacher_lse = 0.0;  // NaN with a sparse teacher
  bool agreement = false;    // the same argmax, of a sparse teacher among its listed columns; the lowest index on ties. No if
                             // either side holds a NaN
};

// What one row gives before weights and reduction. The buffers are kept from row to row.
class DistillationRow {
 public:
  static constexpr std::int64_t kNoLabel = -1;

  // `student`, `teacher`: logits [V]; they may differ in length where valid_vocab is given. Throws std::invalid_argument on sizes
  // and labels that do not go together with the options.
  void compute(const DistillationOptions& options, std::span<const double> student, std::span<const double> teacher,
               std::int64_t label = kNoLabel, Allowed allowed = {});
  // `ids`: distinct valid columns, in any order; log_q as many.
  void compute_sparse(const DistillationOptions& options, std::span<const double> student, std::span<const std::int64_t> ids,
                      std::span<const double> log_q, Tail tail, std::int64_t label = kNoLabel, Allowed allowed = {});

  const DistillationOutputs& outputs() const { return outputs_; }
  bool is_undefined() const { return is_undefined_; }
  std::int64_t columns() const { return columns_; }  // V of the student, padding included
  bool has_label() const { return label_ != kNoLabel; }
  const SoftmaxRow& student() const { return student_; }
  const SoftmaxRow& at_label_temperature() const { return at_label_temperature_; }  // the student's row there
  // dz/dx there over the student's own.
  double label_ratio() const { return student_.transform().temperature / at_label_temperature_.transform().temperature; }

  // Adds `factor` dD/dz to dz [valid columns], and to `magnitude` the sum of the absolute values of the terms it is made of.
  void add_divergence_gradient(double factor, std::span<double> dz, std::span<double> magnitude) const;
  // The same of -log p_y, by the z of the divergence.
  void add_cross_entropy_gradient(double factor, std::span<double> dz, std::span<double> magnitude) const;

 private:
  void start(const DistillationOptions& options, std::span<const double> student, std::int64_t label, Allowed allowed);
  void finish(const DistillationOptions& options, double teacher_entropy, double teacher_lse, std::int64_t teacher_argmax);

  SoftmaxRow student_, teacher_, at_label_temperature_;
  Classes classes_;
  DivergenceSlopes slopes_;
  std::vector<std::int64_t> ids_;  // of the classes, but for the lumped one
  bool sparse_ = false;
  Tail tail_ = Tail::kIgnore;
  double divergence_factor_ = 1.0;  // T^2
  bool is_undefined_ = false;
  std::int64_t label_ = kNoLabel;
  std::int64_t columns_ = 0;
  DistillationOutputs outputs_;
};

// A row's gradient, weights, reduction and upstream gradient included; 0 in padding.
struct DistillationGradient {
  std::vector<double> dz;         // [V] by z
  std::vector<double> dlogits;    // [V] by the student's logits as stored
  std::vector<double> magnitude;  // [V] of dlogits: the sum of the absolute values of the terms that make up each component
};

class Distillation : public RowWeights {
 public:
  // rows: N. Throws std::invalid_argument on sizes or options that do not go together.
  Distillation(const DistillationOptions& options, std::int64_t rows, std::span<const std::int64_t> labels,
               std::span<const double> token_weights, std::span<const double> loss_grad);

  const DistillationOptions& options() const { return options_; }

  // w (a CE + b D). `values` is not looked at when the row is ignored.
  double row_loss(std::int64_t row, const DistillationRow& values) const;
  void row_gradient(std::int64_t row, const DistillationRow& values, DistillationGradient& out) const;

  // The scalar loss of kSum and kMean.
  double reduce(std::span<const double> losses) const;

  double factor() const { return factor_; }  // what the reduction multiplies the rows' losses by

 private:
  DistillationOptions options_;
  double factor_ = 1.0;
};

}  // namespace tileloss::oracle
