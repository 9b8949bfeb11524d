// The focal loss, as a test of HACKING.md's recipe "add a loss": this header and one line of registration are all there is.
//   loss_i = -(1 - p_y)^gamma logp_i
//   dloss / dlogp = -(1 - p_y)^gamma + gamma (1 - p_y)^(gamma - 1) p_y logp
//   target = g dloss/dlogp, prob = -target                        (Lin et al. 2017, "Focal Loss for Dense Object Detection")
// mean divides by the number of rows that are not ignored.
#pragma once

#include "losses/loss.h"

namespace tileloss::test {

using impl::choice_field;
using impl::double_field;
using impl::kLossGrad;
using impl::kUnbounded;
using impl::LossContext;
using impl::LossInfo;
using impl::RowResult;
using impl::RowStats;

struct FocalOptions {
  std::size_t struct_size;
  tileloss_logit_options logit;
  tileloss_linear_options linear;
  double gamma;
  tileloss_reduction reduction;
  std::int32_t reserved;
};

class FocalLoss {
 public:
  explicit FocalLoss(const LossContext& context) : context_(context), options_(context.options_as<FocalOptions>()) {}

  template <class Steps>
  void prepare(Steps&& steps) const {
    if (options_.reduction == TILELOSS_REDUCTION_MEAN)
      steps.template sum<&FocalLoss::is_used, &FocalLoss::take_used>(context_.rows);
  }

  TILELOSS_HOST_DEVICE double is_used(std::int64_t i) { return context_.labels.is_used(i) ? 1 : 0; }
  TILELOSS_HOST_DEVICE void take_used(double rows) { scale_ = rows == 0 ? 0 : 1 / rows; }

  TILELOSS_HOST_DEVICE RowResult row(std::int64_t i, const RowStats& r) const {
    const double gamma = options_.gamma, focus = std::pow(r.one_minus_p, gamma);
    const double slope = gamma == 0 ? 0.0 : gamma * std::pow(r.one_minus_p, gamma - 1) * r.p * r.logp;
    RowResult result;
    result.loss = scale_ * -focus * r.logp;
    result.coefficients.target = context_.loss_grad[i] * scale_ * (slope - focus);
    return result;
  }

  static LossInfo info() {
    static constexpr tileloss_field kFields[] = {
        double_field("gamma", offsetof(FocalOptions, gamma), 2, 0, kUnbounded),
        choice_field("reduction", offsetof(FocalOptions, reduction), TILELOSS_REDUCTION_MEAN, 3, "none|sum|mean"),
    };
    return {
        .name = "focal",
        .is_loss = true,
        .options_size = sizeof(FocalOptions),
        .fields = kFields,
        .tensors = kLossGrad,
        .make = &impl::make_stage<FocalLoss>,
        .check = nullptr,
        .is_per_row = [](const void* o) { return static_cast<const FocalOptions*>(o)->reduction == TILELOSS_REDUCTION_NONE; }};
  }

 private:
  LossContext context_;
  FocalOptions options_;
  double scale_ = 1;
};

}  // namespace tileloss::test
