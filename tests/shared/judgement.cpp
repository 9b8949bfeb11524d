#include "tests/shared/judgement.h"

#include "judge/gates/rows.h"
#include "support/arg_slots.h"
#include "tests/shared/logits_case.h"

namespace tileloss::test {
namespace {

// `logps`: memory for those of several labels.
tools::RowView view_of(const LogitsCase& c, std::int64_t row, std::vector<double>& logps) {
  const tileloss_args& args = c.args();
  tools::RowView view;
  if (c.spec().dlogits) view.dlogits = {c.dlogits_row(row)};
  if (present(args.loss) && c.spec().per_row_loss) view.per_loss = static_cast<const float*>(args.loss.data) + row;
  for (std::size_t o = 0; o < tools::kOutputCount; ++o) {
    const tileloss_vector& vector = args.*tools::checked_outputs()[o].argument;
    if (!present(vector)) continue;
    if (o == tools::kLogp && args.labels_per_row > 1) {
      logps.clear();
      for (std::int64_t k = 0; k < args.labels_per_row; ++k) logps.push_back(float_at(vector, row * args.labels_per_row + k));
      view.logps = logps;
      continue;
    }
    const std::size_t bytes = tools::element_bytes(vector.dtype);
    const auto* element = static_cast<const char*>(vector.data) + static_cast<std::size_t>(row * vector.stride) * bytes;
    view.outputs[o] = tools::widen(vector.dtype, {element, bytes}).front();
  }
  return view;
}

// Where a transform makes logits tie in float32 any of the largest is the argmax; `correct` is of the kernel's own.
void settle_argmax(const tools::OracleValues& values, tools::RowOutputValues& outputs) {
  if (!outputs[tools::kArgmax] || !tools::argmax_agrees(*values.softmax, static_cast<std::int64_t>(*outputs[tools::kArgmax]))) {
    return;
  }
  const bool is_label = static_cast<std::int64_t>(*outputs[tools::kArgmax]) == values.softmax->label();
  if (outputs[tools::kCorrect]) {
    const bool is_right = (*outputs[tools::kCorrect] != 0) == is_label;
    outputs[tools::kCorrect] = is_right == values.outputs.own.correct ? 1 : 0;
  }
  outputs[tools::kArgmax] = static_cast<double>(values.outputs.own.argmax);
}

}  // namespace

CheckResult check_rows(const LogitsCase& c, const tools::Oracle& oracle, const Rows& rows, tools::LinearOracleCase* linear) {
  const tileloss_args& args = c.args();
  const auto count = static_cast<std::size_t>(c.spec().rows);
  const bool has_dlogits = c.spec().dlogits;
  tools::Checks checks(std::vector<std::string>(has_dlogits ? 1 : 0),
                       std::vector<oracle::NumberFormat>(has_dlogits ? 1 : 0, c.spec().format));
  std::vector<oracle::RowLoss> losses(count), magnitudes(count);
  std::vector<bool> used(count);
  std::vector<double> logps;
  const std::unique_ptr<tools::OracleRow> oracle_row = oracle.new_row();
  rows([&](const tools::GivenRow& given) {
    const tools::OracleValues& values = oracle_row->compute(given);
    const auto i = static_cast<std::size_t>(values.row);
    used[i] = true;
    losses[i] = values.loss;
    magnitudes[i].cross_entropy = values.loss_magnitude;
    tools::RowView view = view_of(c, values.row, logps);
    settle_argmax(values, view.outputs);
    checks.add(view, values, c.spec().vocab);
    if (linear != nullptr) linear->add_row(given.logits, *values.softmax, values.gradient);
  });
  for (std::size_t i = 0; i < count; ++i) {
    const auto row = static_cast<std::int64_t>(i);
    if (!used[i]) checks.add_ignored(row, view_of(c, row, logps), c.spec().vocab);
  }
  CheckResult result;
  if (present(args.loss) && !c.spec().per_row_loss) {
    tools::OutputMetric loss("loss");
    loss.add(-1, float_at(args.loss, 0), oracle.reduce(losses), oracle.reduce_magnitudes(magnitudes));
    append(result.gates, loss.gates());
  }
  append(result.gates, checks.gates());
  if (present(args.metrics)) {
    tools::OutputMetric metrics("metrics");
    std::int64_t m = 0;
    for (const tools::OracleMetric& metric : oracle.metrics()) {
      metrics.add(m, float_at(args.metrics, m), metric.value, metric.magnitude);
      ++m;
    }
    append(result.gates, metrics.gates());
  }
  result.mistrusted = has_dlogits && checks.gradients.front().mistrusted();
  result.gates.push_back(tools::make_gate("surroundings_written", c.surroundings_intact() ? 0.0 : 1.0, 0.0));
  return result;
}

CheckResult check_stored_rows(const LogitsCase& c, const tools::Function& function, const tools::Oracle& oracle,
                              const TargetOf& target) {
  const std::int64_t ignored = function.get_integer("ignore_index", -100);
  return check_rows(c, oracle, [&](const RowWork& work) {
    for (std::int64_t i = 0; i < c.spec().rows; ++i) {
      const std::int64_t label = c.labels()[static_cast<std::size_t>(i)];
      if (label == ignored) continue;
      const std::vector<double> logits = c.logits_row(i);
      const TargetValues held = target ? target(i) : TargetValues{};
      const std::vector<std::uint8_t> allowed = c.allowed().of_row(i, c.valid_columns());
      work({{.row = i, .logits = logits}, label, {.row = i, .logits = held.values}, held.ids, allowed});
    }
  });
}

CheckResult check_cross_entropy(const LogitsCase& c, const tileloss_cross_entropy_options& options) {
  const tools::Function function("cross_entropy", &options);
  return check_stored_rows(c, function, *make_cross_entropy(function, c.oracle_tensors()));
}

CheckResult check_logprobs(const LogitsCase& c, const tileloss_logprobs_options& options) {
  const tools::Function function("logprobs", &options);
  return check_stored_rows(c, function, *make_logprobs(function, c.oracle_tensors()));
}

testing::AssertionResult agrees(const CheckResult& result) {
  auto failure = testing::AssertionFailure();
  for (const tools::Gate& gate : result.gates) {
    if (!gate.pass) failure << gate.name << ": " << gate.value << " > " << gate.limit << "\n";
  }
  if (result.gates.empty()) return testing::AssertionFailure() << "nothing was checked";
  return tools::all_pass(result.gates) ? testing::AssertionSuccess() : failure;
}

}  // namespace tileloss::test
