#include "tools/gradcheck_judge.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>

#include "tools/gradcheck_oracle.h"
#include "tools/mutants.h"
#include "tools/signals.h"
#include "tools/timer.h"

namespace tileloss::tools {
namespace {

using reference::GradientRow;
using reference::RowLoss;
using reference::SoftmaxRow;

// What one thread needs for a row.
struct Scratch {
  std::vector<double> logits;
  SoftmaxRow softmax;
  GradientRow gradient;
};

// A row of the kernel's results; null: not asked for. Mutants point it at their own copies.
struct RowView {
  std::vector<const void*> dlogits;
  const float* per_loss = nullptr;
  const float* logp = nullptr;
  const float* lse = nullptr;
  const float* entropy = nullptr;
  const float* log_sum_sq_probs = nullptr;
  const float* mean_logit = nullptr;
  const float* fused_logp = nullptr;
  const int64_t* argmax = nullptr;
  const uint8_t* correct = nullptr;
};

template <class T>
const T* element(const std::vector<T>& values, int64_t row) {
  return values.empty() ? nullptr : &values[static_cast<size_t>(row)];
}

RowView row_view(const CheckInputs& inputs, const KernelResults& results, int64_t row) {
  RowView view;
  for (const CheckedGradient& gradient : results.gradients) {
    view.dlogits.push_back(gradient.dlogits.data() + row * inputs.row_bytes());
  }
  view.per_loss = element(results.per_loss, row);
  view.logp = element(results.logp, row);
  view.lse = element(results.lse, row);
  view.entropy = element(results.entropy, row);
  view.log_sum_sq_probs = element(results.log_sum_sq_probs, row);
  view.mean_logit = element(results.mean_logit, row);
  view.fused_logp = element(results.fused_logp, row);
  view.argmax = element(results.argmax, row);
  view.correct = element(results.correct, row);
  return view;
}

void add_output(OutputMetric& metric, int64_t row, const float* output, double reference, double magnitude) {
  if (output != nullptr) metric.add(row, static_cast<double>(*output), reference, magnitude);
}

void check_outputs(int64_t row, const RowView& view, const reference::RowOutputs& expected, const OutputMagnitudes& magnitudes,
                   Checks& checks) {
  add_output(checks.logp, row, view.logp, expected.logp, magnitudes.logp);
  add_output(checks.lse, row, view.lse, expected.lse, magnitudes.lse);
  add_output(checks.entropy, row, view.entropy, expected.entropy, magnitudes.entropy);
  add_output(checks.log_sum_sq_probs, row, view.log_sum_sq_probs, expected.log_sum_sq_probs, magnitudes.log_sum_sq_probs);
  add_output(checks.mean_logit, row, view.mean_logit, expected.mean_logit, magnitudes.mean_logit);
  if (view.argmax != nullptr) checks.argmax.add(row, *view.argmax, expected.argmax);
  if (view.correct != nullptr) checks.correct.add(row, *view.correct, expected.correct ? 1 : 0);
  if (view.fused_logp != nullptr) {
    checks.fused_logp_bits.add(row, std::bit_cast<int32_t>(*view.fused_logp), std::bit_cast<int32_t>(*view.logp));
  }
}

// The oracle's row: softmax, loss and gradient.
RowLoss compute_row(const LossOracle& oracle, const CheckInputs& inputs, int64_t row, Scratch& scratch) {
  scratch.logits.resize(static_cast<size_t>(inputs.valid));
  reference::decode_row(inputs.format, inputs.row(row), scratch.logits);
  scratch.softmax.compute(oracle.transform, scratch.logits, inputs.labels[static_cast<size_t>(row)]);
  oracle.row_gradient(row, scratch.softmax, scratch.gradient);
  return oracle.row_loss(row, scratch.softmax);
}

void check_row(const CheckInputs& inputs, int64_t row, const RowView& view, const Scratch& scratch, const RowLoss& loss,
               Checks& checks) {
  const RowReference reference = make_row_reference(scratch.softmax, scratch.gradient);
  for (size_t g = 0; g < checks.gradients.size(); ++g) checks.gradients[g].add_row(row, view.dlogits[g], inputs.cols, reference);
  add_output(checks.per_loss, row, view.per_loss, loss.total(), loss_magnitude(scratch.softmax, loss));
  check_outputs(row, view, scratch.softmax.outputs(), output_magnitudes(scratch.softmax), checks);
}

void check_ignored_row(const CheckInputs& inputs, int64_t row, const RowView& view, Checks& checks) {
  for (size_t g = 0; g < checks.gradients.size(); ++g) checks.gradients[g].add_ignored_row(row, view.dlogits[g], inputs.cols);
  add_output(checks.per_loss, row, view.per_loss, 0, 0);
  check_outputs(row, view, reference::RowOutputs{}, OutputMagnitudes{}, checks);
}

std::vector<Gate> prefixed(const std::string& prefix, std::vector<Gate> gates) {
  for (Gate& gate : gates) gate.name = prefix + gate.name;
  return gates;
}

void append(std::vector<Gate>& gates, std::vector<Gate> more) {
  gates.insert(gates.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

std::vector<Gate> row_gates(const GradcheckConfig& config, const KernelResults& results, const Checks& checks) {
  const GradcheckConfig::Tolerances& limits = config.tolerances;
  std::vector<Gate> gates;
  for (const OutputMetric* metric :
       {&checks.per_loss, &checks.lse, &checks.entropy, &checks.log_sum_sq_probs, &checks.mean_logit}) {
    if (metric->count() > 0) append(gates, metric->gates());
  }
  if (checks.logp.count() > 0) append(gates, checks.logp.gates(limits.logp_max_abs));
  if (!results.argmax.empty()) append(gates, checks.argmax.gates());
  if (!results.correct.empty()) append(gates, checks.correct.gates());
  if (!results.fused_logp.empty()) append(gates, checks.fused_logp_bits.gates());
  const GradientTolerances gradient_limits{limits.ulp, 1.0, limits.dlogits_max_abs, limits.dlogits_max_rel};
  for (size_t g = 0; g < checks.gradients.size(); ++g) {
    append(gates, prefixed(results.gradients[g].name + "/", checks.gradients[g].gates(gradient_limits)));
  }
  return gates;
}

// The scalar loss, by the metric's budget and by the config's own limit. A loss per row is judged with the rows.
std::vector<Gate> loss_gates(const GradcheckConfig& config, const std::string& name, double loss, const Verdict& verdict) {
  if (!verdict.has_loss || config.per_row_loss()) return {};
  OutputMetric metric(name);
  metric.add(-1, loss, verdict.loss_ref, verdict.loss_magnitude);
  std::vector<Gate> gates = metric.gates();
  if (std::isfinite(config.tolerances.loss_atol)) {
    gates.push_back(make_gate(name + "/atol", std::abs(loss - verdict.loss_ref), config.tolerances.loss_atol));
  }
  return gates;
}

double sum(const std::vector<float>& values) {
  double total = 0;
  for (const float value : values) total += static_cast<double>(value);
  return total;
}

void set_loss(const GradcheckConfig& config, const LossOracle& oracle, const KernelResults& results,
              const std::vector<RowLoss>& losses, const std::vector<RowLoss>& magnitudes, Verdict& verdict) {
  verdict.has_loss = config.function.is_loss();
  if (!verdict.has_loss) return;
  verdict.loss_kernel = sum(results.loss);
  if (config.per_row_loss()) {
    for (const RowLoss& loss : losses) verdict.loss_ref += loss.total();
  } else {
    verdict.loss_ref = oracle.reduce(losses);
    verdict.loss_magnitude = std::abs(oracle.reduce(magnitudes));
  }
}

// With reduction none value_and_grad's losses must be the forward's, row by row, to the bit.
Gate same_losses(const KernelResults& results) {
  ExactMetric metric("value_and_grad/loss_same_bits");
  for (size_t i = 0; i < results.loss.size(); ++i) {
    metric.add(static_cast<int64_t>(i), std::bit_cast<int32_t>(results.loss[i]), std::bit_cast<int32_t>(results.forward_loss[i]));
  }
  return metric.gates().front();
}

}  // namespace

void Checks::merge(const Checks& other) {
  for (size_t g = 0; g < gradients.size(); ++g) gradients[g].merge(other.gradients[g]);
  per_loss.merge(other.per_loss);
  logp.merge(other.logp);
  lse.merge(other.lse);
  entropy.merge(other.entropy);
  log_sum_sq_probs.merge(other.log_sum_sq_probs);
  mean_logit.merge(other.mean_logit);
  argmax.merge(other.argmax);
  correct.merge(other.correct);
  fused_logp_bits.merge(other.fused_logp_bits);
}

Verdict judge(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results, ThreadTeam& team) {
  const Timer timer;
  const std::unique_ptr<LossOracle> oracle = make_loss_oracle(config, inputs);
  std::vector<RowLoss> losses(static_cast<size_t>(inputs.rows));
  std::vector<RowLoss> magnitudes(static_cast<size_t>(inputs.rows));
  std::vector<Checks> per_thread(static_cast<size_t>(team.size()), Checks(inputs.format, results.gradients.size()));
  // A fixed share of the rows for each thread, merged in order: the sums come out the same every time.
  team.run([&](int thread) {
    Scratch scratch;
    Checks& checks = per_thread[static_cast<size_t>(thread)];
    for (int64_t row = thread; row < inputs.rows; row += team.size()) {
      check_stop();
      const RowView view = row_view(inputs, results, row);
      if (inputs.is_ignored(row)) {
        check_ignored_row(inputs, row, view, checks);
        continue;
      }
      const RowLoss loss = compute_row(*oracle, inputs, row, scratch);
      losses[static_cast<size_t>(row)] = loss;
      magnitudes[static_cast<size_t>(row)].cross_entropy = loss_magnitude(scratch.softmax, loss);
      check_row(inputs, row, view, scratch, loss, checks);
    }
  });

  Verdict verdict(inputs.format, results.gradients.size());
  for (const Checks& checks : per_thread) verdict.checks.merge(checks);
  set_loss(config, *oracle, results, losses, magnitudes, verdict);
  verdict.gates = loss_gates(config, "loss", verdict.loss_kernel, verdict);
  append(verdict.gates, loss_gates(config, "forward/loss", sum(results.forward_loss), verdict));
  if (config.per_row_loss()) verdict.gates.push_back(same_losses(results));
  append(verdict.gates, row_gates(config, results, verdict.checks));
  if (!config.expect_mostly_zero) {
    const GradientMetric& gradient = verdict.checks.gradients.front();
    verdict.gates.push_back({"mistrusted/zero_fraction", 0.5, gradient.zero_fraction(), !gradient.mistrusted()});
  }
  verdict.seconds = timer.seconds();
  return verdict;
}

// ------------------------------------------------------------------------------------------------------------- mutants

namespace {

// One mutant's rows, as one thread sees them.
struct MutantTrial {
  explicit MutantTrial(reference::NumberFormat format) : checks(format, 1) {}
  Checks checks;
  bool planted = false;
};

std::vector<int64_t> first_used_rows(const CheckInputs& inputs) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < inputs.rows && static_cast<int64_t>(rows.size()) < kMutantRows; ++row) {
    if (!inputs.is_ignored(row)) rows.push_back(row);
  }
  return rows;
}

MutantContext mutant_context(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results,
                             const LossOracle& oracle, const std::vector<int64_t>& rows) {
  MutantContext context;
  context.rows = inputs.rows;
  context.cols = inputs.valid;
  context.tile = results.plan.vocab_block;
  context.has_dlogits = true;
  context.has_loss = config.function.is_loss();
  context.per_row_loss = config.per_row_loss();
  context.has_logp = !results.logp.empty();
  context.has_argmax = !results.argmax.empty();
  context.kernel_logp = results.logp;
  for (const int64_t row : rows) {
    const reference::RowUpstream upstream = oracle.row_upstream(row);
    const reference::RowUpstream first = oracle.row_upstream(rows.front());
    context.entropy_upstream |= upstream.entropy != 0;
    context.nonuniform_upstream |= upstream.logp != first.logp || upstream.lse != first.lse ||
                                   upstream.entropy != first.entropy ||
                                   oracle.loss_upstream(row) != oracle.loss_upstream(rows.front());
  }
  return context;
}

// A copy of a row of the kernel's results that a mutant may alter.
struct RowCopy {
  std::vector<char> dlogits;
  float loss = 0, logp = 0, lse = 0;
  int64_t argmax = 0;
  MutantRow mutant;
  RowView view;

