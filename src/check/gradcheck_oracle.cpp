#include "check/gradcheck_oracle.h"

#include <cmath>
#include <limits>
#include <string_view>

#include "check/error_metric.h"
#include "check/gradcheck_policy.h"
#include "check/gradcheck_probs.h"
#include "check/gradcheck_sparse.h"
#include "check/gradcheck_teacher.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/oracle_options.h"

namespace tileloss::tools {
namespace {

using reference::GradientRow;
using reference::RowLoss;
using reference::RowUpstream;

std::vector<double> widen(const std::vector<float>& values) { return {values.begin(), values.end()}; }

double upstream_at(const Upstream& values, int64_t row) {
  if (values.empty()) return 0;
  return static_cast<double>(values[values.size() == 1 ? 0 : static_cast<size_t>(row)]);
}

class CrossEntropyOracle : public LossOracle {
 public:
  CrossEntropyOracle(const GradcheckConfig& config, const CheckInputs& inputs)
      : token_weights_(widen(inputs.token_weights)),
        class_weights_(widen(inputs.class_weights)),
        loss_grad_(widen(inputs.loss_grad)) {
    transform = make_transform(config.function);
    if (config.per_row_loss() && loss_grad_.size() == 1) loss_grad_.assign(inputs.labels.size(), loss_grad_[0]);
    const auto options = make_oracle_options(*static_cast<const tileloss_cross_entropy_options*>(config.function.options()));
    oracle_ = std::make_unique<reference::CrossEntropy>(options, inputs.labels, token_weights_, class_weights_, loss_grad_);
  }

  RowLoss row_loss(int64_t row, const OracleRow& values) const override { return oracle_->row_loss(row, values.softmax); }
  void row_gradient(int64_t row, const OracleRow& values, GradientRow& out) const override {
    oracle_->row_gradient(row, values.softmax, out);
  }
  double reduce(std::span<const RowLoss> losses) const override { return oracle_->reduce(losses); }
  std::vector<std::pair<std::string, double>> row_terms(int64_t row, const OracleRow&, const RowLoss& loss) const override {
    return {{"token_weight", oracle_->token_weight(row)},
            {"nll", loss.cross_entropy - loss.smoothing},
            {"smoothing", loss.smoothing},
            {"z_loss", loss.z_loss},
            {"share", oracle_->cross_entropy_factor()},
            {"z_loss_share", oracle_->z_loss_factor()},
            {"loss_grad", oracle_->upstream(row)}};
  }
  double loss_upstream(int64_t row) const override { return oracle_->upstream(row); }
  RowUpstream row_upstream(int64_t) const override { return {}; }

 private:
  std::vector<double> token_weights_, class_weights_, loss_grad_;
  std::unique_ptr<reference::CrossEntropy> oracle_;
};

class LogprobsOracle : public LossOracle {
 public:
  LogprobsOracle(const GradcheckConfig& config, const CheckInputs& inputs) : inputs_(inputs) {
    transform = make_transform(config.function);
  }

  RowLoss row_loss(int64_t, const OracleRow&) const override { return {}; }
  void row_gradient(int64_t row, const OracleRow& values, GradientRow& out) const override {
    reference::logprobs_gradient(values.softmax, row_upstream(row), out);
  }
  double reduce(std::span<const RowLoss>) const override { return 0; }
  std::vector<std::pair<std::string, double>> row_terms(int64_t row, const OracleRow&, const RowLoss&) const override {
    const RowUpstream upstream = row_upstream(row);
    return {{"logp_grad", upstream.logp},
            {"lse_grad", upstream.lse},
            {"entropy_grad", upstream.entropy},
            {"mean_logit_grad", upstream.mean}};
  }
  double loss_upstream(int64_t) const override { return 0; }
  RowUpstream row_upstream(int64_t row) const override {
    return {upstream_at(inputs_.logp_grad, row), upstream_at(inputs_.lse_grad, row), upstream_at(inputs_.entropy_grad, row),
            upstream_at(inputs_.mean_logit_grad, row)};
  }

 private:
  const CheckInputs& inputs_;
};

class PolicyOracle : public LossOracle {
 public:
  PolicyOracle(const GradcheckConfig& config, const CheckInputs& inputs)
      : oracle_case_(make_oracle_options(config.function, inputs), inputs.policy, inputs.used, inputs.summaries,
                     inputs.loss_grad) {
    transform = make_transform(config.function);
  }

