// sparse_distillation: a student's row beside the columns that are known of its teacher.
#include <cmath>

#include "judge/oracles/weighted.h"
#include "support/oracle_options.h"

namespace tileloss::tools {
namespace {

using oracle::Tail;

class ColumnsRow : public DivergenceRow {
 public:
  ColumnsRow(const WeightedOracle& oracle, Tail tail) : DivergenceRow(oracle), tail_(tail) {}

  const OracleValues& compute(const GivenRow& given) override {
    ids_.clear();
    log_q_.clear();
    for (std::size_t k = 0; k < given.ids.size(); ++k) {
      const std::int64_t id = given.ids[k];
      if (id < 0 || (!given.allowed.empty() && given.allowed[static_cast<std::size_t>(id)] == 0)) continue;
      ids_.push_back(id);
      log_q_.push_back(given.target.logits[k]);
    }
    row_.compute_sparse(options_, given.logits.logits, ids_, log_q_, tail_, given.label, given.allowed);
    start_row(given);
    const double magnitude = output_magnitude();
    finish(magnitude, 0, given.logits.errors.empty() ? std::vector<double>() : masses());
    values_.is_agreement_open = is_argmax_open(row_.student(), values_.error_of_z);
    std::vector<double>& of_terms = values_.gradient.magnitude;
    for (std::size_t j = 0; j < of_terms.size(); ++j) {
      const auto column = static_cast<std::int64_t>(j);
      const double share = std::fabs(divergence_factor()) * square() * row_.student().p(column);
      const double naive = share * row_.student().dz_dx(column) * magnitude;
      of_terms[j] = std::fmax(of_terms[j], std::isfinite(naive) ? naive : 0);
    }
    values_.reference = make_row_reference(wider_row(), values_.gradient);
    values_.reference.transformed = is_transformed();
    return values_;
  }

 private:
  std::pair<std::string, double> own_term() const override { return {"known_columns", static_cast<double>(ids_.size())}; }

  // Terms of logarithms, as far as their columns count.
  double output_magnitude() const {
    const oracle::SoftmaxRow& student = row_.student();
    double magnitude = 4 + size_of_z(student) + label_magnitude();  // lse is rounded to float32
    for (std::size_t k = 0; k < ids_.size(); ++k) {
      const double log_p = student.logits_z()[static_cast<std::size_t>(ids_[k])] - student.outputs().lse;
      const double of_q = std::isfinite(log_q_[k]) ? std::fabs(log_q_[k]) : 0;
      const double logs = of_q + (std::isfinite(log_p) ? std::fabs(log_p) : 0);
      const double mass = student.p(ids_[k]) + std::exp(log_q_[k]);
      if (std::isfinite(mass)) magnitude += mass * logs;
      // Relative to their own sums they count as they are.
      if (tail_ == Tail::kRenormalise) magnitude += logs;
    }
    return magnitude;
  }

  // p + q of each column, relative to the listed ones' sums where the divergence is of these; the columns that are not listed
  // have their shares of the lumped class.
  std::vector<double> masses() const {
    const oracle::SoftmaxRow& student = row_.student();
    double listed_p = 0, listed_q = 0;
    for (std::size_t k = 0; k < ids_.size(); ++k) {
      listed_p += student.p(ids_[k]);
      listed_q += std::exp(log_q_[k]);
    }
    const double rest_q = std::fmax(0, 1 - listed_q), rest_p = std::fmax(1 - listed_p, 0x1p-52);
    std::vector<double> masses;
    for (std::int64_t j = 0; j < student.vocab(); ++j) {
      masses.push_back(student.p(j) * (tail_ == Tail::kLump ? 1 + rest_q / rest_p : 1));
    }
    for (std::size_t k = 0; k < ids_.size(); ++k) {
      const double p = student.p(ids_[k]), q = std::exp(log_q_[k]);
      masses[static_cast<std::size_t>(ids_[k])] = tail_ == Tail::kRenormalise ? p / listed_p + q / listed_q : p + q;
    }
    return masses;
  }

  const Tail tail_;
  std::vector<double> log_q_;
  std::vector<std::int64_t> ids_;
};

class ColumnsOracle : public WeightedOracle {
 public:
  ColumnsOracle(const tileloss_sparse_distillation_options& options, OracleTensors tensors)
      : WeightedOracle(make_oracle_options(options), std::move(tensors)), tail_(static_cast<Tail>(options.tail)) {}
  std::unique_ptr<OracleRow> new_row() const override { return std::make_unique<ColumnsRow>(*this, tail_); }

 private:
  const Tail tail_;
};

}  // namespace

std::unique_ptr<Oracle> make_sparse_distillation(const Function& function, OracleTensors tensors) {
  return std::make_unique<ColumnsOracle>(*static_cast<const tileloss_sparse_distillation_options*>(function.options()),
                                         std::move(tensors));
}

}  // namespace tileloss::tools
