// Losses of labels alone: cross_entropy and logprobs.
#include <algorithm>
#include <cmath>

#include "judge/oracles/oracle.h"
#include "support/oracle_options.h"

namespace tileloss::tools {
namespace {

using oracle::RowLoss;
using oracle::RowUpstream;

double upstream_at(const std::vector<double>& values, std::int64_t row) { return oracle::at_row(values, row, 0); }

class CrossEntropyOracle : public Oracle {
 public:
  CrossEntropyOracle(const Function& function, OracleTensors tensors) : tensors_(std::move(tensors)) {
    const auto options = make_oracle_options(*static_cast<const tileloss_cross_entropy_options*>(function.options()));
    oracle_ = std::make_unique<oracle::CrossEntropy>(options, tensors_.labels, tensors_.token_weights, tensors_.class_weights,
                                                     tensors_.loss_grad);
    oracle::CrossEntropyOptions smoothing = options;
    if (smoothing.label_smoothing != 0) smoothing.label_smoothing = 1;
    smoothing.z_loss = 0;
    smoothing_ = std::make_unique<oracle::CrossEntropy>(smoothing, tensors_.labels, tensors_.token_weights,
                                                        tensors_.class_weights, tensors_.loss_grad);
  }

  std::unique_ptr<OracleRow> new_row() const override { return std::make_unique<Row>(*oracle_, *smoothing_); }
  double reduce(std::span<const RowLoss> losses) const override { return oracle_->reduce(losses); }
  double loss_upstream(std::int64_t row) const override { return oracle_->upstream(row); }

 private:
  class Row : public LabelRow {
   public:
    Row(const oracle::CrossEntropy& oracle, const oracle::CrossEntropy& smoothing)
        : LabelRow(oracle.options().transform), oracle_(oracle), smoothing_(smoothing) {}
    void compute_loss(const oracle::SoftmaxRow& softmax) override {
      oracle_.row_gradient(values_.row, softmax, values_.gradient);
      values_.loss = oracle_.row_loss(values_.row, softmax);
      values_.loss_magnitude = loss_magnitude(softmax, values_.loss, values_.error_of_z);
    }
    std::vector<std::pair<std::string, double>> terms() const override {
      const RowLoss& loss = values_.loss;
      return {{"token_weight", oracle_.token_weight(values_.row)},
              {"nll", loss.cross_entropy - loss.smoothing},
              {"smoothing", loss.smoothing},
              {"z_loss", loss.z_loss},
              {"share", oracle_.cross_entropy_factor()},
              {"z_loss_share", oracle_.z_loss_factor()},
              {"loss_grad", oracle_.upstream(values_.row)}};
    }

   private:
    void set_wrong_shares(double excess, WrongRow& out) const override {
      const double s = oracle_.options().label_smoothing;
      oracle::GradientRow part;
      if (s != 0) smoothing_.row_gradient(values_.row, *values_.softmax, part);
      for (std::size_t j = 0; j < part.gradient.size(); ++j) out.gradient[j] = excess * s * part.gradient[j];
      out.loss = excess * values_.loss.smoothing;
    }

    const oracle::CrossEntropy& oracle_;
    const oracle::CrossEntropy& smoothing_;
  };

  OracleTensors tensors_;
  std::unique_ptr<oracle::CrossEntropy> oracle_, smoothing_;  // smoothing_: of s = 1, what s multiplies
};

class LogprobsOracle : public Oracle {
 public:
  LogprobsOracle(const Function& function, OracleTensors tensors)
      : transform_(make_transform(function)), tensors_(std::move(tensors)) {}

  std::unique_ptr<OracleRow> new_row() const override { return std::make_unique<Row>(*this); }
  double reduce(std::span<const RowLoss>) const override { return 0; }
  // Of several labels that of each logp is apart.
  RowUpstream row_upstream(std::int64_t row) const override {
    const double logp = tensors_.labels_per_row > 1 ? 0 : logp_upstream(row, 0);
    return {logp, upstream_at(tensors_.lse_grad, row), upstream_at(tensors_.entropy_grad, row),
            upstream_at(tensors_.mean_logit_grad, row)};
  }

 private:
  double logp_upstream(std::int64_t row, std::size_t slot) const {
    return upstream_at(tensors_.logp_grad, row * tensors_.labels_per_row + static_cast<std::int64_t>(slot));
  }

  class Row : public LabelRow {
   public:
    explicit Row(const LogprobsOracle& oracle) : LabelRow(oracle.transform_), oracle_(oracle) {}
    void compute_loss(const oracle::SoftmaxRow& softmax) override {
      const RowUpstream upstream = oracle_.row_upstream(values_.row);
      const std::span<const std::int64_t> labels = given_.labels;
      if (labels.empty()) return oracle::logprobs_gradient(softmax, upstream, values_.gradient);
      std::vector<oracle::LabelUpstream> of_labels;
      for (std::size_t k = 0; k < labels.size(); ++k) {
        if (labels[k] >= 0) of_labels.push_back({labels[k], oracle_.logp_upstream(values_.row, k)});
      }
      oracle::logprobs_gradient(softmax, upstream, of_labels, values_.gradient);
    }
    std::vector<std::pair<std::string, double>> terms() const override {
      const RowUpstream upstream = oracle_.row_upstream(values_.row);
      std::vector<std::pair<std::string, double>> terms;
      if (given_.labels.empty()) terms.emplace_back("logp_grad", upstream.logp);
      for (std::size_t k = 0; k < given_.labels.size(); ++k)
        terms.emplace_back(slot_name("logp_grad", k), oracle_.logp_upstream(values_.row, k));
      terms.insert(terms.end(),
                   {{"lse_grad", upstream.lse}, {"entropy_grad", upstream.entropy}, {"mean_logit_grad", upstream.mean}});
      return terms;
    }

