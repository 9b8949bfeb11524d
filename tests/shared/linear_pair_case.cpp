#include "tests/shared/linear_pair_case.h"

#include <cmath>

#include "check/distillation_oracle_case.h"
#include "check/linear_pair.h"
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
  const LogitsCase& row_case = student_.row();
  const tileloss_args& args = student_.args();
  const auto rows = static_cast<std::size_t>(student_.spec().row.rows);
  const auto copy = [](std::span<const double> values) { return std::vector<double>(values.begin(), values.end()); };
  const tools::DistillationOracleCase oracle_case(make_oracle_options(options),
                                                  {row_case.labels().begin(), row_case.labels().end()},
                                                  copy(row_case.token_weights()), copy(row_case.loss_grad()));
  const reference::DistillationOptions& oracle_options = oracle_case.options();
  const reference::Distillation& oracle = oracle_case.oracle();
  const bool per_row = oracle_options.reduction == reference::Reduction::kNone;
  std::vector<Row> teacher_rows(rows);
  for_each_linear_row(teacher().operands(), teacher().norms(), student_.used_rows(), [&](const tools::LinearRow& row) {
    teacher_rows[static_cast<std::size_t>(row.row)] = {{row.logits.begin(), row.logits.end()}, row.output_error};
  });
  tools::OutputMetric loss("loss"), divergence("divergence"), entropy("teacher_entropy");
  std::vector<double> losses(rows), magnitudes(rows);
  tools::PairRow pair;
  const auto check_row = [&](const auto& at, const auto&, auto& gradient) {
    const auto i = static_cast<std::size_t>(at.row);
    const Row& other = teacher_rows[i];
    pair.compute(oracle_options, at.logits, other.logits, row_case.labels()[i]);
    tools::LinearRow teacher_row;
    teacher_row.output_error = other.error;
    const tools::LinearPairErrors errors(oracle_options, pair, at, teacher_row);
    const double magnitude = errors.output_magnitude();
    losses[i] = oracle_case.row_loss(at.row, pair);
    magnitudes[i] = errors.loss_magnitude(oracle_case.row_magnitude(at.row, pair));
    if (present(args.divergence)) {
      divergence.add(at.row, output_at(args.divergence, at.row), pair.expected().divergence, magnitude);
      entropy.add(at.row, output_at(args.teacher_entropy, at.row), pair.expected().teacher_entropy, magnitude);
    }
    oracle_case.row_gradient(at.row, pair, gradient);
    errors.set_blur(gradient);
  };
  reference::Transform of_logp = oracle_options.student;
  if (!std::isnan(oracle_options.label_temperature)) of_logp.temperature = oracle_options.label_temperature;
  CheckResult result = student_.check(oracle_options.student, check_row, of_logp);
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
    loss.add(-1, output_at(args.loss, 0), oracle.reduce(losses), oracle_case.reduce_magnitude(magnitude));
  }
  append(loss.gates());
  return result;
}

}  // namespace tileloss::test
