#include "oracle/soft_labels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace tileloss::oracle {

void soft_labels_row(const Transform& transform, std::span<const double> logits, std::span<const double> q,
                     double label_smoothing, SoftLabelsRow& out, Allowed allowed) {
  if (logits.size() != q.size())
    throw std::invalid_argument("q: expected " + std::to_string(logits.size()) + " columns, given " + std::to_string(q.size()));
  if (!(label_smoothing >= 0.0 && label_smoothing <= 1.0))
    throw std::invalid_argument("label_smoothing: expected 0 to 1, given " + std::to_string(label_smoothing));
  if (transform.temperature_on != TemperatureOn::kLogits)
    throw std::invalid_argument("temperature_on: expected logits, given logprob");
  SoftmaxRow softmax;
  softmax.compute(transform, logits, 0, allowed);
  const std::size_t columns = logits.size();
  const bool readable = std::all_of(q.begin(), q.end(), [](double value) { return std::isfinite(value); });
  if (!std::isfinite(softmax.max()) || !readable) {
    out.loss = std::numeric_limits<double>::quiet_NaN();
    for (std::vector<double>* part : {&out.dz, &out.dlogits, &out.magnitude}) {
      part->assign(columns, out.loss);
      softmax.clear_outside(*part);
    }
    return;
  }
  for (std::vector<double>* part : {&out.dz, &out.dlogits, &out.magnitude}) part->assign(columns, 0.0);
  long double loss = 0.0L, total = 0.0L;
  const auto blended = [&](std::size_t j) {
    const double share = label_smoothing / static_cast<double>(softmax.classes());
    return (1.0 - label_smoothing) * q[j] + (softmax.is_allowed(static_cast<std::int64_t>(j)) ? share : 0.0);
  };
  for (std::size_t j = 0; j < columns; ++j) {
    const double weight = blended(j);
    total += weight;
    const double minus_log_p = (softmax.max() - softmax.logits_z()[j]) + softmax.log_sum();
    if (weight != 0.0) loss += static_cast<long double>(weight) * minus_log_p;
  }
  out.loss = static_cast<double>(loss);
  for (std::size_t j = 0; j < columns; ++j) {
    const auto column = static_cast<std::int64_t>(j);
    const double spread = static_cast<double>(total) * softmax.p(column);
    out.dz[j] = spread - blended(j);
    out.dlogits[j] = out.dz[j] * softmax.dz_dx(column);
    out.magnitude[j] = (std::fabs(spread) + std::fabs(blended(j))) * std::fabs(softmax.dz_dx(column));
  }
  for (std::vector<double>* part : {&out.dz, &out.dlogits, &out.magnitude}) softmax.clear_outside(*part);
}

}  // namespace tileloss::oracle
