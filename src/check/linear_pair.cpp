#include "check/linear_pair.h"

#include <algorithm>
#include <cmath>

namespace tileloss::tools {
namespace {

bool is_open(const reference::SoftmaxRow& row, double error) {
  const std::span<const double> z = row.logits_z();
  return std::count_if(z.begin(), z.end(), [&](double value) { return value >= row.max() - 2 * error; }) > 1;
}

}  // namespace

// An error of either side's logits is one of log p - log q.
LinearPairErrors::LinearPairErrors(const reference::DistillationOptions& options, const PairRow& pair, const LinearRow& student,
                                   const LinearRow& teacher)
    : options_(options),
      pair_(pair),
      of_student_(output_error_of_z(wider_row(pair.values()), student)),
      of_teacher_(output_error_of_z(pair.teacher(), teacher)),
      more_(kMagnitudeOfError * (of_student_ + of_teacher_) * (2 + pair.output_magnitude())),
      of_logp_(output_magnitudes(pair.values().at_label_temperature(),
                                 output_error_of_z(pair.values().at_label_temperature(), student))[kLogp]) {}

bool LinearPairErrors::is_agreement_open() const {
  return pair_.is_agreement_open() || is_open(pair_.student(), of_student_) || is_open(pair_.teacher(), of_teacher_);
}

void LinearPairErrors::set_blur(reference::GradientRow& gradient) const {
  const double square = options_.scale_by_temperature_squared ? std::pow(options_.student.temperature, 2) : 1;
  const double factor = gradient.scale * 4 * (of_student_ + of_teacher_) * square;
  gradient.blur.resize(gradient.gradient.size());
  for (std::size_t j = 0; j < gradient.blur.size(); ++j) {
    const auto column = static_cast<std::int64_t>(j);
    gradient.blur[j] = factor * (pair_.student().p(column) + pair_.teacher().p(column));
    const double ratio = pair_.values().label_ratio();
    if (ratio != 1) gradient.blur[j] += factor * ratio * pair_.values().at_label_temperature().p(column);
  }
}

}  // namespace tileloss::tools
