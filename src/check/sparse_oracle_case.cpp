#include "check/sparse_oracle_case.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "check/distillation_oracle_case.h"
#include "check/pair_row.h"

namespace tileloss::tools {
namespace {

// No weight, no error: 0 is held to this, as nothing divided by nothing would not be a verdict.
constexpr double kTiny = 0x1p-100;

}  // namespace

void SparseRow::compute(const SparseOptions& options, std::span<const double> logits, std::span<const std::int64_t> ids,
                        std::span<const double> log_q, std::int64_t label) {
  logits_.assign(logits.begin(), logits.end());
  ids_.clear();
  log_q_.clear();
  for (std::size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] < 0) continue;
    ids_.push_back(ids[k]);
    log_q_.push_back(log_q[k]);
  }
  values_.compute_sparse(options.distillation, logits_, ids_, log_q_, options.tail, label);
  const double temperature = options.distillation.student.temperature;
  square_ = options.distillation.scale_by_temperature_squared ? temperature * temperature : 1;
  // lse is rounded to float32.
  output_magnitude_ = 4 + size_of_z(student()) + label_magnitude(values_);
  for (std::size_t k = 0; k < ids_.size(); ++k) {
    const double log_p = student().logits_z()[static_cast<std::size_t>(ids_[k])] - student().outputs().lse;
    const double of_q = std::isfinite(log_q_[k]) ? std::fabs(log_q_[k]) : 0;
    const double logs = of_q + (std::isfinite(log_p) ? std::fabs(log_p) : 0);
    const double mass = student().p(ids_[k]) + std::exp(log_q_[k]);
    if (std::isfinite(mass)) output_magnitude_ += mass * logs;
    // Relative to their own sums they count as they are.
    if (options.tail == reference::Tail::kRenormalise) output_magnitude_ += logs;
  }
}

ExpectedRow SparseRow::expected() const {
  ExpectedRow row(student().outputs());
  row.own.logp = values_.at_label_temperature().outputs().logp;
  row.divergence = values_.outputs().divergence / square_;
  row.teacher_entropy = values_.outputs().teacher_entropy;
  row.agreement = values_.outputs().agreement;
  return row;
}

OutputMagnitudes SparseRow::magnitudes() const {
  OutputMagnitudes magnitudes = output_magnitudes(student());
  magnitudes[kLogp] = output_magnitudes(values_.at_label_temperature())[kLogp];
  magnitudes[kDivergence] = magnitudes[kTeacherEntropy] = output_magnitude_;
  return magnitudes;
}

SparseOracleCase::SparseOracleCase(const SparseOptions& options, std::vector<std::int64_t> labels,
                                   std::vector<double> token_weights, std::vector<double> loss_grad)
    : options_(options),
      labels_(std::move(labels)),
      all_in_use_(labels_.size(), options.distillation.ignore_index == 0 ? 1 : 0),
      token_weights_(std::move(token_weights)),
      loss_grad_(std::move(loss_grad)),
      oracle_(options_.distillation, std::ssize(labels_), labels_, token_weights_, loss_grad_) {}

void SparseOracleCase::row_gradient(std::int64_t row, const SparseRow& sparse, reference::GradientRow& out) const {
  reference::DistillationGradient gradient;
  oracle_.row_gradient(row, sparse.values(), gradient);
  const double factor = oracle_.upstream(row) * oracle_.token_weight(row) * oracle_.factor();
  const double alpha = options_.distillation.alpha;
  out.gradient = std::move(gradient.dlogits);
  out.magnitude = std::move(gradient.magnitude);
  out.blur.clear();
  out.coefficients = {};
  out.dlogp = -alpha * factor;
  out.scale = wider_row(sparse.values()).largest_slope() * std::fabs(factor);
  for (std::size_t j = 0; j < out.magnitude.size(); ++j) {
    const auto column = static_cast<std::int64_t>(j);
    const double share = std::fabs(factor) * (1 - alpha) * sparse.square() * sparse.student().p(column);
    const double naive = share * sparse.student().dz_dx(column) * sparse.output_magnitude();
    out.magnitude[j] = std::fmax(out.magnitude[j], std::isfinite(naive) ? naive : 0);
  }
}