  RowLoss row_loss(int64_t row, const OracleRow&) const override {
    RowLoss loss;
    loss.cross_entropy = oracle_case_.result().token_loss[static_cast<size_t>(row)];
    return loss;
  }
  void row_gradient(int64_t row, const OracleRow& values, GradientRow& out) const override {
    oracle_case_.row_gradient(row, values.softmax, out);
  }
  double reduce(std::span<const RowLoss>) const override { return oracle_case_.result().loss; }
  double row_magnitude(int64_t row, const OracleRow&, const RowLoss&) const override {
    return oracle_case_.token_loss_magnitude(row);
  }
  double reduce_magnitudes(std::span<const RowLoss>) const override { return oracle_case_.loss_magnitude(); }
  std::vector<std::pair<std::string, double>> row_terms(int64_t row, const OracleRow&, const RowLoss&) const override {
    const auto i = static_cast<size_t>(row);
    const reference::PolicyResult& result = oracle_case_.result();
    const reference::PolicyTerms& terms = result.terms[i];
    return {{"ratio", terms.ratio},
            {"advantage", result.advantage[i]},
            {"surrogate", terms.surrogate},
            {"surrogate_factor", terms.factor},
            {"kl", terms.kl},
            {"entropy_bonus", terms.entropy_bonus},
            {"weight", result.token_weight[i]},
            {"loss_grad", oracle_case_.loss_upstream(row)},
            {"dlogp", result.dlogp[i]},
            {"dentropy", result.dentropy[i]}};
  }
  double loss_upstream(int64_t row) const override { return oracle_case_.loss_upstream(row); }
  RowUpstream row_upstream(int64_t row) const override { return oracle_case_.upstream(row); }
  const PolicyOracleCase* policy() const override { return &oracle_case_; }

 private:
  PolicyOracleCase oracle_case_;
};

// Rows that the mask leaves out are ignored here by their label.
std::vector<int64_t> labels_of(const CheckInputs& inputs) {
  std::vector<int64_t> labels = inputs.labels;
  for (int64_t row = 0; row < inputs.rows; ++row) {
    if (inputs.is_ignored(row)) labels[static_cast<size_t>(row)] = inputs.ignore_index;
  }
  return labels;
}

// Of losses that are told more of a row than its label: `beside` is where that row is.
template <class Case, class Row, const Row* OracleRow::*beside>
class WantedOracle : public LossOracle {
 public:
  template <class Options>
  WantedOracle(const Options& options, const GradcheckConfig& config, const CheckInputs& inputs)
      : oracle_case_(options, labels_of(inputs), widen(inputs.token_weights), widen(inputs.loss_grad)) {
    transform = make_transform(config.function);
  }

  RowLoss row_loss(int64_t row, const OracleRow& values) const override {
    RowLoss loss;
    loss.cross_entropy = oracle_case_.row_loss(row, *(values.*beside));
    return loss;
  }
  void row_gradient(int64_t row, const OracleRow& values, GradientRow& out) const override {
    oracle_case_.row_gradient(row, *(values.*beside), out);
  }
  double reduce(std::span<const RowLoss> losses) const override {
    std::vector<double> totals;
    for (const RowLoss& loss : losses) totals.push_back(loss.total());
    return oracle_case_.oracle().reduce(totals);
  }
  double row_magnitude(int64_t row, const OracleRow& values, const RowLoss&) const override {
    return oracle_case_.row_magnitude(row, *(values.*beside));
  }
  double reduce_magnitudes(std::span<const RowLoss> magnitudes) const override {
    double sum = 0;
    for (const RowLoss& magnitude : magnitudes) sum += magnitude.total();
    return oracle_case_.reduce_magnitude(sum);
  }
  double loss_upstream(int64_t row) const override { return oracle_case_.oracle().upstream(row); }
  RowUpstream row_upstream(int64_t) const override { return {}; }
  bool can_be_wrong(WrongPair wrong) const override { return oracle_case_.can_be_wrong(wrong); }
  void wrong_row(WrongPair wrong, int64_t row, const OracleRow& values, const GradientRow& right,
                 WrongPairRow& out) const override {
    oracle_case_.wrong_row(wrong, row, *(values.*beside), right, out);
  }

 protected:
  const Case& oracle_case() const { return oracle_case_; }

 private:
  Case oracle_case_;
};

class DistillationOracle : public WantedOracle<DistillationOracleCase, PairRow, &OracleRow::pair> {
 public:
  DistillationOracle(const GradcheckConfig& config, const CheckInputs& inputs)
      : WantedOracle(make_oracle_options(*static_cast<const tileloss_distillation_options*>(config.function.options())), config,
                     inputs) {}

