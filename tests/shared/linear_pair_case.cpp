#include "tests/shared/linear_pair_case.h"

#include <vector>

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
  teacher.rank = 0;
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
  if (spec.student.row.extra_outputs) student_.row().add_divergence_outputs();
}

CheckResult LinearPair::check(const tileloss_distillation_options& options) const {
  std::vector<Row> rows(static_cast<std::size_t>(student_.spec().row.rows));
  for_each_linear_row(teacher().operands(), teacher().norms(), student_.used_rows(), [&](const tools::LogitsRow& row) {
    rows[static_cast<std::size_t>(row.row)] = {{row.logits.begin(), row.logits.end()}, row.output_error};
  });
  const tools::Function function("distillation", &options);
  return student_.check(*make_distillation(function, student_.row().oracle_tensors()), [&](tools::GivenRow& given) {
    const Row& teacher_row = rows[static_cast<std::size_t>(given.logits.row)];
    given.target = {.row = given.logits.row, .logits = teacher_row.logits, .output_error = teacher_row.error};
  });
}

}  // namespace tileloss::test
