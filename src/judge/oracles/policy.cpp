#include "judge/oracles/policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "judge/oracles/oracle.h"
#include "judge/oracles/row_outputs.h"
#include "support/oracle_options.h"

namespace tileloss::tools {
namespace {

using oracle::PolicyOptions;
using oracle::PolicyResult;

std::vector<double> widen(std::span<const float> values) { return {values.begin(), values.end()}; }

class PolicyOracle : public Oracle {
 public:
  PolicyOracle(const Function& function, const OracleTensors& tensors)
      : transform_(make_transform(function)),
        oracle_case_(make_oracle_options(*static_cast<const tileloss_policy_loss_options*>(function.options()),
                                         tensors.policy.sequence_length),
                     tensors.policy, tensors.used, tensors.summaries, tensors.loss_grad) {}

  std::unique_ptr<OracleRow> new_row() const override { return std::make_unique<Row>(*this); }
  double reduce(std::span<const oracle::RowLoss>) const override { return oracle_case_.result().loss; }
  double reduce_magnitudes(std::span<const oracle::RowLoss>) const override { return oracle_case_.loss_magnitude(); }
  double loss_upstream(int64_t row) const override { return oracle_case_.loss_upstream(row); }
  oracle::RowUpstream row_upstream(int64_t row) const override { return oracle_case_.upstream(row); }
  std::vector<OracleMetric> metrics() const override {
    std::vector<OracleMetric> metrics;
    for (size_t m = 0; m < oracle::kPolicyMetrics; ++m) {
      metrics.push_back({oracle_case_.result().metrics[m], oracle_case_.metric_magnitude(m)});
    }
    return metrics;
  }
  double margin() const override { return oracle_case_.margin(); }

 private:
  class Row : public LabelRow {
   public:
    explicit Row(const PolicyOracle& oracle) : LabelRow(oracle.transform_), oracle_case_(oracle.oracle_case_) {}
    void compute_loss(const oracle::SoftmaxRow& softmax) override {
      oracle_case_.row_gradient(values_.row, softmax, values_.gradient);
      values_.loss.cross_entropy = oracle_case_.result().token_loss[static_cast<size_t>(values_.row)];
      values_.loss_magnitude = oracle_case_.token_loss_magnitude(values_.row);
    }
    std::vector<std::pair<std::string, double>> terms() const override {
      const auto i = static_cast<size_t>(values_.row);
      const PolicyResult& result = oracle_case_.result();
      const oracle::PolicyTerms& terms = result.terms[i];
      return {{"ratio", terms.ratio},
              {"advantage", result.advantage[i]},
              {"surrogate", terms.surrogate},
              {"surrogate_factor", terms.factor},
              {"kl", terms.kl},
              {"entropy_bonus", terms.entropy_bonus},
              {"weight", result.token_weight[i]},
              {"loss_grad", oracle_case_.loss_upstream(values_.row)},
              {"dlogp", result.dlogp[i]},
              {"dentropy", result.dentropy[i]}};
    }

   private:
    const PolicyOracleCase& oracle_case_;
  };

  oracle::Transform transform_;
  PolicyOracleCase oracle_case_;
};

}  // namespace

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
  return std::make_unique<PolicyOracle>(function, tensors);
}

PolicyOracleCase::PolicyOracleCase(const PolicyOptions& options, const PolicyTensors& tensors, std::span<const uint8_t> used,
                                   std::span<const RowSummary> rows, std::span<const double> loss_grad)
    : options_(options),
      used_(used.begin(), used.end()),
      offsets_(tensors.offsets),
      rows_(rows.begin(), rows.end()),
      advantages_(widen(tensors.advantages)),
      old_logp_(widen(tensors.old_logp)),
      ref_logp_(widen(tensors.ref_logp)),
      sampler_logp_(widen(tensors.sampler_logp)),
      loss_grad_(loss_grad.begin(), loss_grad.end()) {
  for (const RowSummary& row : rows_) entropy_.push_back(row.entropy);
  result_ = evaluate(options_, advantages_, {});
  set_errors();
}

PolicyResult PolicyOracleCase::evaluate(const PolicyOptions& options, std::span<const double> advantages,
                                        std::span<const double> shifts) const {
  std::vector<double> logp;
  for (size_t i = 0; i < rows_.size(); ++i) {
    logp.push_back(rows_[i].logp + (shifts.empty() ? 0 : shifts[i] * rows_[i].logp_error));
  }
  oracle::PolicyInputs inputs;
  inputs.used = used_;
  inputs.offsets = offsets_;
  inputs.advantages = advantages;
  inputs.old_logp = old_logp_;
  inputs.ref_logp = ref_logp_;
  inputs.sampler_logp = sampler_logp_;
  inputs.loss_grad = loss_grad_;
  return policy_loss(options, inputs, logp, entropy_);
}

