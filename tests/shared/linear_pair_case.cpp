#include "tests/shared/linear_pair_case.h"

#include <cmath>

#include "tests/shared/pair_case.h"
#include "tests/shared/row_output_check.h"

namespace tileloss::test {
namespace {

LinearCaseSpec teacher_spec(const LinearPairSpec& spec) {
  LinearCaseSpec teacher = spec.student;
  teacher.row = {.rows = spec.student.row.rows,
                 .vocab = spec.student.row.vocab,
                 .valid_vocab = spec.student.row.valid_vocab,
                 .misalignment = spec.student.row.misalignment,
                 .flush = spec.student.row.flush,
                 .seed = spec.student.row.seed + 7919,
                 .loss = false,
                 .row_outputs = false,
                 .dlogits = false};
  teacher.hidden = spec.teacher_hidden;
  teacher.hidden_layout = teacher.head_layout = spec.teacher_layout;
  teacher.logit_std = spec.teacher_logit_std;
  teacher.label_logit = 0;
  teacher.bias = spec.teacher_bias;
  teacher.dhidden = teacher.dhead = teacher.dbias = false;
  return teacher;
}

struct Row {
  std::vector<double> logits;
  double error = 0;
};

}  // namespace

LinearPair::LinearPair(const LinearPairSpec& spec)
    : student_(spec.student), teacher_(teacher_spec(spec)), is_student_(spec.teacher_is_student) {
  tileloss_args& args = student_.args();
  args.teacher_hidden = teacher().args().hidden;
  args.teacher_head = teacher().args().head;
  args.teacher_bias = teacher().args().bias;
  if (!spec.student.row.extra_outputs) return;
  const auto make = [&](tileloss_dtype dtype, std::size_t bytes) {
    outputs_.emplace_back(static_cast<std::size_t>(spec.student.row.rows) * bytes, Flush::kRight, 0);
    return tileloss_make_vector(outputs_.back().data(), dtype, spec.student.row.rows);
  };
  args.divergence = make(TILELOSS_FLOAT32, sizeof(float));
  args.teacher_entropy = make(TILELOSS_FLOAT32, sizeof(float));
}

CheckResult LinearPair::check(const tileloss_distillation_options& options) const {
  const reference::DistillationOptions oracle_options = make_oracle_options(options);
  const LogitsCase& row_case = student_.row();
  const tileloss_args& args = student_.args();
  const auto rows = static_cast<std::size_t>(student_.spec().row.rows);
  const reference::Distillation oracle(oracle_options, student_.spec().row.rows, row_case.labels(), row_case.token_weights(),
                                       row_case.loss_grad());
  const bool per_row = oracle_options.reduction == reference::Reduction::kNone;
  const double squared = divergence_factor(oracle_options);
  std::vector<Row> teacher_rows(rows);
  for_each_linear_row(teacher().operands(), teacher().norms(), student_.used_rows(), [&](const tools::LinearRow& row) {
    teacher_rows[static_cast<std::size_t>(row.row)] = {{row.logits.begin(), row.logits.end()}, row.output_error};
  });
  tools::OutputMetric loss("loss"), divergence("divergence"), entropy("teacher_entropy");
  std::vector<double> losses(rows), magnitudes(rows);
  reference::SoftmaxRow teacher_softmax;
  reference::DistillationRow values;
  reference::DistillationGradient of_row;
  CheckResult result = student_.check(oracle_options.student, [&](const auto& at, const auto& softmax, auto& gradient) {
    const auto i = static_cast<std::size_t>(at.row);
    const std::int64_t label = row_case.labels()[i];
    const Row& other = teacher_rows[i];
    teacher_softmax.compute(oracle_options.teacher, other.logits, label);
    values.compute(oracle_options, at.logits, other.logits, label);
    const PairBudget budget(softmax, teacher_softmax);
    const double slope = std::fabs(oracle_options.teacher.logit_scale / oracle_options.teacher.temperature);
    const double error = output_error_of_z(softmax, at) + slope * other.error;
    const double magnitude = budget.output_magnitude + tools::kMagnitudeOfError * error * (2 + budget.output_magnitude);
    losses[i] = oracle.row_loss(at.row, values);
    magnitudes[i] = magnitude * squared * std::fabs(oracle.token_weight(at.row));
    if (present(args.divergence)) {
      divergence.add(at.row, output_at(args.divergence, at.row), values.outputs().divergence / squared, magnitude);
      entropy.add(at.row, output_at(args.teacher_entropy, at.row), values.outputs().teacher_entropy, magnitude);
    }
    oracle.row_gradient(at.row, values, of_row);
    gradient.gradient = of_row.dlogits;
    gradient.magnitude = of_row.magnitude;
    const double weight = std::fabs(oracle.upstream(at.row) * oracle.token_weight(at.row) * oracle.factor());
    const double factor = weight * (1 - oracle_options.alpha) * squared;
    budget.widen(oracle_options, softmax, factor, gradient.magnitude);
    gradient.scale = softmax.dz_dx(0) * weight;
    // An error of either side's logits is one of log p - log q.
    gradient.blur.resize(gradient.gradient.size());
    for (std::size_t j = 0; j < gradient.blur.size(); ++j) {
      const auto column = static_cast<std::int64_t>(j);
      const double mass = softmax.p(column) + teacher_softmax.p(column);
      gradient.blur[j] = factor * std::fabs(softmax.dz_dx(column)) * 4 * mass * error;
    }
  });
  for (std::int64_t i = 0; present(args.divergence) && i < student_.spec().row.rows; ++i) {
    if (oracle.is_ignored(i)) divergence.add(i, output_at(args.divergence, i), 0, 0);
  }
  const auto append = [&](const std::vector<tools::Gate>& gates) {
    result.gates.insert(result.gates.end(), gates.begin(), gates.end());
  };
  if (present(args.divergence)) append(divergence.gates());
  if (present(args.divergence)) append(entropy.gates());
  if (!present(args.loss)) return result;
  if (per_row) {
    for (std::size_t i = 0; i < rows; ++i) {
      const auto at = static_cast<std::int64_t>(i);
      loss.add(at, output_at(args.loss, at), losses[i], magnitudes[i]);
    }
  } else {
    double magnitude = 0;
    for (const double m : magnitudes) magnitude += m;
    loss.add(-1, output_at(args.loss, 0), oracle.reduce(losses), std::fmax(magnitude * oracle.factor(), 0x1p-100));
  }
  append(loss.gates());
  return result;
}

}  // namespace tileloss::test
