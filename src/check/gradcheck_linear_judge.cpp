// The oracle beside the functions fused with the LM head, and wrong gradients made of right ones.
#include <array>
#include <atomic>
#include <cstring>

#include "check/gradcheck_linear.h"
#include "check/gradcheck_rows.h"
#include "check/linear_pair.h"
#include "support/signals.h"
#include "support/timer.h"

namespace tileloss::tools {
namespace {

using reference::RowLoss;
using reference::StoredMatrix;

size_t index(int64_t i) { return static_cast<size_t>(i); }

StoredMatrix column(const std::vector<float>& values) {
  return {values.data(), reference::NumberFormat::kFloat32, static_cast<int64_t>(values.size()), 1, 1, 1};
}

StoredMatrix before_of(const HugeBuffer& buffer, StoredMatrix view) {
  view.data = buffer.data();
  return view;
}

struct LinearMutant {
  const char* name;
  double (*apply)(int64_t row, int64_t rows, double value);
};

// Rows of dhidden are tokens, rows of dhead and dbias classes: what is dropped are tiles of either.
constexpr int64_t kDroppedRows = 16;

constexpr std::array kLinearMutants{
    LinearMutant{"halved", [](int64_t, int64_t, double value) { return 0.5 * value; }},
    LinearMutant{"negated", [](int64_t, int64_t, double value) { return -value; }},
    LinearMutant{"first_tile_dropped", [](int64_t row, int64_t, double value) { return row < kDroppedRows ? 0 : value; }},
    LinearMutant{"last_tile_dropped",
                 [](int64_t row, int64_t rows, double value) { return row >= rows - kDroppedRows ? 0 : value; }},
};

// `rows`: those that may hold a gradient. True if a bit of one that is not NaN changed.
bool plant(const LinearMutant& mutant, const StoredMatrix& from, int64_t rows, int threads, char* to) {
  std::atomic<bool> changed = false;
  reference::split_work(threads, rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < from.cols; ++j) {
        const double value = from.at(i, j), altered = mutant.apply(i, rows, value);
        if (altered == value) continue;
        reference::encode_at(from.format, to, i * from.row_stride + j * from.col_stride, altered);
        changed = true;
      }
    }
  });
  return changed;
}

reference::LinearGradients::Wanted gradients_of(const KernelResults& results) {
  reference::LinearGradients::Wanted wanted;
  for (const CheckedGradient& gradient : results.gradients) {
    wanted.dhidden |= !gradient.dhidden.empty();
    wanted.dhead |= !gradient.dhead.empty();
    wanted.dbias |= !gradient.dbias.empty();
  }
  return wanted;
}

reference::RowOutputs linear_outputs(const reference::SoftmaxRow& softmax, const LinearRow& row, std::optional<double> argmax) {
  reference::RowOutputs outputs = softmax.outputs();
  if (argmax && linear_argmax_agrees(softmax, row, static_cast<int64_t>(*argmax))) {
    outputs.argmax = static_cast<int64_t>(*argmax);
    outputs.correct = outputs.argmax == softmax.label();
  }
  return outputs;
}

double linear_row_magnitude(const LossOracle& oracle, const reference::SoftmaxRow& softmax, const RowLoss& loss,
                            const LinearRow& row) {
  return oracle.policy() != nullptr ? oracle.row_magnitude(row.row, {softmax}, loss) : linear_loss_magnitude(softmax, loss, row);
}

double sum_of_squares(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return sum;
}

// A wrong kernel's dhidden, dhead or dbias: the right one and what the oracle has of the difference. True if that is more than
// the gates allow.
bool plant(std::span<const double> difference, std::span<const double> right, const StoredMatrix& from, char* to) {
  for (int64_t i = 0; i < std::ssize(difference); ++i) {
    const int64_t row = i / from.cols, col = i % from.cols;
    reference::encode_at(from.format, to, row * from.row_stride + col * from.col_stride,
                         from.at(row, col) + difference[index(i)]);
  }
  constexpr double kVisible = 0x1p-6;
  return sum_of_squares(difference) > kVisible * kVisible * sum_of_squares(right);
}

}  // namespace

