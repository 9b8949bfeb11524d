// Cross-entropy with label smoothing s, class weights c, token weights w and z-loss zeta:
//   loss_i = w_i [ (1-s) c_y (-logp_i) + (s/V) sum_j c_j (-log p_ij) ] + zeta w_i lse_i^2
//   target = -(1-s) c_y w,  prob = w [(1-s) c_y + s mean(c)] + 2 zeta w lse,  uniform = -(s/V) w  on u_j = c_j
// mean divides the cross-entropy part by the sum of w_i c_y (as PyTorch), the z-loss part by the sum of w_i (as Liger), both by
// num_items when given; a denominator of 0 gives 0. Source: losses.md, checked there against PyTorch's autograd.
#pragma once

#include "losses/loss.h"
#include "schema/option_fields.h"

namespace tileloss::impl {

class CrossEntropy {
 public:
  using Options = tileloss_cross_entropy_options;

  explicit CrossEntropy(const LossContext& context)
      : context_(context), options_(context.options_as<Options>()), class_weight_sum_(static_cast<double>(context.classes)) {}

  std::uint32_t forward_sums() const { return options_.label_smoothing > 0 ? kSmoothingSum : kNoSums; }

  bool is_multiple_of_p() const { return !(options_.label_smoothing > 0); }

  bool coefficients_need_stats() const { return options_.z_loss > 0; }

  template <class Steps>
  void prepare(Steps&& steps) const {
    if (context_.class_weights && context_.rows > 0)  // else they need not be there
      steps.template sum<&CrossEntropy::class_weight, &CrossEntropy::take_class_weights>(context_.classes);
    if (options_.reduction != TILELOSS_REDUCTION_MEAN) return;
    steps.template sum<&CrossEntropy::weight, &CrossEntropy::take_weights>(context_.rows);
    if (options_.z_loss > 0) steps.template sum<&CrossEntropy::token_weight, &CrossEntropy::take_token_weights>(context_.rows);
  }

  TILELOSS_HOST_DEVICE double class_weight(std::int64_t j) { return context_.class_weights[j]; }
  TILELOSS_HOST_DEVICE double weight(std::int64_t i) {
    return context_.labels.is_used(i) ? context_.token_weights[i] * context_.class_weight(i) : 0;
  }
  TILELOSS_HOST_DEVICE double token_weight(std::int64_t i) { return context_.weight(i); }
  TILELOSS_HOST_DEVICE void take_class_weights(double sum) { class_weight_sum_ = sum; }
  TILELOSS_HOST_DEVICE void take_weights(double sum) { ce_scale_ = mean_scale(options_.num_items, sum); }
  TILELOSS_HOST_DEVICE void take_token_weights(double sum) { z_scale_ = mean_scale(options_.num_items, sum); }

  TILELOSS_HOST_DEVICE RowResult row(std::int64_t i, const RowStats& r) const {
    const double s = options_.label_smoothing, zeta = options_.z_loss;
    const double classes = r.classes.count_of(static_cast<double>(context_.classes)),
                 class_weight_sum = r.classes.count < 0 ? class_weight_sum_ : r.classes.weight;
    const double share = s > 0 ? s / classes : 0;
    const double ce = context_.token_weights[i] * ce_scale_, z = context_.token_weights[i] * z_scale_;
    double c_y = context_.class_weight(i);
    if (context_.temperature_on_logprob) c_y /= scalar_value(context_.temperature);
    const double upstream = context_.loss_grad[i];
    RowResult result;
    if (ce_scale_ != 0) result.loss += ce * ((1 - s) * c_y * -r.logp);
    // One class alone has log p = 0, whatever rounding has left of z - max.
    if (s > 0 && classes != 1 && ce_scale_ != 0) result.loss += ce * share * (class_weight_sum * r.log_sum - r.smoothing_sum);
    if (zeta > 0 && z_scale_ != 0) result.loss += zeta * z * r.lse * r.lse;
    const double z_term = zeta > 0 ? 2 * zeta * z * r.lse : 0.0;
    RowCoefficients& g = result.coefficients;
    g.target = upstream * -(1 - s) * c_y * ce;
    g.prob_plus_target = upstream * ((s > 0 ? ce * s * class_weight_sum / classes : 0) + z_term);
    g.uniform = upstream * -share * ce;
    return result;
  }

  static LossInfo info() {
    return {.name = "cross_entropy",
            .is_loss = true,
            .options_size = sizeof(Options),
            .fields = kCrossEntropyFields,
            .tensors = kTokenWeights | kClassWeights | kLossGrad | kMask,
            .make = &make_stage<CrossEntropy>,
            .check = &check,
            .is_per_row = [](const void* o) { return static_cast<const Options*>(o)->reduction == TILELOSS_REDUCTION_NONE; }};
  }

 private:
  static std::string check(const LossContext& context) {
    const auto& o = context.options_as<Options>();
    if (o.label_smoothing > 0 && o.logit.temperature_on == TILELOSS_TEMPERATURE_ON_LOGPROB) {
      return "label_smoothing: expected 0 with temperature_on = logprob, got " + std::to_string(o.label_smoothing);
    }
    return {};
  }

  LossContext context_;
  Options options_;
  double class_weight_sum_;
  double ce_scale_ = 1, z_scale_ = 1;
};

}  // namespace tileloss::impl
