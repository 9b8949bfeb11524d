#include "check/pair_row.h"

#include <algorithm>
#include <cmath>

namespace tileloss::tools {
namespace {

using reference::SoftmaxRow;

double size_of_log(const SoftmaxRow& row, std::size_t column) {
  const double log = row.logits_z()[column] - (row.max() + row.log_sum());
  return std::isfinite(log) ? std::fabs(log) : 0;
}

}  // namespace

double size_of_z(const SoftmaxRow& row) {
  const bool counts = !row.transform().is_identity() && std::isfinite(row.max());
  return counts ? std::fabs(row.max()) : 0;
}

const SoftmaxRow& wider_row(const reference::DistillationRow& values) {
  return values.label_ratio() > 1 ? values.at_label_temperature() : values.student();
}

double label_magnitude(const reference::DistillationRow& values, double error_of_z) {
  return values.label_ratio() == 1 ? 0 : output_magnitudes(values.at_label_temperature(), error_of_z)[kLogp];
}

bool is_argmax_open(const SoftmaxRow& row) {
  if (row.transform().is_identity()) return false;
  const double close = row.max() - 1e-5 * (1 + std::fabs(row.max()));
  const std::span<const double> z = row.logits_z();
  return std::count_if(z.begin(), z.end(), [&](double value) { return value >= close; }) > 1;
}

void PairRow::compute(const reference::DistillationOptions& options, std::span<const double> student,
                      std::span<const double> teacher, std::int64_t label) {
  student_logits_.assign(student.begin(), student.end());
  teacher_logits_.assign(teacher.begin(), teacher.end());
  reference::Transform transform = options.teacher;
  if (std::isnan(transform.temperature)) transform.temperature = options.student.temperature;
  teacher_.compute(transform, teacher, label);
  values_.compute(options, student, teacher, label);
  divergence_ = options.divergence;
  square_ = options.scale_by_temperature_squared ? options.student.temperature * options.student.temperature : 1;
  set_budget();
}

void PairRow::set_budget() {
  const SoftmaxRow& wider = wider_row(values_);
  const double own = size_of_z(student()), other = size_of_z(teacher_);
  others_distance_ = others_distance(wider) + others_distance(teacher_);
  max_ = std::fabs(wider.max()) + other;
  output_magnitude_ = 4 + std::fmin(own + other, 1e5) / 4 + label_magnitude(values_);
  mean_magnitude_ = 0;
  z_.clear();
  logs_.clear();
  for (std::size_t j = 0; j < student().logits_z().size(); ++j) {
    const double behind = std::fabs(wider.max() - wider.logits_z()[j]) + std::fabs(teacher_.max() - teacher_.logits_z()[j]);
    z_.push_back(max_ - (std::isfinite(behind) ? behind : kExpRange));
    logs_.push_back(size_of_log(student(), j) + size_of_log(teacher_, j));
    const double p = student().p(static_cast<std::int64_t>(j)), q = teacher_.p(static_cast<std::int64_t>(j));
    if (std::isfinite(p)) mean_magnitude_ += p * logs_.back();
    if (std::isfinite(p) && std::isfinite(q)) output_magnitude_ += (p + q) * logs_.back();
  }
}

ExpectedRow PairRow::expected() const {
  ExpectedRow row(student().outputs());
  row.own.logp = values_.at_label_temperature().outputs().logp;
  row.divergence = values_.outputs().divergence / square_;
  row.teacher_entropy = values_.outputs().teacher_entropy;
  row.agreement = values_.outputs().agreement;
  return row;
}

OutputMagnitudes PairRow::magnitudes() const {
  OutputMagnitudes magnitudes = output_magnitudes(student());
  magnitudes[kLogp] = output_magnitudes(values_.at_label_temperature())[kLogp];
  magnitudes[kDivergence] = magnitudes[kTeacherEntropy] = output_magnitude_;
  return magnitudes;
}

bool PairRow::is_agreement_open() const { return is_argmax_open(student()) || is_argmax_open(teacher_); }

void PairRow::add_mean_magnitude(double factor, std::span<double> magnitude) const {
  if (divergence_ == reference::Divergence::kForwardKl) return;
  const std::int64_t label = student().label();
  for (std::size_t j = 0; j < magnitude.size(); ++j) {
    const auto column = static_cast<std::int64_t>(j);
    const double p = student().p(column);
    if (column == label && p > 0.5) continue;
    const double terms = std::fabs(factor) * square_ * p * student().dz_dx(column) * (2 + logs_[j] + mean_magnitude_);
    magnitude[j] = std::fmax(magnitude[j], terms);
  }
}

RowReference PairRow::reference(const reference::GradientRow& gradient) const {
  return {.gradient = gradient.gradient,
          .magnitude = gradient.magnitude,
          .blur = gradient.blur,
          .z = z_,
          .max = max_,
          .scale = gradient.scale,
          .transformed = !student().transform().is_identity() || !wider_row(values_).transform().is_identity() ||
                         !teacher_.transform().is_identity(),
          .target = student().label(),
          .others_distance = others_distance_};
}

}  // namespace tileloss::tools
