#include "tests/shared/pair_case.h"

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
  if (spec.student.extra_outputs) student_.add_divergence_outputs();
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
  const tools::Function function("distillation", &options);
  return check_stored_rows(c.student(), function, *make_distillation(function, c.student().oracle_tensors()),
                           [&](std::int64_t row) {
                             return TargetValues{c.teacher().logits_row(row), {}};
                           });
}

}  // namespace tileloss::test
