// Distillation: the student's distribution p against the teacher's q, alone or mixed with cross-entropy, token weights w:
//   loss_i = w_i [ a (-logp_i) + b s D_i ],  a = label_weight, b = divergence_weight, s = 1 or T^2
//   form = b s w,  target = -a w   (core/row_coefficients.h)
// logp is at label_temperature, or at T where that is not given.
// D is a divergence (core/divergence.h) of the whole vocabulary, or of the columns that a sparse teacher knows. mean divides by
// the sum of w_i, or by num_items when given; a denominator of 0 gives 0. Source: losses.md, checked there against autograd and
// TRL's generalized_jsd_loss.
#pragma once

#include "losses/loss.h"
#include "schema/option_fields.h"

namespace tileloss::impl {

template <class OptionsOf>
class DistillationOf {
 public:
  using Options = OptionsOf;

  explicit DistillationOf(const LossContext& context) : context_(context), options_(context.options_as<Options>()) {}

  TargetOptions target_options() const {
    return {.divergence = {static_cast<DivergenceKind>(options_.divergence), options_.beta}};
  }

  template <class Steps>
  void prepare(Steps&& steps) const {
    if (options_.reduction == TILELOSS_REDUCTION_MEAN)
      steps.template sum<&DistillationOf::weight, &DistillationOf::take_weights>(context_.rows);
  }

  TILELOSS_HOST_DEVICE double weight(std::int64_t i) { return context_.weight(i); }
  TILELOSS_HOST_DEVICE void take_weights(double sum) { scale_ = mean_scale(options_.num_items, sum); }

  TILELOSS_HOST_DEVICE RowResult row(std::int64_t i, const TargetStats& r) const {
    RowResult result;
    const double label = scalar_value(options_.label_weight), divergence = scalar_value(options_.divergence_weight);
    result.has_divergence = divergence > 0;
    if (scale_ == 0) return result;
    const double w = context_.loss_grad[i] * context_.token_weights[i] * scale_;
    result.form = w * divergence * square();
    result.coefficients.target = w * -label;
    double loss = 0;
    if (divergence > 0 || std::isnan(r.sums.divergence)) loss += divergence * square() * r.sums.divergence;
    if (label > 0) loss += label * -r.label.logp;
    result.loss = context_.token_weights[i] * scale_ * loss;
    return result;
  }

 protected:
  static tileloss_scalar label_temperature(const void* o) { return static_cast<const Options*>(o)->label_temperature; }
  static bool is_per_row(const void* o) { return static_cast<const Options*>(o)->reduction == TILELOSS_REDUCTION_NONE; }

  static std::string check(const LossContext& context) {
    const auto& o = context.options_as<Options>();
    if (has_mixture(static_cast<DivergenceKind>(o.divergence)) && !(o.beta > 0 && o.beta < 1)) {
      return "beta: expected a number > 0 and < 1 with this divergence (at the ends it is a KL: forward_kl, reverse_kl), got " +
             std::to_string(o.beta);
    }
    if (std::string message = check_temperature_on(context); !message.empty()) return message;
    if (may_differ(o.label_weight, 0) && !context.labels.are_given())
      return "labels: expected a vector, as label_weight is not 0, got none";
    return {};
  }

  const Options& options() const { return options_; }

 private:
  static_assert(static_cast<int>(DivergenceKind::kTotalVariation) == TILELOSS_TOTAL_VARIATION &&
                static_cast<int>(DivergenceKind::kJsd) == TILELOSS_JSD);

  TILELOSS_HOST_DEVICE double square() const {
    const double t = options_.scale_by_temperature_squared != 0 ? scalar_value(context_.temperature) : 1.0;
    return t * t;
  }
  LossContext context_;
  Options options_;
  double scale_ = 1;
};

// From a teacher's logits.
class Distillation : public DistillationOf<tileloss_distillation_options> {
 public:
  using DistillationOf::DistillationOf;

  static LossInfo info() {
    return {.name = "distillation",
            .is_loss = true,
            .options_size = sizeof(Options),
            .fields = kDistillationFields,
            .tensors = kTokenWeights | kLossGrad | kMask,
            .make = &make_stage<Distillation>,
            .check = &check,
            .is_per_row = &is_per_row,
            .target = TargetKind::kLogits,
            .teacher_options = &teacher_options,
            .label_temperature = &label_temperature};
  }

 private:
  static TeacherOptions teacher_options(const void* options) {
    const auto& o = *static_cast<const Options*>(options);
    return {std::isnan(o.teacher_logit_scale) ? o.logit.logit_scale : o.teacher_logit_scale,
            std::isnan(o.teacher_softcap) ? o.logit.softcap : o.teacher_softcap,
            is_given(o.teacher_temperature) ? o.teacher_temperature : o.logit.temperature};
  }
};

// From the columns that a sparse teacher knows.
class SparseDistillation : public DistillationOf<tileloss_sparse_distillation_options> {
 public:
  using DistillationOf::DistillationOf;

  TargetOptions target_options() const {
    TargetOptions o = DistillationOf::target_options();
    o.tail = static_cast<Tail>(options().tail);
    return o;
  }

  static LossInfo info() {
    return {.name = "sparse_distillation",
            .is_loss = true,
            .options_size = sizeof(Options),
            .fields = kSparseDistillationFields,
            .tensors = kTokenWeights | kLossGrad | kMask,
            .make = &make_stage<SparseDistillation>,
            .check = &check,
            .is_per_row = &is_per_row,
            .target = TargetKind::kColumns,
            .label_temperature = &label_temperature};
  }

  static_assert(static_cast<int>(Tail::kRenormalise) == TILELOSS_TAIL_RENORMALISE);
};

}  // namespace tileloss::impl
