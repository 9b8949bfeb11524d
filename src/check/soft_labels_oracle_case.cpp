#include "check/soft_labels_oracle_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "check/distillation_oracle_case.h"
#include "check/pair_row.h"

namespace tileloss::tools {
namespace {

// No weight, no error: 0 is held to this, as nothing divided by nothing would not be a verdict.
constexpr double kTiny = 0x1p-100;

double class_weight(const SoftLabelsOptions& options, std::size_t column) {
  return options.class_weights.empty() ? 1 : options.class_weights[column];
}

// c_j q'_j
std::vector<double> wanted_of(const SoftLabelsOptions& options, std::span<const double> probs) {
  const double s = options.label_smoothing;
  std::vector<double> wanted(probs.size());
  for (std::size_t j = 0; j < wanted.size(); ++j) {
    wanted[j] = class_weight(options, j) * ((1 - s) * probs[j] + s / static_cast<double>(probs.size()));
  }
  return wanted;
}

}  // namespace

void SoftRow::compute(const SoftLabelsOptions& options, const reference::SoftmaxRow& softmax, std::span<const double> logits,
                      std::span<const double> probs) {
  softmax_ = &softmax;
  logits_.assign(logits.begin(), logits.end());
  probs_.assign(probs.begin(), probs.end());
  wanted_ = wanted_of(options, probs);
  soft_labels_row(options.rows.student, logits_, wanted_, 0, values_);
  mass_ = output_magnitude_ = 0;
  for (std::size_t j = 0; j < wanted_.size(); ++j) {
    const double log_p = (softmax.logits_z()[j] - softmax.max()) - softmax.log_sum();
    mass_ += std::fabs(wanted_[j]);
    if (wanted_[j] != 0 && std::isfinite(log_p)) output_magnitude_ += std::fabs(wanted_[j] * log_p);
  }
  output_magnitude_ += (4 + size_of_z(softmax)) * mass_;
}

SoftLabelsOracleCase::SoftLabelsOracleCase(SoftLabelsOptions options, std::vector<std::int64_t> labels,
                                           std::vector<double> token_weights, std::vector<double> loss_grad)
    : options_(std::move(options)),
      labels_(std::move(labels)),
      token_weights_(std::move(token_weights)),
      loss_grad_(std::move(loss_grad)),
      oracle_(options_.rows, std::ssize(labels_), labels_, token_weights_, loss_grad_) {}

double SoftLabelsOracleCase::row_factor(std::int64_t row) const {
  return oracle_.upstream(row) * oracle_.token_weight(row) * oracle_.factor();
}

double SoftLabelsOracleCase::row_loss(std::int64_t row, const SoftRow& soft) const {
  return oracle_.token_weight(row) * soft.values().loss;
}

void SoftLabelsOracleCase::row_gradient(std::int64_t row, const SoftRow& soft, reference::GradientRow& out) const {
  const double factor = row_factor(row);
  out.gradient = soft.values().dlogits;
  out.magnitude = soft.values().magnitude;
  for (double& g : out.gradient) g *= factor;
  for (double& m : out.magnitude) m *= std::fabs(factor);
  out.blur.clear();
  out.coefficients = {};
  out.dlogp = 0;
  out.scale = soft.softmax().largest_slope() * std::fabs(factor) * soft.mass();
}

double SoftLabelsOracleCase::row_magnitude(std::int64_t row, const SoftRow& soft) const {
  return std::fmax(soft.output_magnitude() * std::fabs(oracle_.token_weight(row)), kTiny);
}

double SoftLabelsOracleCase::reduce_magnitude(double sum) const { return std::fmax(sum * oracle_.factor(), kTiny); }

bool SoftLabelsOracleCase::can_be_wrong(WrongPair wrong) const {
  switch (wrong) {
    case WrongPair::kSmoothingForgotten: return options_.label_smoothing != 0;
    case WrongPair::kSumTakenAsOne:
    case WrongPair::kLabelForProbabilities: return true;
    case WrongPair::kClassWeightsForgotten: return !options_.class_weights.empty();
    case WrongPair::kIgnoredRowsCounted: return counts_rows(options_.rows, labels_);
    default: return false;
  }
}

void SoftLabelsOracleCase::wrong_row(WrongPair wrong, std::int64_t row, const SoftRow& soft, const reference::GradientRow& right,
                                     WrongPairRow& out) const {
  out = {};
  out.gradient.assign(right.gradient.size(), 0);
  if (!std::isfinite(soft.values().loss)) return;
  const double factor = row_factor(row);
  if (wrong == WrongPair::kSumTakenAsOne) {
    double sum = 0;
    for (const double q : wanted_of(options_, soft.probs())) sum += q;
    for (std::size_t j = 0; j < out.gradient.size(); ++j) {
      const auto column = static_cast<std::int64_t>(j);
      out.gradient[j] = factor * (1 - sum) * soft.softmax().p(column) * soft.softmax().dz_dx(column);
    }
    return;
  }
  if (wrong == WrongPair::kIgnoredRowsCounted) {
    double used = 0, all = 0;
    for (std::int64_t i = 0; i < std::ssize(labels_); ++i) {
      const double weight = token_weights_.empty() ? 1 : token_weights_[static_cast<std::size_t>(i)];
      all += weight;
      if (!oracle_.is_ignored(i)) used += weight;
    }
    for (std::size_t j = 0; j < out.gradient.size(); ++j) out.gradient[j] = right.gradient[j] * (used / all - 1);
    return;
  }
  SoftLabelsOptions other = options_;
  std::vector<double> probs(soft.probs().begin(), soft.probs().end());
  if (wrong == WrongPair::kSmoothingForgotten) other.label_smoothing = 0;
  if (wrong == WrongPair::kClassWeightsForgotten) other.class_weights.clear();
  if (wrong == WrongPair::kLabelForProbabilities) {
    std::fill(probs.begin(), probs.end(), 0);
    probs[static_cast<std::size_t>(soft.softmax().label())] = 1;
  }
  SoftRow other_row;
  other_row.compute(other, soft.softmax(), soft.logits(), probs);
  for (std::size_t j = 0; j < out.gradient.size(); ++j) {
    out.gradient[j] = factor * other_row.values().dlogits[j] - right.gradient[j];
  }
  out.loss = oracle_.token_weight(row) * (other_row.values().loss - soft.values().loss);
}

}  // namespace tileloss::tools
