// The oracle over a whole case of a policy loss: losses, metrics and row gradients, each with the error that float32's
// logp alone brings into it.
//
//   rows[i] = summarize(softmax) for each row in use
//   const PolicyOracleCase oracle_case(options, tensors, used, rows, loss_grad);
//   oracle_case.row_gradient(i, softmax, gradient); oracle_case.result().loss; ...
#ifndef TILELOSS_JUDGE_ORACLES_POLICY_H_
#define TILELOSS_JUDGE_ORACLES_POLICY_H_

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "judge/oracles/logits_rows.h"
#include "oracle/oracle.h"
#include "oracle/policy.h"
#include "support/policy_inputs.h"

namespace tileloss::tools {

RowSummary summarize(const oracle::SoftmaxRow& softmax, const LogitsRow& logits = {});

class PolicyOracleCase {
 public:
  // `loss_grad` empty: 1. The spans are copied.
  PolicyOracleCase(const oracle::PolicyOptions& options, const PolicyTensors& tensors, std::span<const uint8_t> used,
                   std::span<const RowSummary> rows, std::span<const double> loss_grad);

  bool is_used(int64_t row) const { return used_[static_cast<size_t>(row)] != 0; }
  const oracle::PolicyResult& result() const { return result_; }
  // The smallest of the rows'.
  double margin() const;
  // Magnitudes for OutputMetric::add.
  double loss_magnitude() const { return loss_magnitude_; }
  double token_loss_magnitude(int64_t row) const { return token_magnitude_[static_cast<size_t>(row)]; }
  double metric_magnitude(size_t metric) const { return metric_magnitude_[metric]; }

  // Only for rows in use.
  void row_gradient(int64_t row, const oracle::SoftmaxRow& softmax, oracle::GradientRow& out) const;
  oracle::RowUpstream upstream(int64_t row) const;
  double loss_upstream(int64_t row) const { return oracle::at_row(loss_grad_, row, 1); }

 private:
  // `shifts`: what each row's logp is moved by, in multiples of its error; empty: nothing.
  oracle::PolicyResult evaluate(const oracle::PolicyOptions& options, std::span<const double> advantages,
                                std::span<const double> shifts) const;
  void add_errors(const oracle::PolicyOptions& options, std::span<const double> advantages);
  void set_errors();

  oracle::PolicyOptions options_;
  std::vector<uint8_t> used_;
  std::vector<int64_t> offsets_;
  std::vector<RowSummary> rows_;
  std::vector<double> advantages_, old_logp_, ref_logp_, sampler_logp_, loss_grad_, entropy_;
  oracle::PolicyResult result_;
  std::vector<double> dlogp_error_, token_error_, token_magnitude_;
  double loss_error_ = 0, loss_magnitude_ = 0;
  std::array<double, oracle::kPolicyMetrics> metric_error_{}, metric_magnitude_{};
};

}  // namespace tileloss::tools

#endif  // TILELOSS_JUDGE_ORACLES_POLICY_H_
