#include "judge/oracles/policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "judge/oracles/row_outputs.h"
#include "support/oracle_options.h"

namespace tileloss::tools {
namespace {

using oracle::PolicyOptions;
using oracle::PolicyResult;

std::vector<double> widen(std::span<const float> values) { return {values.begin(), values.end()}; }

}  // namespace

class PolicyOracle::Row : public LabelRow {
 public:
  explicit Row(const PolicyOracle& oracle) : LabelRow(oracle.transform_), oracle_(oracle) {}
  void compute_loss(const oracle::SoftmaxRow& softmax) override {
    oracle_.row_gradient(values_.row, softmax, values_.gradient);
    values_.loss.cross_entropy = oracle_.result_.token_loss[static_cast<size_t>(values_.row)];
    values_.loss_magnitude = oracle_.token_loss_magnitude(values_.row);
  }
  std::vector<std::pair<std::string, double>> terms() const override {
    const auto i = static_cast<size_t>(values_.row);
    const PolicyResult& result = oracle_.result_;
    const oracle::PolicyTerms& terms = result.terms[i];
    return {{"ratio", terms.ratio},
            {"advantage", result.advantage[i]},
            {"surrogate", terms.surrogate},
            {"surrogate_factor", terms.factor},
            {"kl", terms.kl},
            {"entropy_bonus", terms.entropy_bonus},
            {"weight", result.token_weight[i]},
            {"loss_grad", oracle_.loss_upstream(values_.row)},
            {"dlogp", result.dlogp[i]},
            {"dentropy", result.dentropy[i]}};
  }

