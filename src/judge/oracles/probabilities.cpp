// soft_cross_entropy: class probabilities in place of a label.
#include <algorithm>
#include <cmath>

#include "judge/oracles/weighted.h"
#include "oracle/soft_labels.h"
#include "support/oracle_options.h"

namespace tileloss::tools {
namespace {

class ProbabilitiesOracle : public WeightedOracle {
 public:
  ProbabilitiesOracle(const tileloss_soft_cross_entropy_options& options, OracleTensors tensors)
      : WeightedOracle(make_oracle_options(options), std::move(tensors)), smoothing_(options.label_smoothing) {}
  std::unique_ptr<OracleRow> new_row() const override { return std::make_unique<Row>(*this); }

 private:
  class Row : public OracleRow {
   public:
    explicit Row(const ProbabilitiesOracle& oracle) : oracle_(oracle) {}

    const OracleValues& compute(const GivenRow& given) override {
      softmax_.compute(oracle_.options().student, given.logits.logits, given.label, given.allowed);
      start(given, softmax_, softmax_);
      set_target();
      soft_labels_row(oracle_.options().student, given.logits.logits, target_, 0, soft_, given.allowed);
      const double magnitude = output_magnitude();
      const double factor = oracle_.factor(values_.row);
      values_.loss.cross_entropy = oracle_.oracle().token_weight(values_.row) * soft_.loss;
      values_.loss_magnitude = oracle_.loss_magnitude(values_.row, magnitude);
      oracle::GradientRow& out = values_.gradient;
      out.gradient = soft_.dlogits;
      out.magnitude = soft_.magnitude;
      for (double& g : out.gradient) g *= factor;
      for (double& m : out.magnitude) m *= std::fabs(factor);
      out.scale = softmax_.largest_slope() * std::fabs(factor) * mass_;
      values_.reference = make_row_reference(softmax_, out);
      return values_;
    }

    std::vector<std::pair<std::string, double>> terms() const override {
      return {{"token_weight", oracle_.oracle().token_weight(values_.row)},
              {"probability_at_label", given_.target.logits[static_cast<std::size_t>(given_.label)]},
              {"sum_abs_probabilities", mass_},
              {"soft_nll", soft_.loss},
              {"share", oracle_.oracle().factor()},
              {"loss_grad", oracle_.oracle().upstream(values_.row)}};
    }

    void set_wrong(std::string_view kernel, WrongRow& out) const override {
      double sum = 0;
      std::vector<double> target = target_;
      if (kernel == "sum_taken_as_one") {  // p for p times the sum of c q
        for (const double q : target) sum += q;
        sum = 1 - sum;
        std::fill(target.begin(), target.end(), 0);
      } else {
        OracleRow::set_wrong(kernel, out);
        const double excess = class_excess() * share();
        for (std::size_t j = 0; j < target.size(); ++j) {
          const auto column = static_cast<std::int64_t>(j);
          target[j] = softmax_.is_allowed(column) ? class_weight(j) * excess : 0;
          sum += target[j];
          if (target[j] == 0) continue;
          const double log_p = (softmax_.logits_z()[j] - softmax_.max()) - softmax_.log_sum();
          out.loss -= oracle_.oracle().token_weight(values_.row) * target[j] * log_p;
        }
      }
      for (std::size_t j = 0; j < out.gradient.size(); ++j) {
        const auto column = static_cast<std::int64_t>(j);
        out.gradient[j] = oracle_.factor(values_.row) * (sum * softmax_.p(column) - target[j]) * softmax_.dz_dx(column);
      }
    }

   private:
    double class_weight(std::size_t column) const {
      const std::vector<double>& weights = oracle_.tensors().class_weights;
      return weights.empty() ? 1 : weights[column];
    }
    double share() const { return oracle_.smoothing_ / static_cast<double>(softmax_.classes()); }

    // c_j q'_j
    void set_target() {
      const std::span<const double> probs = given_.target.logits;
      target_.resize(probs.size());
      for (std::size_t j = 0; j < probs.size(); ++j) {
        const bool is_class = softmax_.is_allowed(static_cast<std::int64_t>(j));
        target_[j] = class_weight(j) * ((1 - oracle_.smoothing_) * probs[j] + (is_class ? share() : 0));
      }
    }

    // sum |c q' log p|, and what rounds lse and blurs z.
    double output_magnitude() {
      double magnitude = 0;
      mass_ = 0;
      for (std::size_t j = 0; j < target_.size(); ++j) {
        const double log_p = (softmax_.logits_z()[j] - softmax_.max()) - softmax_.log_sum();
        mass_ += std::fabs(target_[j]);
        if (target_[j] != 0 && std::isfinite(log_p)) magnitude += std::fabs(target_[j] * log_p);
      }
      return magnitude + (4 + size_of_z(softmax_) + 2 * kMagnitudeOfError * values_.error_of_z) * mass_;
    }

    const ProbabilitiesOracle& oracle_;
    oracle::SoftmaxRow softmax_;
    oracle::SoftLabelsRow soft_;
    std::vector<double> target_;
    double mass_ = 0;  // sum |c q'|
  };

  const double smoothing_;
};

}  // namespace

std::unique_ptr<Oracle> make_soft_cross_entropy(const Function& function, OracleTensors tensors) {
  return std::make_unique<ProbabilitiesOracle>(*static_cast<const tileloss_soft_cross_entropy_options*>(function.options()),
                                               std::move(tensors));
}

}  // namespace tileloss::tools