double SparseOracleCase::row_magnitude(std::int64_t row, const SparseRow& sparse) const {
  return std::fmax(sparse.output_magnitude() * sparse.square() * std::fabs(oracle_.token_weight(row)), kTiny);
}

double SparseOracleCase::reduce_magnitude(double sum) const { return std::fmax(sum * oracle_.factor(), kTiny); }

std::optional<SparseOptions> SparseOracleCase::other_options(WrongPair wrong) const {
  SparseOptions other = options_;
  if (wrong == WrongPair::kOtherTail) {
    other.tail = options_.tail == reference::Tail::kIgnore ? reference::Tail::kLump : reference::Tail::kIgnore;
    return other;
  }
  const auto distillation = wrong_options(options_.distillation, wrong);
  if (!distillation) return std::nullopt;
  other.distillation = *distillation;
  return other;
}

bool SparseOracleCase::can_be_wrong(WrongPair wrong) const {
  const double alpha = options_.distillation.alpha;
  switch (wrong) {
    case WrongPair::kBase2:
    case WrongPair::kOtherTail:
    case WrongPair::kNeighboursLogprobs: return alpha != 1;
    case WrongPair::kLabelTermDropped: return alpha != 0;
    case WrongPair::kIgnoredRowsCounted: return counts_rows(options_.distillation, labels_);
    default: return other_options(wrong).has_value();
  }
}

void SparseOracleCase::wrong_row(WrongPair wrong, std::int64_t row, const SparseRow& sparse, const reference::GradientRow& right,
                                 WrongPairRow& out) const {
  out = {};
  out.gradient.assign(right.gradient.size(), 0);
  if (sparse.values().spoiled()) return;
  const double alpha = options_.distillation.alpha;
  const double factor = oracle_.upstream(row) * oracle_.token_weight(row) * oracle_.factor();
  const reference::DistillationOutputs& outputs = sparse.values().outputs();
  std::vector<double> magnitude(out.gradient.size());
  if (wrong == WrongPair::kBase2 || wrong == WrongPair::kLabelTermDropped) {
    if (wrong == WrongPair::kBase2) {
      const double bits = 1 / std::numbers::ln2 - 1;
      sparse.values().add_divergence_gradient(factor * (1 - alpha) * bits, out.gradient, magnitude);
      out.divergence = bits * sparse.expected().divergence;
      out.loss = oracle_.token_weight(row) * (1 - alpha) * bits * outputs.divergence;
    } else {
      sparse.values().add_cross_entropy_gradient(-factor * alpha, out.gradient, magnitude);
      out.loss = oracle_.token_weight(row) * alpha * outputs.logp;
    }
    for (std::size_t j = 0; j < out.gradient.size(); ++j) out.gradient[j] *= sparse.student().dz_dx(static_cast<std::int64_t>(j));
    return;
  }
  const SparseOptions options = other_options(wrong).value_or(options_);
  std::vector<double> log_q(sparse.log_q().begin(), sparse.log_q().end());
  if (wrong == WrongPair::kNeighboursLogprobs && !log_q.empty()) std::rotate(log_q.begin(), log_q.begin() + 1, log_q.end());
  const std::vector<std::int64_t>& labels = wrong == WrongPair::kIgnoredRowsCounted ? all_in_use_ : labels_;
  const reference::Distillation other(options.distillation, std::ssize(labels), labels, token_weights_, loss_grad_);
  SparseRow other_row;
  other_row.compute(options, sparse.logits(), sparse.ids(), log_q, sparse.student().label());
  reference::DistillationGradient gradient;
  other.row_gradient(row, other_row.values(), gradient);
  for (std::size_t j = 0; j < out.gradient.size(); ++j) out.gradient[j] = gradient.dlogits[j] - right.gradient[j];
  out.loss = other.row_loss(row, other_row.values()) - row_loss(row, sparse);
  out.divergence = other_row.expected().divergence - sparse.expected().divergence;
  out.teacher_entropy = other_row.expected().teacher_entropy - outputs.teacher_entropy;
}

}  // namespace tileloss::tools