   private:
    void set_wrong_shares(double excess, WrongRow& out) const override {
      oracle::GradientRow part;
      oracle::logprobs_gradient(*values_.softmax, {0, 0, 0, excess * oracle_.row_upstream(values_.row).mean}, part);
      out.gradient = part.gradient;
    }

    const LogprobsOracle& oracle_;
  };

  oracle::Transform transform_;
  OracleTensors tensors_;
};

}  // namespace

void OracleRow::start(const GivenRow& given, const oracle::SoftmaxRow& softmax, const oracle::SoftmaxRow& of_logp) {
  given_ = given;
  values_.row = given.logits.row;
  values_.softmax = &softmax;
  values_.of_logp = &of_logp;
  values_.error_of_z = error_of_z(softmax, given.logits);
  values_.outputs = softmax.outputs();
  values_.outputs.own.logp = of_logp.outputs().logp;
  values_.magnitudes = output_magnitudes(softmax, values_.error_of_z);
  if (&of_logp != &softmax) values_.magnitudes[kLogp] = output_magnitudes(of_logp, error_of_z(of_logp, given.logits))[kLogp];
}

const OracleValues& LabelRow::compute(const GivenRow& given) {
  softmax_.compute(transform_, given.logits.logits, given.label, given.allowed);
  if (!given.labels.empty()) compute_slots(given);
  start(given, softmax_, softmax_);
  compute_loss(softmax_);
  values_.reference = make_row_reference(softmax_, values_.gradient);
  values_.reference.labels = label_columns_;
  return values_;
}

void LabelRow::compute_slots(const GivenRow& given) {
  values_.logps.assign(given.labels.size(), {});
  label_columns_.clear();
  const double error = error_of_z(softmax_, given.logits);
  const auto z = [&](std::int64_t label) { return softmax_.logits_z()[static_cast<std::size_t>(label)]; };
  std::int64_t likeliest = -1;
  for (std::size_t k = 0; k < given.labels.size(); ++k) {
    const std::int64_t label = given.labels[k];
    if (label < 0) continue;
    softmax_.set_label(label);
    values_.logps[k] = {softmax_.outputs().logp, output_magnitudes(softmax_, error)[kLogp]};
    label_columns_.push_back(label);
    if (likeliest < 0 || z(label) > z(likeliest)) likeliest = label;
  }
  std::sort(label_columns_.begin(), label_columns_.end());
  label_columns_.erase(std::unique(label_columns_.begin(), label_columns_.end()), label_columns_.end());
  softmax_.set_label(likeliest < 0 ? given.label : likeliest);
}

std::string slot_name(std::string_view name, std::size_t slot) { return std::string(name) + "[" + std::to_string(slot) + "]"; }

double OracleRow::class_excess() const {
  return static_cast<double>(values_.softmax->classes()) / static_cast<double>(values_.softmax->vocab()) - 1;
}

void OracleRow::set_wrong(std::string_view, WrongRow& out) const {
  for (std::size_t o = 0; o < kOutputCount; ++o) {
    const RowOutput& output = checked_outputs()[o];
    if (output.is_mean) out.outputs[o] = class_excess() * output.expected(values_.outputs);
  }
}

void LabelRow::set_wrong(std::string_view kernel, WrongRow& out) const {
  OracleRow::set_wrong(kernel, out);
  set_wrong_shares(class_excess(), out);
}

std::vector<std::uint8_t> AllowedSets::of_row(std::int64_t row, std::int64_t valid) const {
  if (words.empty()) return {};
  const std::int64_t first = is_shared ? 0 : row * row_words;
  return oracle::unpack_allowed(std::span(words).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(row_words)),
                                valid);
}

double Oracle::reduce_magnitudes(std::span<const RowLoss> magnitudes) const { return std::abs(reduce(magnitudes)); }

// The kernel gets the temperature as the caller gives it, in double, and so does the oracle.
oracle::Transform make_transform(const Function& function) {
  return make_transform(static_cast<const tileloss_logprobs_options*>(function.options())->logit);
}

std::unique_ptr<Oracle> make_cross_entropy(const Function& function, OracleTensors tensors) {
  return std::make_unique<CrossEntropyOracle>(function, std::move(tensors));
}

std::unique_ptr<Oracle> make_logprobs(const Function& function, OracleTensors tensors) {
  return std::make_unique<LogprobsOracle>(function, std::move(tensors));
}

}  // namespace tileloss::tools