ExpectedLinearRow compute_linear_row(const LossOracle& oracle, const CheckInputs& inputs, const LinearRow& row,
                                     const LinearRow* teacher, const RowOutputValues& outputs, Scratch& scratch) {
  const reference::SoftmaxRow& softmax = scratch.softmax;
  const int64_t label = inputs.labels[index(row.row)];
  scratch.softmax.compute(oracle.transform, row.logits, label);
  ExpectedLinearRow expected{{}, 0, linear_outputs(softmax, row, outputs[kArgmax]), linear_output_magnitudes(softmax, row)};
  const DistillationOracleCase* distillation = oracle.distillation();
  if (distillation == nullptr) {
    oracle.row_gradient(row.row, {softmax}, scratch.gradient);
    expected.loss = oracle.row_loss(row.row, {softmax});
    expected.loss_magnitude = linear_row_magnitude(oracle, softmax, expected.loss, row);
    return expected;
  }
  if (!scratch.pair) scratch.pair = std::make_unique<PairRow>();
  PairRow& pair = *scratch.pair;
  pair.compute(distillation->options(), row.logits, teacher->logits, label);
  const LinearPairErrors errors(distillation->options(), pair, row, *teacher);
  oracle.row_gradient(row.row, scratch.oracle_row(), scratch.gradient);
  errors.set_blur(scratch.gradient);
  expected.loss = oracle.row_loss(row.row, scratch.oracle_row());
  expected.loss_magnitude = errors.loss_magnitude(oracle.row_magnitude(row.row, scratch.oracle_row(), expected.loss));
  const reference::RowOutputs own = expected.outputs.own;
  expected.outputs = pair.expected();
  const double logp = expected.outputs.own.logp;
  expected.outputs.own = own;
  expected.outputs.own.logp = logp;
  expected.magnitudes[kLogp] = errors.logp_magnitude();
  if (outputs[kAgreement] && errors.is_agreement_open()) expected.outputs.agreement = *outputs[kAgreement] != 0;
  expected.magnitudes[kDivergence] = expected.magnitudes[kTeacherEntropy] = errors.output_magnitude();
  return expected;
}

LinearJudge::LinearJudge(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results)
    : config_(config),
      inputs_(inputs),
      results_(results),
      oracle_case_(*inputs.linear->operands, *inputs.linear->norms, gradients_of(results)) {}

Verdict LinearJudge::judge() {
  const Timer timer;
  Verdict verdict({});
  check_rows(verdict);
  for (const CheckedGradient& gradient : results_.gradients) {
    std::vector<Gate> gates = judge_gradient(gradient);
    for (Gate& gate : gates) gate.name = gradient.name + gate.name;
    append(verdict.gates, std::move(gates));
  }
  verdict.seconds = timer.seconds();
  return verdict;
}

void LinearJudge::check_rows(Verdict& verdict) {
  const std::unique_ptr<LossOracle> oracle = make_loss_oracle(config_, inputs_);
  std::vector<RowLoss> losses(index(inputs_.rows)), magnitudes(losses.size());
  Scratch scratch;
  for (int64_t row = 0; row < inputs_.rows; ++row) {
    if (inputs_.is_ignored(row)) check_ignored_row(inputs_, row, row_view(inputs_, results_, row), verdict.checks);
  }
  for_each_used_linear_row(inputs_, [&](const LinearRow& row, const LinearRow* teacher) {
    const RowView view = row_view(inputs_, results_, row.row);
    const ExpectedLinearRow expected = compute_linear_row(*oracle, inputs_, row, teacher, view.outputs, scratch);
    count_row(scratch, verdict.checks);
    oracle_case_.add_row(row, scratch.softmax, scratch.gradient);
    losses[index(row.row)] = expected.loss;
    magnitudes[index(row.row)].cross_entropy = expected.loss_magnitude;
    if (view.per_loss != nullptr) {
      verdict.checks.per_loss.add(row.row, static_cast<double>(*view.per_loss), expected.loss.total(), expected.loss_magnitude);
    }
    check_outputs(row.row, view, expected.outputs, expected.magnitudes, verdict.checks);
  });
  oracle_case_.finish();
  judge_outputs(config_, *oracle, results_, losses, magnitudes, verdict);
}

std::vector<Gate> LinearJudge::judge_gradient(const CheckedGradient& gradient) const {
  std::vector<Gate> gates;
  if (!gradient.dhidden.empty()) append(gates, oracle_case_.judge_dhidden(dhidden_view(inputs_, gradient)));
  if (!gradient.dhead.empty()) {
    const StoredMatrix view = dhead_view(inputs_, gradient);
    append(gates, oracle_case_.judge_dhead(view, before_of(gradient.dhead_before, view)));
  }
  if (!gradient.dbias.empty()) append(gates, oracle_case_.judge_dbias(column(gradient.dbias), column(gradient.dbias_before)));
  return gates;
}

