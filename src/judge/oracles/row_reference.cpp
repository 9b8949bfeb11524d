#include "judge/oracles/row_reference.h"

namespace tileloss::tools {

RowReference make_row_reference(const oracle::SoftmaxRow& softmax, const oracle::GradientRow& gradient) {
  return {.gradient = gradient.gradient,
          .magnitude = gradient.magnitude,
          .blur = gradient.blur,
          .z = softmax.logits_z(),
          .max = softmax.max(),
          .scale = gradient.scale,
          .transformed = !softmax.transform().is_identity(),
          .target = softmax.label(),
          .allowed = softmax.allowed(),
          .others_distance = others_distance(softmax)};
}

double others_distance(const oracle::SoftmaxRow& softmax) {
  const double others = softmax.one_minus_p_label();
  if (!(others > 0.0)) return 0.0;
  const double p = softmax.p(softmax.label());
  const double own = p > 0.0 ? p * (softmax.max() - softmax.logits_z()[static_cast<std::size_t>(softmax.label())]) : 0.0;
  return (softmax.entropy() - softmax.log_sum() - own) / others;
}

}  // namespace tileloss::tools