 private:
  const PolicyOracle& oracle_;
};

std::unique_ptr<OracleRow> PolicyOracle::new_row() const { return std::make_unique<Row>(*this); }

RowSummary summarize(const oracle::SoftmaxRow& softmax, const LogitsRow& logits) {
  const OutputMagnitudes magnitudes = output_magnitudes(softmax);
  RowSummary row;
  row.logp = softmax.outputs().logp;
  row.entropy = softmax.entropy();
  // z_y - m and log S are rounded once each; what their own sums lost is in the magnitude.
  const double size = std::fabs(row.logp);
  if (std::isfinite(row.logp)) row.logp_error = 0x1p-23 * (size + 2 * std::min(1.0, size)) + 0x1p-22 * magnitudes[kLogp];
  if (std::isfinite(row.entropy)) row.entropy_error = 0x1p-22 * (row.entropy + magnitudes[kEntropy]);
  if (logits.errors.empty()) return row;
  const double own = std::fabs(softmax.dz_dx(softmax.label())) * logits.errors[static_cast<size_t>(softmax.label())];
  const double mean = mean_error(softmax, logits);
  if (std::isfinite(row.logp)) row.logp_error += (own + mean) / softmax.transform().logp_temperature();
  if (std::isfinite(row.entropy)) row.entropy_error += 2 * mean * (1 + row.entropy);
  return row;
}

std::unique_ptr<Oracle> make_policy_loss(const Function& function, OracleTensors tensors) {
  const auto& options = *static_cast<const tileloss_policy_loss_options*>(function.options());
  return std::make_unique<PolicyOracle>(make_oracle_options(options, tensors.policy.sequence_length), make_transform(function),
                                        std::move(tensors));
}

PolicyOracle::PolicyOracle(const PolicyOptions& options, const oracle::Transform& transform, OracleTensors tensors)
    : options_(options),
      transform_(transform),
      tensors_(std::move(tensors)),
      advantages_(widen(tensors_.policy.advantages)),
      old_logp_(widen(tensors_.policy.old_logp)),
      ref_logp_(widen(tensors_.policy.ref_logp)),
      sampler_logp_(widen(tensors_.policy.sampler_logp)) {
  for (const RowSummary& row : tensors_.summaries) entropy_.push_back(row.entropy);
  result_ = evaluate(options_, advantages_, {});
  set_errors();
}

PolicyResult PolicyOracle::evaluate(const PolicyOptions& options, std::span<const double> advantages,
                                    std::span<const double> shifts) const {
  const std::vector<RowSummary>& rows = tensors_.summaries;
  std::vector<double> logp;
  for (size_t i = 0; i < rows.size(); ++i) logp.push_back(rows[i].logp + (shifts.empty() ? 0 : shifts[i] * rows[i].logp_error));
  oracle::PolicyInputs inputs;
  inputs.used = tensors_.used;
  inputs.offsets = tensors_.policy.offsets;
  inputs.advantages = advantages;
  inputs.old_logp = old_logp_;
  inputs.ref_logp = ref_logp_;
  inputs.sampler_logp = sampler_logp_;
  inputs.loss_grad = tensors_.loss_grad;
  return policy_loss(options, inputs, logp, entropy_);
}

// Every logp moved by its error, up and down, then up where the advantage is positive and down where it is not, and the other
// way round: what that changes is what float32 may change. Errors of one sign add up in a sequence's mean, those with the
// advantage's sign in a sum over tokens.
void PolicyOracle::add_errors(const PolicyOptions& options, std::span<const double> advantages) {
  const PolicyResult base = evaluate(options, advantages, {});
  const size_t rows = dlogp_error_.size();
  std::vector<double> dlogp(rows, 0), token(rows, 0);
  std::array<double, oracle::kPolicyMetrics> metrics{};
  double loss = 0;
  const auto widen_by = [](double& error, double moved, double value) {
    if (std::isfinite(moved - value)) error = std::max(error, std::fabs(moved - value));
  };
  for (const int pattern : {0, 1, 2, 3}) {
    std::vector<double> shifts(rows, pattern % 2 == 0 ? 1.0 : -1.0);
    for (size_t i = 0; pattern >= 2 && i < shifts.size(); ++i) shifts[i] *= result_.advantage[i] > 0 ? 1 : -1;
    const PolicyResult moved = evaluate(options, advantages, shifts);
    for (size_t i = 0; i < rows; ++i) {
      widen_by(dlogp[i], moved.dlogp[i], base.dlogp[i]);
      widen_by(token[i], moved.token_loss[i], base.token_loss[i]);
    }
    for (size_t m = 0; m < metrics.size(); ++m) widen_by(metrics[m], moved.metrics[m], base.metrics[m]);
    widen_by(loss, moved.loss, base.loss);
  }
  for (size_t i = 0; i < rows; ++i) {
    dlogp_error_[i] += dlogp[i];
    token_error_[i] += token[i];
  }
  for (size_t m = 0; m < metrics.size(); ++m) metric_error_[m] += metrics[m];
  loss_error_ += loss;
}

void PolicyOracle::set_errors() {
  const std::vector<RowSummary>& rows = tensors_.summaries;
  dlogp_error_.assign(rows.size(), 0);
  token_error_ = dlogp_error_;
  // The policy's part and the KL's apart: in their sum a row's own error and its sequence's could cancel.
  PolicyOptions without_kl = options_;
  without_kl.beta = 0;
  add_errors(without_kl, advantages_);
  if (options_.beta != 0) add_errors(options_, std::vector<double>(advantages_.size(), 0));
  token_magnitude_ = result_.token_size;
  const double tokens = std::max(1.0, result_.metrics[oracle::kMetricTokens]);
  for (size_t i = 0; i < rows.size(); ++i) {
    const double upstream = std::fabs(loss_upstream(static_cast<int64_t>(i)));
    const double bonus = upstream == 0 ? 0 : std::fabs(result_.dentropy[i]) / upstream * rows[i].entropy_error;
    if (options_.entropy_reduction == oracle::EntropyReduction::kAsLoss) {
      token_error_[i] += std::fabs(options_.entropy_coef) * rows[i].entropy_error;
    }
    const double slope = result_.own_slope[i] + std::fabs(options_.beta) * result_.kl_slope[i];
    if (std::isfinite(slope)) token_error_[i] += slope * rows[i].logp_error;
    token_magnitude_[i] += kMagnitudeOfError * token_error_[i];
    if (tensors_.used[i] == 0) continue;
    loss_error_ += result_.token_weight[i] * token_error_[i] + bonus;
    loss_magnitude_ += result_.token_weight[i] * result_.token_size[i];
    metric_error_[oracle::kMetricKl] += result_.kl_slope[i] * rows[i].logp_error / tokens;
    metric_error_[oracle::kMetricEntropy] += rows[i].entropy_error / tokens;
  }
  loss_magnitude_ += kMagnitudeOfError * loss_error_;
}

std::vector<OracleMetric> PolicyOracle::metrics() const {
  std::vector<OracleMetric> metrics;
  for (size_t m = 0; m < oracle::kPolicyMetrics; ++m) {
    metrics.push_back({result_.metrics[m], kMagnitudeOfError * metric_error_[m]});
  }
  return metrics;
}

double PolicyOracle::margin() const {
  return result_.margin.empty() ? std::numeric_limits<double>::infinity()
                                : *std::min_element(result_.margin.begin(), result_.margin.end());
}

void PolicyOracle::row_gradient(int64_t row, const oracle::SoftmaxRow& softmax, oracle::GradientRow& out) const {
  oracle::logprobs_gradient(softmax, {dlogp_error_[static_cast<size_t>(row)], 0, 0}, out);
  std::vector<double> blur = std::move(out.magnitude);
  oracle::logprobs_gradient(softmax, row_upstream(row), out);
  out.blur = std::move(blur);
}

oracle::RowUpstream PolicyOracle::row_upstream(int64_t row) const {
  const auto i = static_cast<size_t>(row);
  return {result_.dlogp[i], 0, result_.dentropy[i]};
}

}  // namespace tileloss::tools