  RowCopy(const CheckInputs& inputs, const RowView& original, int64_t row, bool per_row_loss)
      : dlogits(static_cast<const char*>(original.dlogits[0]),
                static_cast<const char*>(original.dlogits[0]) + inputs.row_bytes()),
        view(original) {
    mutant.row = row;
    mutant.format = inputs.format;
    mutant.dlogits = dlogits.data();
    view.dlogits = {dlogits.data()};
    view.fused_logp = nullptr;
    if (per_row_loss) copy(original.per_loss, loss, mutant.loss, view.per_loss);
    copy(original.logp, logp, mutant.logp, view.logp);
    copy(original.lse, lse, mutant.lse, view.lse);
    copy(original.argmax, argmax, mutant.argmax, view.argmax);
  }
  RowCopy(const RowCopy&) = delete;
  RowCopy& operator=(const RowCopy&) = delete;

 private:
  template <class T>
  static void copy(const T* original, T& value, T*& for_mutant, const T*& for_view) {
    if (original == nullptr) return;
    value = *original;
    for_mutant = &value;
    for_view = &value;
  }
};

void try_row(const CheckInputs& inputs, const RowView& original, const MutantContext& context, const MutantRowOracle& oracle_row,
             const Scratch& scratch, const RowLoss& loss, int64_t row, const Mutant& mutant, MutantTrial& trial) {
  RowCopy copy(inputs, original, row, context.per_row_loss);
  if (mutant.apply_row != nullptr && mutant.apply_row(context, oracle_row, copy.mutant)) trial.planted = true;
  check_row(inputs, row, copy.view, scratch, loss, trial.checks);
}

std::vector<Gate> mutant_gates(const GradcheckConfig& config, const KernelResults& results, const MutantContext& context,
                               const Verdict& verdict, const Mutant& mutant, MutantTrial& trial) {
  float loss = verdict.has_loss ? static_cast<float>(verdict.loss_kernel) : 0.0F;
  if (mutant.apply_loss != nullptr && verdict.has_loss && mutant.apply_loss(context, &loss)) trial.planted = true;
  std::vector<Gate> gates = loss_gates(config, "loss", static_cast<double>(loss), verdict);
  append(gates, row_gates(config, results, trial.checks));
  return gates;
}

}  // namespace

std::vector<MutantVerdict> judge_mutants(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results,
                                         const Verdict& verdict, ThreadTeam& team) {
  const std::unique_ptr<LossOracle> oracle = make_loss_oracle(config, inputs);
  const std::vector<int64_t> rows = first_used_rows(inputs);
  if (rows.empty()) return {};
  const MutantContext context = mutant_context(config, inputs, results, *oracle, rows);
  std::vector<const Mutant*> mutants;
  for (const Mutant& mutant : all_mutants()) {
    if (mutant.applies(context)) mutants.push_back(&mutant);
  }
  std::vector<std::vector<MutantTrial>> trials(static_cast<size_t>(team.size()),
                                               std::vector<MutantTrial>(mutants.size(), MutantTrial(inputs.format)));
  team.run([&](int thread) {
    Scratch scratch;
    for (size_t i = static_cast<size_t>(thread); i < rows.size(); i += static_cast<size_t>(team.size())) {
      const int64_t row = rows[i];
      const RowLoss loss = compute_row(*oracle, inputs, row, scratch);
      const MutantRowOracle oracle_row{&scratch.softmax,           &scratch.gradient,
                                       oracle->loss_upstream(row), oracle->loss_upstream(rows.front()),
                                       oracle->row_upstream(row),  oracle->row_upstream(rows.front())};
      const RowView original = row_view(inputs, results, row);
      for (size_t m = 0; m < mutants.size(); ++m) {
        check_stop();
        try_row(inputs, original, context, oracle_row, scratch, loss, row, *mutants[m], trials[static_cast<size_t>(thread)][m]);
      }
    }
  });

  // A gate that the unaltered results fail catches nothing.
  std::set<std::string> already_failed;
  for (const Gate& gate : verdict.gates) {
    if (!gate.pass) already_failed.insert(gate.name);
  }
  std::vector<MutantVerdict> verdicts;
  for (size_t m = 0; m < mutants.size(); ++m) {
    MutantTrial& trial = trials[0][m];
    for (size_t thread = 1; thread < trials.size(); ++thread) {
      trial.checks.merge(trials[thread][m].checks);
      trial.planted |= trials[thread][m].planted;
    }
    MutantVerdict result;
    result.name = mutants[m]->name;
    for (const Gate& gate : mutant_gates(config, results, context, verdict, *mutants[m], trial)) {
      if (!gate.pass && !already_failed.contains(gate.name)) result.caught_by.push_back(gate.name);
    }
    result.planted = trial.planted;
    verdicts.push_back(std::move(result));
  }
  return verdicts;
}

}  // namespace tileloss::tools
