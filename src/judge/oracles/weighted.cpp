#include "judge/oracles/weighted.h"

#include <algorithm>
#include <numbers>

namespace tileloss::tools {

using oracle::RowLoss;
using oracle::SoftmaxRow;

// No weight, no error: 0 is held to this, as nothing divided by nothing would not be a verdict.
constexpr double kTiny = 0x1p-100;

WeightedOracle::WeightedOracle(const oracle::DistillationOptions& options, OracleTensors tensors)
    : tensors_(std::move(tensors)),
      oracle_(options, std::ssize(tensors_.labels), tensors_.labels, tensors_.token_weights, tensors_.loss_grad) {}

double WeightedOracle::reduce(std::span<const RowLoss> losses) const {
  std::vector<double> totals;
  for (const RowLoss& loss : losses) totals.push_back(loss.total());
  return oracle_.reduce(totals);
}

double WeightedOracle::reduce_magnitudes(std::span<const RowLoss> magnitudes) const {
  double sum = 0;
  for (const RowLoss& magnitude : magnitudes) sum += magnitude.total();
  return std::fmax(sum * oracle_.factor(), kTiny);
}

double WeightedOracle::loss_magnitude(std::int64_t row, double magnitude) const {
  return std::fmax(magnitude * std::fabs(oracle_.token_weight(row)), kTiny);
}

double size_of_z(const SoftmaxRow& row) {
  const bool counts = !row.transform().is_identity() && std::isfinite(row.max());
  return counts ? std::fabs(row.max()) : 0;
}

bool is_argmax_open(const SoftmaxRow& row, double error_of_z) {
  double close = 2 * error_of_z;
  if (!row.transform().is_identity()) close = std::fmax(close, 1e-5 * (1 + std::fabs(row.max())));
  const std::span<const double> z = row.logits_z();
  return close > 0 && std::count_if(z.begin(), z.end(), [&](double value) { return value >= row.max() - close; }) > 1;
}

double DivergenceRow::label_magnitude() const {
  return row_.label_ratio() == 1 ? 0 : output_magnitudes(row_.at_label_temperature())[kLogp];
}

double DivergenceRow::square() const {
  return options_.scale_by_temperature_squared ? options_.student.temperature * options_.student.temperature : 1;
}

void DivergenceRow::finish(double magnitude, double teacher_error, std::span<const double> masses) {
  const oracle::DistillationOutputs& outputs = row_.outputs();
  values_.outputs.divergence = outputs.divergence / square();
  values_.outputs.teacher_entropy = outputs.teacher_entropy;
  values_.outputs.agreement = outputs.agreement;
  // An error of either side's logits is one of log p - log q.
  const double error = error_of_z(wider_row(), given_.logits) + teacher_error;
  const double more = kMagnitudeOfError * error * (2 + magnitude);
  values_.magnitudes[kDivergence] = values_.magnitudes[kTeacherEntropy] = magnitude + more;
  values_.loss.cross_entropy = oracle_.oracle().row_loss(values_.row, row_);
  values_.loss_magnitude = oracle_.loss_magnitude(values_.row, magnitude * square()) * (1 + more / magnitude);

  oracle::DistillationGradient gradient;
  oracle_.oracle().row_gradient(values_.row, row_, gradient);
  const double factor = oracle_.factor(values_.row);
  oracle::GradientRow& out = values_.gradient;
  out.gradient = std::move(gradient.dlogits);
  out.magnitude = std::move(gradient.magnitude);
  out.blur.clear();
  out.coefficients = {};
  out.dlogp = -options_.label_weight * factor;
  out.scale = wider_row().largest_slope() * std::fabs(factor);
  for (std::size_t j = 0; j < masses.size(); ++j) {
    double mass = masses[j];
    const double ratio = row_.label_ratio();
    if (ratio != 1) mass += ratio * row_.at_label_temperature().p(static_cast<std::int64_t>(j));
    out.blur.push_back(out.scale * 4 * error * square() * mass);
  }
}

std::vector<std::pair<std::string, double>> DivergenceRow::terms() const {
  return {{"token_weight", oracle_.oracle().token_weight(values_.row)},
          {"label_weight", options_.label_weight},
          {"nll", -row_.outputs().logp},
          {"divergence_weight", options_.divergence_weight},
          {"divergence", row_.outputs().divergence},
          own_term(),
          {"share", oracle_.oracle().factor()},
          {"loss_grad", oracle_.oracle().upstream(values_.row)}};
}

void DivergenceRow::set_wrong(std::string_view kernel, WrongRow& out) const {
  std::vector<double> magnitude(out.gradient.size());
  if (kernel == "base_2") {
    const double bits = 1 / std::numbers::ln2 - 1, share = options_.divergence_weight;
    row_.add_divergence_gradient(divergence_factor() * bits, out.gradient, magnitude);
    out.outputs[kDivergence] = bits * values_.outputs.divergence;
    out.loss = oracle_.oracle().token_weight(values_.row) * share * bits * row_.outputs().divergence;
  } else if (kernel == "label_term_dropped") {
    row_.add_cross_entropy_gradient(-oracle_.factor(values_.row) * options_.label_weight, out.gradient, magnitude);
    out.loss = oracle_.oracle().token_weight(values_.row) * options_.label_weight * row_.outputs().logp;
  } else {
    return OracleRow::set_wrong(kernel, out);
  }
  for (std::size_t j = 0; j < out.gradient.size(); ++j) out.gradient[j] *= row_.student().dz_dx(static_cast<std::int64_t>(j));
}

}  // namespace tileloss::tools