std::vector<MutantVerdict> LinearJudge::judge_mutants() const {
  std::vector<MutantVerdict> verdicts;
  const CheckedGradient& gradient = results_.gradients.front();
  const int threads = inputs_.linear->operands->threads;
  const auto judge_all_of = [&](const std::string& name, const StoredMatrix& right, int64_t bytes, int64_t rows,
                                const auto& judge_one) {
    HugeBuffer copy(bytes, "a mutant's copy");
    StoredMatrix wrong = right;
    wrong.data = copy.data();
    for (const LinearMutant& mutant : kLinearMutants) {
      std::memcpy(copy.data(), right.data, static_cast<size_t>(bytes));
      MutantVerdict& verdict = verdicts.emplace_back();
      verdict.name = name + "_" + mutant.name;
      verdict.planted = plant(mutant, right, rows, threads, copy.data());
      for (const Gate& gate : judge_one(wrong)) {
        if (!gate.pass) verdict.caught_by.push_back(gate.name);
      }
    }
  };
  if (!gradient.dhidden.empty()) {
    judge_all_of("dhidden", dhidden_view(inputs_, gradient), gradient.dhidden.bytes(), inputs_.rows,
                 [&](const StoredMatrix& wrong) { return oracle_case_.judge_dhidden(wrong); });
  }
  if (!gradient.dhead.empty()) {
    const StoredMatrix view = dhead_view(inputs_, gradient);
    judge_all_of("dhead", view, gradient.dhead.bytes(), inputs_.valid, [&](const StoredMatrix& wrong) {
      return oracle_case_.judge_dhead(wrong, before_of(gradient.dhead_before, view));
    });
  }
  if (!gradient.dbias.empty()) {
    const auto bytes = static_cast<int64_t>(gradient.dbias.size() * sizeof(float));
    judge_all_of("dbias", column(gradient.dbias), bytes, inputs_.valid,
                 [&](const StoredMatrix& wrong) { return oracle_case_.judge_dbias(wrong, column(gradient.dbias_before)); });
  }
  if (inputs_.teacher_linear) judge_wrong_pairs(verdicts);
  return verdicts;
}

void LinearJudge::judge_wrong_pairs(std::vector<MutantVerdict>& verdicts) const {
  const std::unique_ptr<LossOracle> oracle = make_loss_oracle(config_, inputs_);
  const DistillationOracleCase& distillation = *oracle->distillation();
  const CheckedGradient& gradient = results_.gradients.front();
  const std::vector<int64_t> rows = first_used_rows(inputs_);
  for (size_t wrong = 0; wrong < kWrongPairs; ++wrong) {
    if (!distillation.can_be_wrong(static_cast<WrongPair>(wrong))) continue;
    reference::LinearGradients difference(*inputs_.linear->operands, gradients_of(results_));
    Scratch scratch;
    WrongPairRow wrong_row;
    for_each_linear_row(inputs_, rows, [&](const LinearRow& row, const LinearRow* teacher) {
      check_stop();
      compute_linear_row(*oracle, inputs_, row, teacher, {}, scratch);
      distillation.wrong_row(static_cast<WrongPair>(wrong), row.row, *scratch.pair, scratch.gradient, wrong_row);
      difference.add(std::span(&row.row, 1), wrong_row.gradient);
    });
    const auto judge_one = [&](const char* name, std::span<const double> more, std::span<const double> right,
                               const StoredMatrix& from, int64_t bytes, const auto& gates_of) {
      HugeBuffer copy(bytes, "a mutant's copy");
      std::memcpy(copy.data(), from.data, static_cast<size_t>(bytes));
      MutantVerdict& verdict = verdicts.emplace_back();
      verdict.name = std::string(name) + "_" + distillation_mutants()[wrong].name;
      verdict.planted = plant(more, right, from, copy.data());
      for (const Gate& gate : gates_of(before_of(copy, from))) {
        if (!gate.pass) verdict.caught_by.push_back(gate.name);
      }
    };
    const reference::LinearGradients& right = oracle_case_.gradients();
    if (!gradient.dhidden.empty()) {
      judge_one("dhidden", difference.dhidden(), right.dhidden(), dhidden_view(inputs_, gradient), gradient.dhidden.bytes(),
                [&](const StoredMatrix& view) { return oracle_case_.judge_dhidden(view); });
    }
    if (!gradient.dhead.empty()) {
      const StoredMatrix view = dhead_view(inputs_, gradient);
      judge_one("dhead", difference.dhead(), right.dhead(), view, gradient.dhead.bytes(), [&](const StoredMatrix& altered) {
        return oracle_case_.judge_dhead(altered, before_of(gradient.dhead_before, view));
      });
    }
    if (!gradient.dbias.empty()) {
      judge_one("dbias", difference.dbias(), right.dbias(), column(gradient.dbias),
                static_cast<int64_t>(gradient.dbias.size() * sizeof(float)),
                [&](const StoredMatrix& altered) { return oracle_case_.judge_dbias(altered, column(gradient.dbias_before)); });
    }
  }
}

}  // namespace tileloss::tools
