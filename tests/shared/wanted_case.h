// Test cases for functions whose target is more than a label: class probabilities, or some columns of a teacher. A
// LogitsCase for the logits, and guarded buffers for what is wanted; judged by the oracle and the error metric.
#pragma once

#include <vector>

#include "tests/shared/logits_case.h"

namespace tileloss::test {

struct SoftLabelSpec {
  LogitsCaseSpec row;
  oracle::NumberFormat probs_format = oracle::NumberFormat::kFloat32;
  std::int64_t stride_extra = 0;
  double zeros = 0.3;  // share of the columns with probability 0
};

class SoftLabelCase {
 public:
  explicit SoftLabelCase(const SoftLabelSpec& spec);
  LogitsCase& row() { return row_; }
  const LogitsCase& row() const { return row_; }
  tileloss_args& args() { return row_.args(); }
  void set_prob(std::int64_t row, std::int64_t column, double value);
  CheckResult check(const tileloss_soft_cross_entropy_options& options) const;

 private:
  double prob(std::int64_t row, std::int64_t column) const;

  const SoftLabelSpec spec_;
  LogitsCase row_;
  GuardBuffer probs_;
};

struct SparseTeacherSpec {
  LogitsCaseSpec row;        // extra_outputs: those of the pair too
  std::int64_t columns = 5;  // K, at most the valid columns
  bool int32_ids = false;
  bool has_gaps = false;       // an id in five is negative
  bool is_transposed = false;  // ids and log q lie as [K,N]
  double teacher_std = 2;
};

class SparseTeacherCase {
 public:
  explicit SparseTeacherCase(const SparseTeacherSpec& spec);
  // To be sealed by the caller, once other logits and log q are set.
  struct Open {};
  SparseTeacherCase(const SparseTeacherSpec& spec, Open);
  std::int64_t id(std::int64_t row, std::int64_t k) const { return ids_[at(row, k)]; }
  void set_log_q(std::int64_t row, std::int64_t k, double value);
  LogitsCase& row() { return row_; }
  const LogitsCase& row() const { return row_; }
  tileloss_args& args() { return row_.args(); }
  CheckResult check(const tileloss_sparse_distillation_options& options) const;

 private:
  std::size_t at(std::int64_t row, std::int64_t k) const;
  void make_teacher();

  const SparseTeacherSpec spec_;
  LogitsCase row_;
  std::vector<std::int64_t> ids_;
  std::vector<double> log_q_;
  GuardBuffer id_buffer_, log_q_buffer_;
};

}  // namespace tileloss::test