// Every logp moved by its error, up and down, then up where the advantage is positive and down where it is not, and the other
// way round: what that changes is what float32 may change. Errors of one sign add up in a sequence's mean, those with the
// advantage's sign in a sum over tokens.
void PolicyOracleCase::add_errors(const PolicyOptions& options, std::span<const double> advantages) {
  const PolicyResult base = evaluate(options, advantages, {});
  std::vector<double> dlogp(rows_.size(), 0), token(rows_.size(), 0);
  std::array<double, oracle::kPolicyMetrics> metrics{};
  double loss = 0;
  const auto widen_by = [](double& error, double moved, double value) {
    if (std::isfinite(moved - value)) error = std::max(error, std::fabs(moved - value));
  };
  for (const int pattern : {0, 1, 2, 3}) {
    std::vector<double> shifts(rows_.size(), pattern % 2 == 0 ? 1.0 : -1.0);
    for (size_t i = 0; pattern >= 2 && i < shifts.size(); ++i) shifts[i] *= result_.advantage[i] > 0 ? 1 : -1;
    const PolicyResult moved = evaluate(options, advantages, shifts);
    for (size_t i = 0; i < rows_.size(); ++i) {
      widen_by(dlogp[i], moved.dlogp[i], base.dlogp[i]);
      widen_by(token[i], moved.token_loss[i], base.token_loss[i]);
    }
    for (size_t m = 0; m < metrics.size(); ++m) widen_by(metrics[m], moved.metrics[m], base.metrics[m]);
    widen_by(loss, moved.loss, base.loss);
  }
  for (size_t i = 0; i < rows_.size(); ++i) {
    dlogp_error_[i] += dlogp[i];
    token_error_[i] += token[i];
  }
  for (size_t m = 0; m < metrics.size(); ++m) metric_error_[m] += metrics[m];
  loss_error_ += loss;
}

void PolicyOracleCase::set_errors() {
  dlogp_error_.assign(rows_.size(), 0);
  token_error_ = dlogp_error_;
  // The policy's part and the KL's apart: in their sum a row's own error and its sequence's could cancel.
  PolicyOptions without_kl = options_;
  without_kl.beta = 0;
  add_errors(without_kl, advantages_);
  if (options_.beta != 0) add_errors(options_, std::vector<double>(advantages_.size(), 0));
  token_magnitude_ = result_.token_size;
  const double tokens = std::max(1.0, result_.metrics[oracle::kMetricTokens]);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const double upstream = std::fabs(loss_upstream(static_cast<int64_t>(i)));
    const double bonus = upstream == 0 ? 0 : std::fabs(result_.dentropy[i]) / upstream * rows_[i].entropy_error;
    if (options_.entropy_reduction == oracle::EntropyReduction::kAsLoss) {
      token_error_[i] += std::fabs(options_.entropy_coef) * rows_[i].entropy_error;
    }
    const double slope = result_.own_slope[i] + std::fabs(options_.beta) * result_.kl_slope[i];
    if (std::isfinite(slope)) token_error_[i] += slope * rows_[i].logp_error;
    token_magnitude_[i] += kMagnitudeOfError * token_error_[i];
    if (used_[i] == 0) continue;
    loss_error_ += result_.token_weight[i] * token_error_[i] + bonus;
    loss_magnitude_ += result_.token_weight[i] * result_.token_size[i];
    metric_error_[oracle::kMetricKl] += result_.kl_slope[i] * rows_[i].logp_error / tokens;
    metric_error_[oracle::kMetricEntropy] += rows_[i].entropy_error / tokens;
  }
  loss_magnitude_ += kMagnitudeOfError * loss_error_;
  for (size_t m = 0; m < metric_error_.size(); ++m) metric_magnitude_[m] = kMagnitudeOfError * metric_error_[m];
}

double PolicyOracleCase::margin() const {
  return result_.margin.empty() ? std::numeric_limits<double>::infinity()
                                : *std::min_element(result_.margin.begin(), result_.margin.end());
}

void PolicyOracleCase::row_gradient(int64_t row, const oracle::SoftmaxRow& softmax, oracle::GradientRow& out) const {
  oracle::logprobs_gradient(softmax, {dlogp_error_[static_cast<size_t>(row)], 0, 0}, out);
  std::vector<double> blur = std::move(out.magnitude);
  oracle::logprobs_gradient(softmax, upstream(row), out);
  out.blur = std::move(blur);
}

oracle::RowUpstream PolicyOracleCase::upstream(int64_t row) const {
  const auto i = static_cast<size_t>(row);
  return {result_.dlogp[i], 0, result_.dentropy[i]};
}

}  // namespace tileloss::tools
