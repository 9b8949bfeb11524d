// Cross-entropy with class probabilities q instead of labels, class weights c, token weights w, label smoothing s:
//   loss_i = w_i sum_j c_j q'_j (-log p_ij),  q' = (1-s) q + s/V
//   dL/dz_j = w_i (p_j sum_k c_k q'_k - c_j q'_j)
// mean divides by the sum of w_i (PyTorch: the number of rows), or by num_items; a denominator of 0 gives 0. The sum is a sweep's
// (core/divergence.h: ClassProbabilities). Source: losses.md; torch.nn.functional.cross_entropy.
#pragma once

#include "losses/loss.h"
#include "schema/option_fields.h"

namespace tileloss::impl {

class SoftCrossEntropy {
 public:
  using Options = tileloss_soft_cross_entropy_options;

  explicit SoftCrossEntropy(const LossContext& context) : context_(context), options_(context.options_as<Options>()) {}

  TargetOptions target_options() const { return {.label_smoothing = options_.label_smoothing}; }

  template <class Steps>
  void prepare(Steps&& steps) const {
    if (options_.reduction == TILELOSS_REDUCTION_MEAN)
      steps.template sum<&SoftCrossEntropy::weight, &SoftCrossEntropy::take_weights>(context_.rows);
  }

  TILELOSS_HOST_DEVICE double weight(std::int64_t i) { return context_.weight(i); }
  TILELOSS_HOST_DEVICE void take_weights(double sum) { scale_ = mean_scale(options_.num_items, sum); }

  TILELOSS_HOST_DEVICE RowResult row(std::int64_t i, const TargetStats& r) const {
    RowResult result;
    result.has_divergence = true;
    if (scale_ == 0) return result;
    result.form = context_.loss_grad[i] * context_.token_weights[i] * scale_;
    result.loss = context_.token_weights[i] * scale_ * r.sums.divergence;
    return result;
  }

  static LossInfo info() {
    return {.name = "soft_cross_entropy",
            .is_loss = true,
            .options_size = sizeof(Options),
            .fields = kSoftCrossEntropyFields,
            .tensors = kTokenWeights | kClassWeights | kLossGrad | kMask,
            .make = &make_stage<SoftCrossEntropy>,
            .check = &check_temperature_on,
            .is_per_row = [](const void* o) { return static_cast<const Options*>(o)->reduction == TILELOSS_REDUCTION_NONE; },
            .target = TargetKind::kProbabilities};
  }

 private:
  LossContext context_;
  Options options_;
  double scale_ = 1;
};

}  // namespace tileloss::impl
