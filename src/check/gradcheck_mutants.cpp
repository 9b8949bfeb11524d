// The mutants of a gradcheck: each altered copy of the kernel's results against the same gates.
#include <memory>
#include <set>

#include "check/gradcheck_judge.h"
#include "check/gradcheck_oracle.h"
#include "check/gradcheck_rows.h"
#include "check/mutants.h"
#include "support/signals.h"

namespace tileloss::tools {
namespace {

using reference::RowLoss;

// One mutant's rows, as one thread sees them.
struct MutantTrial {
  explicit MutantTrial(reference::NumberFormat dlogits) : format(dlogits), checks({dlogits}) {}
  reference::NumberFormat format;
  Checks checks;
  bool planted = false;
};

MutantContext mutant_context(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results,
                             const LossOracle& oracle, const std::vector<int64_t>& rows) {
  MutantContext context;
  context.rows = inputs.rows;
  context.cols = inputs.valid;
  context.tile = results.plan.cpu.vocab_block;
  context.has_dlogits = true;
  context.has_loss = config.function.is_loss();
  context.per_row_loss = config.per_row_loss();
  const std::vector<double>& logp = results.outputs[kLogp];
  context.has_logp = !logp.empty();
  context.has_argmax = !results.outputs[kArgmax].empty();
  context.kernel_logp = logp;
  context.has_agreement = !results.outputs[kAgreement].empty();
  for (size_t wrong = 0; wrong < kWrongPairs; ++wrong) {
    context.wrong_pairs[wrong] = oracle.can_be_wrong(static_cast<WrongPair>(wrong));
  }
  context.group_rows = inputs.group_rows;
  const CheckedGradient& gradient = results.gradients.front();
  context.kernel_dlogits = [&](int64_t row) { return gradient.dlogits.data() + inputs.row_offset(row, gradient.dlogits_format); };
  const auto differs = [](const reference::RowUpstream& upstream) { return upstream.logp != 0 || upstream.entropy != 0; };
  for (const int64_t row : rows) {
    for (size_t wrong = 0; oracle.policy() != nullptr && wrong < kWrongCoefficients; ++wrong) {
      context.wrong_coefficients[wrong] |= differs(oracle.policy()->wrong_upstream(static_cast<WrongCoefficients>(wrong), row));
    }
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
  float divergence = 0, teacher_entropy = 0;
  uint8_t agreement = 0;
  MutantRow mutant;
  RowView view;

  RowCopy(const CheckInputs& inputs, const RowView& original, reference::NumberFormat format, int64_t row, bool per_row_loss)
      : dlogits(static_cast<const char*>(original.dlogits[0]),
                static_cast<const char*>(original.dlogits[0]) + inputs.row_bytes(format)),
        view(original) {
    mutant.row = row;
    mutant.format = format;
    mutant.dlogits = dlogits.data();
    view.dlogits = {dlogits.data()};
    view.fused_logp.reset();
    if (per_row_loss && original.per_loss != nullptr) {
      loss = *original.per_loss;
      mutant.loss = &loss;
      view.per_loss = &loss;
    }
    copy(kLogp, logp, mutant.logp);
    copy(kLse, lse, mutant.lse);
    copy(kArgmax, argmax, mutant.argmax);
    copy(kDivergence, divergence, mutant.divergence);
    copy(kTeacherEntropy, teacher_entropy, mutant.teacher_entropy);
    copy(kAgreement, agreement, mutant.agreement);
  }
  RowCopy(const RowCopy&) = delete;
  RowCopy& operator=(const RowCopy&) = delete;

  // The mutant's outputs, once it is applied.
  const RowView& altered() {
    if (mutant.logp != nullptr) view.outputs[kLogp] = static_cast<double>(logp);
    if (mutant.lse != nullptr) view.outputs[kLse] = static_cast<double>(lse);
    if (mutant.argmax != nullptr) view.outputs[kArgmax] = static_cast<double>(argmax);
    if (mutant.divergence != nullptr) view.outputs[kDivergence] = static_cast<double>(divergence);
    if (mutant.teacher_entropy != nullptr) view.outputs[kTeacherEntropy] = static_cast<double>(teacher_entropy);
    if (mutant.agreement != nullptr) view.outputs[kAgreement] = static_cast<double>(agreement);
    return view;
  }

 private:
  template <class T>
  void copy(size_t output, T& value, T*& for_mutant) {
    if (!view.outputs[output]) return;
    value = static_cast<T>(*view.outputs[output]);
    for_mutant = &value;
  }
};

void try_row(const CheckInputs& inputs, const RowView& original, const MutantContext& context, const MutantRowOracle& oracle_row,
             const Scratch& scratch, const RowLoss& loss, double magnitude, int64_t row, const Mutant& mutant,
             MutantTrial& trial) {
  RowCopy copy(inputs, original, trial.format, row, context.per_row_loss);
  if (mutant.apply_row != nullptr && mutant.apply_row(context, oracle_row, copy.mutant)) trial.planted = true;
  check_row(inputs, row, copy.altered(), scratch, loss, magnitude, trial.checks);
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

std::vector<int64_t> first_used_rows(const CheckInputs& inputs) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < inputs.rows && static_cast<int64_t>(rows.size()) < kMutantRows; ++row) {
    if (!inputs.is_ignored(row)) rows.push_back(row);
  }
  return rows;
}

std::vector<MutantVerdict> judge_mutants(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results,
                                         const Verdict& verdict, ThreadTeam& team) {
  const std::unique_ptr<LossOracle> oracle = make_loss_oracle(config, inputs);
  const std::vector<int64_t> rows = first_used_rows(inputs);
  if (rows.empty()) return {};
  const MutantContext context = mutant_context(config, inputs, results, *oracle, rows);
  std::vector<const Mutant*> mutants;
  for (const std::span<const Mutant> some : {all_mutants(), policy_mutants(), distillation_mutants()}) {
    for (const Mutant& mutant : some) {
      if (mutant.applies(context)) mutants.push_back(&mutant);
    }
  }
  const MutantTrial trial_of_none(results.gradients.front().dlogits_format);
  std::vector<std::vector<MutantTrial>> trials(static_cast<size_t>(team.size()),
                                               std::vector<MutantTrial>(mutants.size(), trial_of_none));
  team.run([&](int thread) {
    Scratch scratch;
    std::vector<WrongPairRow> wrong_pairs;
    for (size_t i = static_cast<size_t>(thread); i < rows.size(); i += static_cast<size_t>(team.size())) {
      const int64_t row = rows[i];
      const RowLoss loss = compute_row(*oracle, inputs, row, scratch);
      const double magnitude = oracle->row_magnitude(row, scratch.oracle_row(), loss);
      MutantRowOracle oracle_row{&scratch.softmax,
                                 &scratch.gradient,
                                 oracle->loss_upstream(row),
                                 oracle->loss_upstream(rows.front()),
                                 oracle->row_upstream(row),
                                 oracle->row_upstream(rows.front()),
                                 {},
                                 {}};
      for (size_t wrong = 0; oracle->policy() != nullptr && wrong < kWrongCoefficients; ++wrong) {
        oracle_row.wrong_coefficients[wrong] = oracle->policy()->wrong_upstream(static_cast<WrongCoefficients>(wrong), row);
      }
      wrong_pairs.resize(kWrongPairs);
      for (size_t wrong = 0; wrong < kWrongPairs; ++wrong) {
        if (!context.wrong_pairs[wrong]) continue;
        oracle->wrong_row(static_cast<WrongPair>(wrong), row, scratch.oracle_row(), scratch.gradient, wrong_pairs[wrong]);
      }
      oracle_row.wrong_pairs = wrong_pairs;
      const RowView original = row_view(inputs, results, row);
      for (size_t m = 0; m < mutants.size(); ++m) {
        check_stop();
        try_row(inputs, original, context, oracle_row, scratch, loss, magnitude, row, *mutants[m],
                trials[static_cast<size_t>(thread)][m]);
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
