#include "tests/shared/pair_case.h"

#include <cmath>
#include <vector>

#include "check/distillation_oracle_case.h"
#include "tests/shared/row_output_check.h"

namespace tileloss::test {
namespace {

LogitsCaseSpec teacher_spec(const PairCaseSpec& spec) {
  LogitsCaseSpec teacher = spec.student;
  teacher.distribution = spec.teacher_is_student ? spec.student.distribution : spec.teacher_distribution;
  teacher.seed = spec.teacher_is_student ? spec.student.seed : spec.student.seed + 7919;
  teacher.stride_extra = spec.teacher_stride_extra;
  teacher.loss = teacher.row_outputs = teacher.extra_outputs = teacher.dlogits = teacher.in_place = false;
  teacher.token_weights = false;
  teacher.loss_grad = Upstream::kAbsent;
  return teacher;
}

}  // namespace

PairCase::PairCase(const PairCaseSpec& spec) : student_(spec.student), teacher_(teacher_spec(spec)) { make_outputs(spec); }
PairCase::PairCase(const PairCaseSpec& spec, Open)
    : student_(spec.student, LogitsCase::Open{}), teacher_(teacher_spec(spec), LogitsCase::Open{}) {
  make_outputs(spec);
}

void PairCase::make_outputs(const PairCaseSpec& spec) {
  tileloss_args& args = student_.args();
  args.teacher_logits = teacher_.args().logits;
  if (!spec.student.extra_outputs) return;
  const auto make = [&](tileloss_dtype dtype, std::size_t bytes) {
    outputs_.emplace_back(static_cast<std::size_t>(spec.student.rows) * bytes, Flush::kRight, 0);
    return tileloss_make_vector(outputs_.back().data(), dtype, spec.student.rows);
  };
  args.divergence = make(TILELOSS_FLOAT32, sizeof(float));
  args.teacher_entropy = make(TILELOSS_FLOAT32, sizeof(float));
  args.agreement = make(TILELOSS_UINT8, 1);
}

void PairCase::set_logits(std::int64_t row, std::int64_t column, double student, double teacher) {
  student_.set_logit(row, column, student);
  teacher_.set_logit(row, column, teacher);
}

void PairCase::seal() {
  student_.seal();
  teacher_.seal();
}

CheckResult check_distillation(const PairCase& c, const tileloss_distillation_options& options) {
  const LogitsCase& student = c.student();
  const LogitsCaseSpec& spec = student.spec();
  const tileloss_args& args = c.args();
  const auto copy = [](std::span<const double> values) { return std::vector<double>(values.begin(), values.end()); };
  const tools::DistillationOracleCase oracle_case(make_oracle_options(options),
                                                  {student.labels().begin(), student.labels().end()},
                                                  copy(student.token_weights()), copy(student.loss_grad()));
  const bool per_row = oracle_case.options().reduction == reference::Reduction::kNone;
  RowOutputCheck outputs(args);
  tools::OutputMetric loss_metric("loss"), divergence_metric("divergence"), entropy_metric("teacher_entropy");
  tools::ExactMetric agreement_metric("agreement");
  tools::GradientMetric gradient_metric(spec.format);
  tools::PairRow pair;
  reference::GradientRow gradient;
  std::vector<double> losses;
  double magnitude_sum = 0;
  for (std::int64_t i = 0; i < spec.rows; ++i) {
    const bool ignored = oracle_case.oracle().is_ignored(i);
    if (!ignored) {
      const std::int64_t label = student.labels()[static_cast<std::size_t>(i)];
      pair.compute(oracle_case.options(), student.logits_row(i), c.teacher().logits_row(i), label);
    }
    const tools::ExpectedRow wanted = ignored ? tools::ExpectedRow{} : pair.expected();
    const double magnitude = ignored ? 0 : pair.output_magnitude();
    outputs.add(i, ignored ? nullptr : &pair.student(), nullptr, &pair.values().at_label_temperature());
    if (present(args.divergence)) divergence_metric.add(i, output_at(args.divergence, i), wanted.divergence, magnitude);
    if (present(args.teacher_entropy)) {
      entropy_metric.add(i, output_at(args.teacher_entropy, i), wanted.teacher_entropy, magnitude);
      const bool is_open = !ignored && pair.is_agreement_open();
      if (!is_open) agreement_metric.add(i, static_cast<const std::uint8_t*>(args.agreement.data)[i], wanted.agreement ? 1 : 0);
    }
    losses.push_back(ignored ? 0.0 : oracle_case.row_loss(i, pair));
    const double loss_magnitude = ignored ? 0.0 : oracle_case.row_magnitude(i, pair);
    magnitude_sum += loss_magnitude;
    if (present(args.loss) && per_row) loss_metric.add(i, output_at(args.loss, i), losses.back(), loss_magnitude);
    if (!spec.dlogits) continue;
    if (ignored) {
      gradient_metric.add_ignored_row(i, student.dlogits_row(i), spec.vocab);
      continue;
    }
    oracle_case.row_gradient(i, pair, gradient);
    gradient_metric.add_row(i, student.dlogits_row(i), spec.vocab, pair.reference(gradient));
  }
  if (present(args.loss) && !per_row) {
    loss_metric.add(-1, output_at(args.loss, 0), oracle_case.oracle().reduce(losses),
                    oracle_case.reduce_magnitude(magnitude_sum));
  }
  CheckResult result;
  const auto append = [&](const std::vector<tools::Gate>& gates) {
    result.gates.insert(result.gates.end(), gates.begin(), gates.end());
  };
  if (present(args.loss)) append(loss_metric.gates());
  if (present(args.divergence)) append(divergence_metric.gates());
  if (present(args.teacher_entropy)) append(entropy_metric.gates());
  if (present(args.teacher_entropy)) append(agreement_metric.gates());
  outputs.append_gates(result.gates);
  if (spec.dlogits) append(gradient_metric.gates());
  result.mistrusted = spec.dlogits && gradient_metric.mistrusted();
  result.gates.push_back(tools::make_gate("surroundings_written", c.student().surroundings_intact() ? 0.0 : 1.0, 0.0));
  return result;
}

}  // namespace tileloss::test