  std::vector<std::pair<std::string, double>> row_terms(int64_t row, const OracleRow& values, const RowLoss&) const override {
    const reference::DistillationOutputs& outputs = values.pair->values().outputs();
    const double alpha = oracle_case().options().alpha;
    return {{"token_weight", oracle_case().oracle().token_weight(row)},
            {"nll_share", alpha},
            {"nll", -outputs.logp},
            {"divergence_share", 1 - alpha},
            {"divergence", outputs.divergence},
            {"teacher_lse", outputs.teacher_lse},
            {"share", oracle_case().oracle().factor()},
            {"loss_grad", oracle_case().oracle().upstream(row)}};
  }
  const DistillationOracleCase* distillation() const override { return &oracle_case(); }
};

class SoftLabelsOracle : public WantedOracle<SoftLabelsOracleCase, SoftRow, &OracleRow::soft> {
 public:
  SoftLabelsOracle(const GradcheckConfig& config, const CheckInputs& inputs)
      : WantedOracle(make_soft_labels_options(config, inputs), config, inputs) {}

  std::vector<std::pair<std::string, double>> row_terms(int64_t row, const OracleRow& values, const RowLoss&) const override {
    return {{"token_weight", oracle_case().oracle().token_weight(row)},
            {"probability_at_label", values.soft->probs()[static_cast<size_t>(values.softmax.label())]},
            {"sum_abs_probabilities", values.soft->mass()},
            {"soft_nll", values.soft->values().loss},
            {"share", oracle_case().oracle().factor()},
            {"loss_grad", oracle_case().oracle().upstream(row)}};
  }
  const SoftLabelsOracleCase* soft_labels() const override { return &oracle_case(); }
};

class SparseOracle : public WantedOracle<SparseOracleCase, SparseRow, &OracleRow::sparse> {
 public:
  SparseOracle(const GradcheckConfig& config, const CheckInputs& inputs)
      : WantedOracle(make_sparse_options(config.function), config, inputs) {}

  std::vector<std::pair<std::string, double>> row_terms(int64_t row, const OracleRow& values, const RowLoss&) const override {
    const reference::DistillationOutputs& outputs = values.sparse->values().outputs();
    const double alpha = oracle_case().options().distillation.alpha;
    return {{"token_weight", oracle_case().oracle().token_weight(row)},
            {"nll_share", alpha},
            {"nll", -outputs.logp},
            {"divergence_share", 1 - alpha},
            {"divergence", outputs.divergence},
            {"known_columns", static_cast<double>(values.sparse->ids().size())},
            {"share", oracle_case().oracle().factor()},
            {"loss_grad", oracle_case().oracle().upstream(row)}};
  }
  const SparseOracleCase* sparse() const override { return &oracle_case(); }
};

template <class Oracle>
std::unique_ptr<LossOracle> make(const GradcheckConfig& config, const CheckInputs& inputs) {
  return std::make_unique<Oracle>(config, inputs);
}

struct Entry {
  std::string_view function;
  std::unique_ptr<LossOracle> (*make)(const GradcheckConfig& config, const CheckInputs& inputs);
};

constexpr Entry kOracles[] = {
    {"cross_entropy", make<CrossEntropyOracle>},
    {"logprobs", make<LogprobsOracle>},
    {"policy_loss", make<PolicyOracle>},
    {"distillation", make<DistillationOracle>},
    {"soft_cross_entropy", make<SoftLabelsOracle>},
    {"sparse_distillation", make<SparseOracle>},
};

}  // namespace

// The kernel gets the temperature as the caller gives it, in double, and so does the oracle.
reference::Transform make_transform(const Function& function) {
  return make_transform(static_cast<const tileloss_logprobs_options*>(function.options())->logit);
}

double LossOracle::row_magnitude(int64_t, const OracleRow& values, const RowLoss& loss) const {
  return loss_magnitude(values.softmax, loss);
}

double LossOracle::reduce_magnitudes(std::span<const RowLoss> magnitudes) const { return std::abs(reduce(magnitudes)); }

std::vector<std::string> checked_losses() {
  std::vector<std::string> names;
  for (const Entry& entry : kOracles) names.emplace_back(entry.function);
  return names;
}

std::unique_ptr<LossOracle> make_loss_oracle(const GradcheckConfig& config, const CheckInputs& inputs) {
  const std::string_view name = config.function.loss();
  for (const Entry& entry : kOracles) {
    if (entry.function == name) return entry.make(config, inputs);
  }
  throw ToolError(kExitUsage, formatted("{}: there is no oracle for {}", config.file, config.function.name()));
}

}  // namespace tileloss::tools
