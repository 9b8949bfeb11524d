// The oracle of a policy loss: losses, metrics and row gradients, each with the error that float32's logp alone brings into it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "judge/oracles/oracle.h"
#include "oracle/policy.h"

namespace tileloss::tools {

RowSummary summarize(const oracle::SoftmaxRow& softmax, const LogitsRow& logits = {});

class PolicyOracle : public Oracle {
 public:
  // Of `tensors` those of the policy, the rows in use, what summarize() gives of each, and the upstream gradient.
  PolicyOracle(const oracle::PolicyOptions& options, const oracle::Transform& transform, OracleTensors tensors);

  const oracle::PolicyResult& result() const { return result_; }
  // The magnitude for OutputMetric::add.
  double token_loss_magnitude(int64_t row) const { return token_magnitude_[static_cast<size_t>(row)]; }
  // Only for rows in use.
  void row_gradient(int64_t row, const oracle::SoftmaxRow& softmax, oracle::GradientRow& out) const;

  std::unique_ptr<OracleRow> new_row() const override;
  double reduce(std::span<const oracle::RowLoss>) const override { return result_.loss; }
  double reduce_magnitudes(std::span<const oracle::RowLoss>) const override { return loss_magnitude_; }
  double loss_upstream(int64_t row) const override { return oracle::at_row(tensors_.loss_grad, row, 1); }
  oracle::RowUpstream row_upstream(int64_t row) const override;
  std::vector<OracleMetric> metrics() const override;
  double margin() const override;  // the smallest of the rows'

 private:
  class Row;

  // `shifts`: what each row's logp is moved by, in multiples of its error; empty: nothing.
  oracle::PolicyResult evaluate(const oracle::PolicyOptions& options, std::span<const double> advantages,
                                std::span<const double> shifts) const;
  void add_errors(const oracle::PolicyOptions& options, std::span<const double> advantages);
  void set_errors();

  const oracle::PolicyOptions options_;
  const oracle::Transform transform_;
  const OracleTensors tensors_;
  const std::vector<double> advantages_, old_logp_, ref_logp_, sampler_logp_;
  std::vector<double> entropy_;
  oracle::PolicyResult result_;
  std::vector<double> dlogp_error_, token_error_, token_magnitude_;
  double loss_error_ = 0, loss_magnitude_ = 0;
  std::array<double, oracle::kPolicyMetrics> metric_error_{};
};

}  // namespace tileloss::tools
