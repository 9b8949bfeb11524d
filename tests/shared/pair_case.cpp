#include "tests/shared/pair_case.h"

#include <cmath>
#include <optional>

#include "tests/shared/row_output_check.h"

namespace tileloss::test {
namespace {

double number(const tileloss_scalar& scalar) {
  return scalar.pointer != nullptr ? static_cast<double>(*scalar.pointer) : scalar.value;
}

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

// No weight, no error: 0 is held to this, as nothing divided by nothing would not be a verdict.
constexpr double kTiny = 0x1p-100;

// Under a transform z is rounded itself.
double size_of_z(const reference::SoftmaxRow& row) {
  const bool counts = !row.transform().is_identity() && std::isfinite(row.max());
  return counts ? std::fabs(row.max()) : 0;
}

double size_of_log(const reference::SoftmaxRow& row, std::size_t j) {
  const double log = row.logits_z()[j] - row.outputs().lse;
  return std::isfinite(log) ? std::fabs(log) : 0;
}

}  // namespace

PairBudget::PairBudget(const reference::SoftmaxRow& student, const reference::SoftmaxRow& teacher) {
  const double own = size_of_z(student), other = size_of_z(teacher);
  others_distance = tools::others_distance(student) + tools::others_distance(teacher);
  max = std::fabs(student.max()) + other;
  for (std::size_t j = 0; j < student.logits_z().size(); ++j) {
    const double behind = std::fabs(student.max() - student.logits_z()[j]) + std::fabs(teacher.max() - teacher.logits_z()[j]);
    z.push_back(max - (std::isfinite(behind) ? behind : tools::kExpRange));
    const double p = student.p(static_cast<std::int64_t>(j)), q = teacher.p(static_cast<std::int64_t>(j));
    logs.push_back(size_of_log(student, j) + size_of_log(teacher, j));
    if (std::isfinite(p)) mean_magnitude += p * logs.back();
    if (std::isfinite(p) && std::isfinite(q)) output_magnitude += (p + q) * logs.back();
  }
  output_magnitude += std::fmin(own + other, 1e5) / 4;
}

void PairBudget::widen(const reference::DistillationOptions& options, const reference::SoftmaxRow& student, double factor,
                       std::vector<double>& magnitude) const {
  if (options.divergence == reference::Divergence::kForwardKl) return;
  for (std::size_t j = 0; j < logs.size(); ++j) {
    const auto column = static_cast<std::int64_t>(j);
    if (column == student.label() && student.p(column) > 0.5) continue;
    const double naive = factor * student.p(column) * student.dz_dx(column) * (2 + logs[j] + mean_magnitude);
    magnitude[j] = std::fmax(magnitude[j], naive);
  }
}

reference::DistillationOptions make_oracle_options(const tileloss_distillation_options& options) {
  reference::DistillationOptions oracle;
  oracle.divergence = static_cast<reference::Divergence>(options.divergence);
  oracle.beta = options.beta;
  oracle.student = make_transform(options.logit);
  oracle.teacher = oracle.student;
  oracle.teacher.logit_scale = options.teacher_logit_scale;
  oracle.teacher.softcap = options.teacher_softcap;
  if (!std::isnan(number(options.teacher_temperature))) oracle.teacher.temperature = number(options.teacher_temperature);
  oracle.scale_by_temperature_squared = options.scale_by_temperature_squared != 0;
  oracle.alpha = number(options.alpha);
  oracle.num_items = number(options.num_items);
  oracle.ignore_index = options.logit.ignore_index;
  oracle.reduction = options.reduction == TILELOSS_REDUCTION_NONE  ? reference::Reduction::kNone
                     : options.reduction == TILELOSS_REDUCTION_SUM ? reference::Reduction::kSum
                                                                   : reference::Reduction::kMean;
  return oracle;
}

double divergence_factor(const reference::DistillationOptions& options) {
  return options.scale_by_temperature_squared ? options.student.temperature * options.student.temperature : 1.0;
}

bool is_argmax_open(const reference::SoftmaxRow& row) {
  int candidates = 0;
  for (const double z : row.logits_z()) candidates += z >= row.max() - 1e-5 * (1 + std::fabs(row.max())) ? 1 : 0;
  return candidates > 1 && !row.transform().is_identity();
}

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
  const reference::DistillationOptions oracle_options = make_oracle_options(options);
  const LogitsCaseSpec& spec = c.student().spec();
  const tileloss_args& args = c.args();
  const reference::Distillation oracle(oracle_options, spec.rows, c.student().labels(), c.student().token_weights(),
                                       c.student().loss_grad());
  reference::Transform teacher_transform = oracle_options.teacher;
  const bool per_row = oracle_options.reduction == reference::Reduction::kNone;
  RowOutputCheck outputs(args);
  tools::OutputMetric loss_metric("loss"), divergence_metric("divergence"), entropy_metric("teacher_entropy");
  tools::ExactMetric agreement_metric("agreement");
  tools::GradientMetric gradient_metric(spec.format);
  reference::DistillationRow row;
  reference::SoftmaxRow student, teacher;
  reference::DistillationGradient gradient;
  std::vector<double> losses, magnitudes;
  for (std::int64_t i = 0; i < spec.rows; ++i) {
    const bool ignored = oracle.is_ignored(i);
    const std::int64_t label = c.student().labels()[static_cast<std::size_t>(i)];
    double magnitude = 0;
    std::optional<PairBudget> budget;
    if (!ignored) {
      const std::vector<double> logits = c.student().logits_row(i), teacher_logits = c.teacher().logits_row(i);
      student.compute(oracle_options.student, logits, label);
      teacher.compute(teacher_transform, teacher_logits, label);
      row.compute(oracle_options, logits, teacher_logits, label);
      budget.emplace(student, teacher);
      magnitude = budget->output_magnitude;
    }
    const reference::DistillationOutputs wanted = ignored ? reference::DistillationOutputs{} : row.outputs();
    outputs.add(i, ignored ? nullptr : &student);
    const double squared = divergence_factor(oracle_options);
    if (present(args.divergence)) divergence_metric.add(i, output_at(args.divergence, i), wanted.divergence / squared, magnitude);
    if (present(args.teacher_entropy)) {
      entropy_metric.add(i, output_at(args.teacher_entropy, i), wanted.teacher_entropy, magnitude);
      const bool is_open = !ignored && (is_argmax_open(student) || is_argmax_open(teacher));
      if (!is_open) agreement_metric.add(i, static_cast<const std::uint8_t*>(args.agreement.data)[i], wanted.agreement ? 1 : 0);
    }
    losses.push_back(ignored ? 0.0 : oracle.row_loss(i, row));
    magnitudes.push_back(ignored ? 0.0 : std::fmax(magnitude * squared * std::fabs(oracle.token_weight(i)), kTiny));
    if (present(args.loss) && per_row) loss_metric.add(i, output_at(args.loss, i), losses.back(), magnitudes.back());
    if (!spec.dlogits) continue;
    if (ignored) {
      gradient_metric.add_ignored_row(i, c.student().dlogits_row(i), spec.vocab);
      continue;
    }
    oracle.row_gradient(i, row, gradient);
    const auto valid = static_cast<std::size_t>(c.student().valid_columns());
    const double factor =
        std::fabs(oracle.upstream(i) * oracle.token_weight(i) * oracle.factor() * (1 - oracle_options.alpha)) * squared;
    budget->widen(oracle_options, student, factor, gradient.magnitude);
    gradient_metric.add_row(i, c.student().dlogits_row(i), spec.vocab,
                            {.gradient = std::span<const double>(gradient.dlogits).first(valid),
                             .magnitude = std::span<const double>(gradient.magnitude).first(valid),
                             .blur = {},
                             .z = budget->z,
                             .max = budget->max,
                             .scale = student.dz_dx(0) * std::fabs(oracle.upstream(i) * oracle.token_weight(i) * oracle.factor()),
                             .transformed = !oracle_options.student.is_identity() || !teacher_transform.is_identity(),
                             .target = label,
                             .others_distance = budget->others_distance});
  }
  if (present(args.loss) && !per_row) {
    double magnitude = 0;
    for (const double m : magnitudes) magnitude += m;
    loss_metric.add(-1, output_at(args.loss, 0), oracle.reduce(losses), std::fmax(magnitude * oracle.factor(), kTiny));
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
