#include "check/distillation_oracle_case.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

namespace tileloss::tools {
namespace {

using reference::DistillationOptions;
using reference::Divergence;

// No weight, no error: 0 is held to this, as nothing divided by nothing would not be a verdict.
constexpr double kTiny = 0x1p-100;

std::optional<Divergence> other_direction(Divergence divergence) {
  switch (divergence) {
    case Divergence::kForwardKl: return Divergence::kReverseKl;
    case Divergence::kReverseKl: return Divergence::kForwardKl;
    case Divergence::kSkewForward: return Divergence::kSkewReverse;
    case Divergence::kSkewReverse: return Divergence::kSkewForward;
    default: return std::nullopt;
  }
}

bool has_mixture(Divergence divergence) {
  return divergence == Divergence::kJsd || divergence == Divergence::kSkewForward || divergence == Divergence::kSkewReverse;
}

// sum p g, where the gradient by z is p (g - sum p g).
double mean_slope(const DistillationOptions& options, const PairRow& pair) {
  reference::Classes classes;
  classes.resize(pair.student_logits().size());
  for (size_t j = 0; j < classes.size(); ++j) {
    const auto log_of = [&](const reference::SoftmaxRow& row) { return (row.logits_z()[j] - row.max()) - row.log_sum(); };
    classes.set(j, log_of(pair.student()), log_of(pair.teacher()));
  }
  reference::DivergenceSlopes slopes;
  reference::divergence_slopes(options.divergence, options.beta, classes, slopes);
  return slopes.slope_sum;
}

// sum p log(p/m) by z, m = beta p + (1 - beta) q held fixed, less the same with its derivative: beta p (p/m - sum p^2/m).
void add_fixed_mixture(double factor, double beta, const PairRow& pair, std::vector<double>& dz) {
  std::vector<double> terms(dz.size());
  double mean = 0;
  for (size_t j = 0; j < dz.size(); ++j) {
    const double p = pair.student().p(static_cast<std::int64_t>(j)), q = pair.teacher().p(static_cast<std::int64_t>(j));
    const double m = beta * p + (1 - beta) * q;
    terms[j] = m > 0 ? p / m : 0;
    mean += p * terms[j];
  }
  for (size_t j = 0; j < dz.size(); ++j) {
    dz[j] += factor * beta * pair.student().p(static_cast<std::int64_t>(j)) * (terms[j] - mean);
  }
}

}  // namespace

DistillationOracleCase::DistillationOracleCase(const DistillationOptions& options, std::vector<std::int64_t> labels,
                                               std::vector<double> token_weights, std::vector<double> loss_grad)
    : options_(options),
      labels_(std::move(labels)),
      all_in_use_(labels_.size(), options.ignore_index == 0 ? 1 : 0),
      token_weights_(std::move(token_weights)),
      loss_grad_(std::move(loss_grad)),
      oracle_(options_, std::ssize(labels_), labels_, token_weights_, loss_grad_) {
  for (size_t wrong = 0; wrong < kWrongPairs; ++wrong) {
    const auto other = other_options(static_cast<WrongPair>(wrong));
    const bool counts_all = static_cast<WrongPair>(wrong) == WrongPair::kIgnoredRowsCounted;
    if (other) {
      others_[wrong].emplace(*other, std::ssize(labels_), counts_all ? all_in_use_ : labels_, token_weights_, loss_grad_);
    }
  }
}

std::optional<DistillationOptions> wrong_options(const DistillationOptions& options, WrongPair wrong) {
  DistillationOptions other = options;
  switch (wrong) {
    case WrongPair::kDirectionSwapped:
      if (!other_direction(options.divergence)) return std::nullopt;
      other.divergence = *other_direction(options.divergence);
      return other;
    case WrongPair::kBetaSwapped:
      other.beta = 1 - options.beta;
      return has_mixture(options.divergence) && other.beta != options.beta ? std::optional(other) : std::nullopt;
    case WrongPair::kSquareForgotten:
      other.scale_by_temperature_squared = false;
      return options.scale_by_temperature_squared && options.student.temperature != 1 ? std::optional(other) : std::nullopt;
    case WrongPair::kLabelTemperatureIgnored:
      other.label_temperature = options.student.temperature;
      return options.alpha != 0 && !std::isnan(options.label_temperature) && options.label_temperature != other.label_temperature
                 ? std::optional(other)
                 : std::nullopt;
    default: return std::nullopt;
  }
}

bool counts_rows(const DistillationOptions& options, std::span<const std::int64_t> labels) {
  const bool is_counted = options.reduction == reference::Reduction::kMean && std::isnan(options.num_items);
  return is_counted && std::find(labels.begin(), labels.end(), options.ignore_index) != labels.end();
}

std::optional<DistillationOptions> DistillationOracleCase::other_options(WrongPair wrong) const {
  DistillationOptions other = options_;
  switch (wrong) {
    case WrongPair::kTeacherTemperatureIgnored: {
      const double given = options_.teacher.temperature;
      other.teacher.temperature = 1;
      return (std::isnan(given) ? options_.student.temperature : given) != 1 ? std::optional(other) : std::nullopt;
    }
    case WrongPair::kIgnoredRowsCounted: return counts_rows(options_, labels_) ? std::optional(other) : std::nullopt;
    default: return wrong_options(options_, wrong);
  }
}

double DistillationOracleCase::square() const {
  return options_.scale_by_temperature_squared ? options_.student.temperature * options_.student.temperature : 1;
}

double DistillationOracleCase::row_factor(std::int64_t row) const {
  return oracle_.upstream(row) * oracle_.token_weight(row) * oracle_.factor();
}

void DistillationOracleCase::row_gradient(std::int64_t row, const PairRow& pair, reference::GradientRow& out) const {
  reference::DistillationGradient gradient;
  oracle_.row_gradient(row, pair.values(), gradient);
  const double factor = row_factor(row);
  out.gradient = std::move(gradient.dlogits);
  out.magnitude = std::move(gradient.magnitude);
  out.blur.clear();
  out.coefficients = {};
  out.dlogp = -options_.alpha * factor;
  out.scale = wider_row(pair.values()).largest_slope() * std::fabs(factor);
  pair.add_mean_magnitude(factor * (1 - options_.alpha), out.magnitude);
}

double DistillationOracleCase::row_magnitude(std::int64_t row, const PairRow& pair) const {
  return std::fmax(pair.output_magnitude() * square() * std::fabs(oracle_.token_weight(row)), kTiny);
}

double DistillationOracleCase::reduce_magnitude(double sum) const { return std::fmax(sum * oracle_.factor(), kTiny); }

bool DistillationOracleCase::can_be_wrong(WrongPair wrong) const {
  switch (wrong) {
    // Of the forward KL's gradient, p - q, the mean is no term of its own.
    case WrongPair::kMeanDropped: return options_.alpha != 1 && options_.divergence != Divergence::kForwardKl;
    case WrongPair::kBase2: return options_.alpha != 1;
    case WrongPair::kLabelTermDropped: return options_.alpha != 0;
    case WrongPair::kMixtureForgotten: return has_mixture(options_.divergence) && options_.alpha != 1;
    default: return others_[static_cast<size_t>(wrong)].has_value();
  }
}

void DistillationOracleCase::wrong_row(WrongPair wrong, std::int64_t row, const PairRow& pair,
                                       const reference::GradientRow& right, WrongPairRow& out) const {
  out = {};
  out.gradient.assign(right.gradient.size(), 0);
  if (pair.values().spoiled()) return;
  const reference::DistillationOutputs& outputs = pair.values().outputs();
  if (const auto& other = others_[static_cast<size_t>(wrong)]) {
    PairRow other_pair;
    other_pair.compute(other->options(), pair.student_logits(), pair.teacher_logits(), pair.student().label());
    reference::DistillationGradient gradient;
    other->row_gradient(row, other_pair.values(), gradient);
    for (size_t j = 0; j < out.gradient.size(); ++j) out.gradient[j] = gradient.dlogits[j] - right.gradient[j];
    out.loss = other->row_loss(row, other_pair.values()) - row_loss(row, pair);
    out.divergence = other_pair.expected().divergence - pair.expected().divergence;
    out.teacher_entropy = other_pair.expected().teacher_entropy - outputs.teacher_entropy;
    return;
  }
  const double factor = row_factor(row), share = 1 - options_.alpha, beta = options_.beta;
  std::vector<double> magnitude(out.gradient.size());
  switch (wrong) {
    case WrongPair::kMeanDropped: {
      const double mean = mean_slope(options_, pair);
      for (size_t j = 0; j < out.gradient.size(); ++j) {
        out.gradient[j] = factor * share * square() * pair.student().p(static_cast<std::int64_t>(j)) * mean;
      }
      break;
    }
    case WrongPair::kBase2: {
      const double bits = 1 / std::numbers::ln2 - 1;
      pair.values().add_divergence_gradient(factor * share * bits, out.gradient, magnitude);
      out.divergence = bits * pair.expected().divergence;
      out.loss = oracle_.token_weight(row) * share * bits * outputs.divergence;
      break;
    }
    case WrongPair::kLabelTermDropped:
      pair.values().add_cross_entropy_gradient(-factor * options_.alpha, out.gradient, magnitude);
      out.loss = oracle_.token_weight(row) * options_.alpha * outputs.logp;
      break;
    case WrongPair::kMixtureForgotten:
      if (options_.divergence == Divergence::kSkewReverse) {
        add_fixed_mixture(factor * share * square(), beta, pair, out.gradient);
      } else {
        pair.values().add_divergence_gradient(factor * share * (1 / (1 - beta) - 1), out.gradient, magnitude);
      }
      break;
    default: break;
  }
  for (size_t j = 0; j < out.gradient.size(); ++j) out.gradient[j] *= pair.student().dz_dx(static_cast<std::int64_t>(j));
}

}  // namespace tileloss::tools
