// distillation: a student's row beside its teacher's.
//
// The budgets are the metric's (judge/gates/error_metric.h), in terms of both rows:
//   gradient   |z - m| of both sides count for a column; where terms p g and p mean(g) all but cancel, as in the surest column,
//              each of them is a term (a sure label's column is made without that), with every logarithm of a ratio counted as
//              two.
//   outputs    the magnitude of the divergence, the teacher's entropy and the loss: sum (p + q)(|log p| + |log q|), and with a
//              transform what z is rounded by; where the label has a temperature of its own, its logarithm's magnitude too.
//   LM heads   what float32 sums over H may get wrong in either side's logits comes to both.
#include <cmath>

#include "judge/oracles/weighted.h"
#include "oracle/divergence.h"
#include "support/oracle_options.h"

namespace tileloss::tools {
namespace {

using oracle::Divergence;
using oracle::SoftmaxRow;

double log_p(const SoftmaxRow& row, std::size_t column) { return (row.logits_z()[column] - row.max()) - row.log_sum(); }

double size_of_log(const SoftmaxRow& row, std::size_t column) {
  const double log = row.logits_z()[column] - (row.max() + row.log_sum());
  return std::isfinite(log) ? std::fabs(log) : 0;
}

class PairRow : public DivergenceRow {
 public:
  using DivergenceRow::DivergenceRow;

  const OracleValues& compute(const GivenRow& given) override {
    teacher_.compute(oracle::teacher_transform(options_), given.target.logits, given.label, given.allowed);
    row_.compute(options_, given.logits.logits, given.target.logits, given.label, given.allowed);
    start_row(given);
    const double magnitude = set_budget();
    const double teacher_error = error_of_z(teacher_, given.target);
    if (given.logits.errors.empty()) masses_.clear();
    finish(magnitude, teacher_error, masses_);
    values_.is_agreement_open = is_argmax_open(student(), values_.error_of_z) || is_argmax_open(teacher_, teacher_error);
    add_mean_magnitude();
    set_reference();
    return values_;
  }

  void set_wrong(std::string_view kernel, WrongRow& out) const override {
    const double factor = divergence_factor(), beta = options_.beta;
    std::vector<double>& dz = out.gradient;
    if (kernel == "mean_dropped") {
      const double mean = mean_slope();
      for (std::size_t j = 0; j < dz.size(); ++j) dz[j] = factor * square() * p(j) * mean;
    } else if (kernel == "mixture_forgotten" && options_.divergence == Divergence::kSkewReverseKl) {
      // sum p log(p/m) by z, m = beta p + (1 - beta) q held fixed, less the same with its derivative: beta p (p/m - sum p^2/m).
      std::vector<double> terms(dz.size());
      double mean = 0;
      for (std::size_t j = 0; j < dz.size(); ++j) {
        const double m = beta * p(j) + (1 - beta) * teacher_.p(static_cast<std::int64_t>(j));
        terms[j] = m > 0 ? p(j) / m : 0;
        mean += p(j) * terms[j];
      }
      for (std::size_t j = 0; j < dz.size(); ++j) dz[j] = factor * square() * beta * p(j) * (terms[j] - mean);
    } else if (kernel == "mixture_forgotten") {
      std::vector<double> magnitude(dz.size());
      row_.add_divergence_gradient(factor * (1 / (1 - beta) - 1), dz, magnitude);
    } else {
      return DivergenceRow::set_wrong(kernel, out);
    }
    for (std::size_t j = 0; j < dz.size(); ++j) dz[j] *= student().dz_dx(static_cast<std::int64_t>(j));
  }

 private:
  const SoftmaxRow& student() const { return row_.student(); }
  double p(std::size_t column) const { return student().p(static_cast<std::int64_t>(column)); }
  std::pair<std::string, double> own_term() const override { return {"teacher_lse", row_.outputs().teacher_lse}; }

  double set_budget() {
    const SoftmaxRow& wider = wider_row();
    const double own = size_of_z(student()), other = size_of_z(teacher_);
    others_distance_ = others_distance(wider) + others_distance(teacher_);
    max_ = std::fabs(wider.max()) + other;
    double magnitude = 4 + std::fmin(own + other, 1e5) / 4 + label_magnitude();
    mean_magnitude_ = 0;
    z_.clear();
    logs_.clear();
    masses_.clear();
    for (std::size_t j = 0; j < student().logits_z().size(); ++j) {
      const double behind = std::fabs(wider.max() - wider.logits_z()[j]) + std::fabs(teacher_.max() - teacher_.logits_z()[j]);
      z_.push_back(max_ - (std::isfinite(behind) ? behind : kExpRange));
      logs_.push_back(size_of_log(student(), j) + size_of_log(teacher_, j));
      const double q = teacher_.p(static_cast<std::int64_t>(j));
      masses_.push_back(p(j) + q);
      if (std::isfinite(p(j))) mean_magnitude_ += p(j) * logs_.back();
      if (std::isfinite(p(j)) && std::isfinite(q)) magnitude += (p(j) + q) * logs_.back();
    }
    return magnitude;
  }

  void add_mean_magnitude() {
    if (options_.divergence == Divergence::kForwardKl) return;
    std::vector<double>& magnitude = values_.gradient.magnitude;
    for (std::size_t j = 0; j < magnitude.size(); ++j) {
      const auto column = static_cast<std::int64_t>(j);
      if (column == given_.label && p(j) > 0.5) continue;
      const double terms =
          std::fabs(divergence_factor()) * square() * p(j) * student().dz_dx(column) * (2 + logs_[j] + mean_magnitude_);
      magnitude[j] = std::fmax(magnitude[j], terms);
    }
  }

  void set_reference() {
    const oracle::GradientRow& gradient = values_.gradient;
    values_.reference = {.gradient = gradient.gradient,
                         .magnitude = gradient.magnitude,
                         .blur = gradient.blur,
                         .z = z_,
                         .max = max_,
                         .scale = gradient.scale,
                         .transformed = is_transformed() || !teacher_.transform().is_identity(),
                         .target = given_.label,
                         .allowed = student().allowed(),
                         .others_distance = others_distance_};
  }

  // sum p g, where the gradient by z is p (g - sum p g).
  double mean_slope() const {
    oracle::Classes classes;
    classes.resize(student().logits_z().size());
    for (std::size_t j = 0; j < classes.size(); ++j) classes.set(j, log_p(student(), j), log_p(teacher_, j));
    oracle::DivergenceSlopes slopes;
    oracle::divergence_slopes(options_.divergence, options_.beta, classes, slopes);
    return slopes.slope_sum;
  }

  SoftmaxRow teacher_;
  double max_ = 0;              // of both rows, as far as rounding z counts
  std::vector<double> z_;       // as far below it as float32's errors in log p and in log q allow for
  double others_distance_ = 0;  // the same of the others together
  std::vector<double> logs_;    // |log p| + |log q| of each column, as far as the column counts
  std::vector<double> masses_;
  double mean_magnitude_ = 0;  // of the mean in the gradient
};

class DistillationOracle : public WeightedOracle {
 public:
  using WeightedOracle::WeightedOracle;
  std::unique_ptr<OracleRow> new_row() const override { return std::make_unique<PairRow>(*this); }
};

}  // namespace

std::unique_ptr<Oracle> make_distillation(const Function& function, OracleTensors tensors) {
  const auto& options = *static_cast<const tileloss_distillation_options*>(function.options());
  return std::make_unique<DistillationOracle>(make_oracle_options(options), std::move(tensors));
}

}  // namespace tileloss::tools
