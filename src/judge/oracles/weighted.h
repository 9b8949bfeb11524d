// What the oracles of distillation, of a teacher's columns and of class probabilities have in common: rows that are weighed and
// reduced as oracle::Distillation says; and the rows of the two that have a divergence.
#pragma once

#include <cmath>

#include "judge/oracles/oracle.h"
#include "oracle/distillation.h"

namespace tileloss::tools {

class WeightedOracle : public Oracle {
 public:
  WeightedOracle(const oracle::DistillationOptions& options, OracleTensors tensors);

  double reduce(std::span<const oracle::RowLoss> losses) const override;
  double reduce_magnitudes(std::span<const oracle::RowLoss> magnitudes) const override;
  double loss_upstream(std::int64_t row) const override { return oracle_.upstream(row); }

  const oracle::DistillationOptions& options() const { return oracle_.options(); }
  const oracle::Distillation& oracle() const { return oracle_; }
  const OracleTensors& tensors() const { return tensors_; }
  // What a row's own gradient is multiplied by.
  double factor(std::int64_t row) const { return oracle_.upstream(row) * oracle_.token_weight(row) * oracle_.factor(); }
  // The magnitude of a row's loss, given what it is without its weight.
  double loss_magnitude(std::int64_t row, double magnitude) const;

 private:
  const OracleTensors tensors_;
  const oracle::Distillation oracle_;
};

// Under a transform z is rounded itself: its size, as far as that counts.
double size_of_z(const oracle::SoftmaxRow& row);
// Whether a saturated softcap, or errors of z, may have made another column the largest.
bool is_argmax_open(const oracle::SoftmaxRow& row, double error_of_z);

// A student's row beside a teacher's, whole or some of its columns. The budgets of the outputs are made of one magnitude, which
// the derived row says: of the divergence, the teacher's entropy and the loss.
class DivergenceRow : public OracleRow {
 public:
  explicit DivergenceRow(const WeightedOracle& oracle) : oracle_(oracle), options_(oracle.options()) {}
  std::vector<std::pair<std::string, double>> terms() const override;
  void set_wrong(std::string_view kernel, WrongRow& difference) const override;

 protected:
  // Once row_ is computed; the student's row at its own or at the label's temperature, whichever z lie further apart.
  void start_row(const GivenRow& given) { start(given, row_.student(), row_.at_label_temperature()); }
  const oracle::SoftmaxRow& wider_row() const { return row_.label_ratio() > 1 ? row_.at_label_temperature() : row_.student(); }
  // Whether z is rounded at either temperature.
  bool is_transformed() const {
    return !row_.student().transform().is_identity() || !row_.at_label_temperature().transform().is_identity();
  }
  // 0 where the label has no temperature of its own; else what float32 may get wrong in its logarithm.
  double label_magnitude() const;
  // `teacher_error`: of its z. `masses`: of each column, of what an error that all z share moves the gradient by; empty: nothing.
  void finish(double magnitude, double teacher_error, std::span<const double> masses);
  double square() const;  // what the divergence is multiplied by
  // Of the divergence's gradient, by the logits.
  double divergence_factor() const { return oracle_.factor(values_.row) * options_.divergence_weight; }
  virtual std::pair<std::string, double> own_term() const = 0;

  const WeightedOracle& oracle_;
  const oracle::DistillationOptions& options_;
  oracle::DistillationRow row_;
};

}  // namespace tileloss::tools
