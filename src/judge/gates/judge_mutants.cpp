// The mutants of a gradcheck: each altered copy of the kernel's results against the same gates.
#include <algorithm>
#include <memory>
#include <set>

#include "judge/gates/judge.h"
#include "judge/gates/mutants.h"
#include "judge/inputs/checked_function.h"

namespace tileloss::tools {
namespace {

// A mutant of the outputs, or a wrong kernel of the function's own, of which `which` is its place among them.
struct Planted {
  std::string name;
  const Mutant* mutant = nullptr;
  size_t which = 0;
  bool in_value = false;
};

// One mutant's rows, as one thread sees them.
struct MutantTrial {
  Checks checks;
  bool planted = false;
  bool differs = false;  // a wrong kernel that computes something else here
};

MutantContext mutant_context(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results,
                             const Oracle& oracle, const std::vector<int64_t>& rows) {
  MutantContext context;
  context.rows = inputs.rows;
  context.cols = inputs.valid;
  context.tile = results.tile;
  context.has_dlogits = true;
  context.has_loss = config.function.is_loss();
  context.per_row_loss = config.per_row_loss();
  const std::vector<double>& logp = results.outputs[kLogp];
  context.has_logp = !logp.empty();
  context.has_argmax = !results.outputs[kArgmax].empty();
  context.kernel_logp = logp;
  context.has_agreement = !results.outputs[kAgreement].empty();
  context.group_rows = inputs.group_rows;
  const CheckedGradient& gradient = results.gradients.front();
  context.kernel_dlogits = [&](int64_t row) { return gradient.dlogits.data() + inputs.row_offset(row, gradient.dlogits_format); };
  for (const int64_t row : rows) {
    const oracle::RowUpstream upstream = oracle.row_upstream(row);
    const oracle::RowUpstream first = oracle.row_upstream(rows.front());
    context.entropy_upstream |= upstream.entropy != 0;
    context.nonuniform_upstream |= upstream.logp != first.logp || upstream.lse != first.lse ||
                                   upstream.entropy != first.entropy ||
                                   oracle.loss_upstream(row) != oracle.loss_upstream(rows.front());
  }
  return context;
}

std::vector<Planted> all_planted(const MutantContext& context, const std::vector<WrongOracle>& wrong) {
  std::vector<Planted> all;
  for (const Mutant& mutant : all_mutants()) {
    if (mutant.applies(context)) all.push_back({mutant.name, &mutant});
  }
  for (const bool in_value : {false, true}) {
    for (size_t w = 0; w < wrong.size(); ++w) {
      const WrongKernel& kernel = wrong[w].kernel();
      if (!in_value || kernel.has_value)
        all.push_back({kernel.name + std::string(in_value ? "_in_value" : ""), nullptr, w, in_value});
    }
  }
  return all;
}

// A mutant's outputs of a row in place of the kernel's.
void try_row(const CheckInputs& inputs, const RowView& original, const MutantContext& context, const MutantRowOracle& oracle,
             const std::vector<WrongRow>& wrong, const OracleValues& values, const Planted& planted, MutantTrial& trial) {
  const oracle::NumberFormat format = trial.checks.gradients.front().format();
  const auto* const from = static_cast<const char*>(original.dlogits[0]);
  std::vector<char> dlogits(from, from + inputs.row_bytes(format));
  MutantRow row{values.row, format, dlogits.data(), nullptr, original.outputs, {original.logps.begin(), original.logps.end()}};
  RowView view = original;
  float loss = 0;
  if (context.per_row_loss && original.per_loss != nullptr) {
    loss = *original.per_loss;
    view.per_loss = row.loss = &loss;
  }
  if (planted.mutant == nullptr) {
    const WrongRow& difference = wrong[planted.which];
    const auto is_other = [](double value) { return value != 0; };
    trial.differs |= planted.in_value ? difference.loss != 0 || std::ranges::any_of(difference.outputs, is_other) ||
                                            std::ranges::any_of(difference.logps, is_other)
                                      : std::ranges::any_of(difference.gradient, is_other);
    trial.planted |= planted.in_value ? plant_values(difference, row) : plant_gradient(difference, context.cols, row);
  } else {
    trial.planted |= planted.mutant->apply_row(context, oracle, row);
  }
  view.dlogits = {dlogits.data()};
  view.outputs = row.outputs;
  view.logps = row.logps;
  view.fused_logp.reset();
  trial.checks.add(view, values, inputs.cols);
}

std::vector<Gate> mutant_gates(const GradcheckConfig& config, const Verdict& verdict, const Mutant* mutant, MutantTrial& trial) {
  float loss = verdict.has_loss ? static_cast<float>(verdict.loss_kernel) : 0.0F;
  if (mutant != nullptr && verdict.has_loss) trial.planted |= mutant->apply_loss(&loss);
  std::vector<Gate> gates = loss_gates(config, "loss", static_cast<double>(loss), verdict);
  append(gates, trial.checks.gates(config.tolerances));
  return gates;
}

// A gate that the unaltered results fail catches nothing.
std::set<std::string> failed_gates(const Verdict& verdict) {
  std::set<std::string> failed;
  for (const Gate& gate : verdict.gates) {
    if (!gate.pass) failed.insert(gate.name);
  }
  return failed;
}

}  // namespace

std::vector<MutantVerdict> judge_mutants(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results,
                                         const Verdict& verdict, ThreadTeam& team) {
  if (inputs.linear) return judge_linear_mutants(config, inputs, results, verdict, team);
  const std::unique_ptr<Oracle> oracle = make_oracle(config, inputs);
  const std::vector<int64_t> rows = first_used_rows(inputs);
  if (rows.empty()) return {};
  const std::vector<WrongOracle> wrong = wrong_oracles(config, inputs);
  const MutantContext context = mutant_context(config, inputs, results, *oracle, rows);
  const std::vector<Planted> all = all_planted(context, wrong);
  const CheckedGradient& gradient = results.gradients.front();
  const MutantTrial none{Checks({gradient.name}, {gradient.dlogits_format})};
  std::vector<std::vector<MutantTrial>> trials(static_cast<size_t>(team.size()), std::vector<MutantTrial>(all.size(), none));
  std::vector<std::unique_ptr<OracleRow>> oracle_rows;
  for (int thread = 0; thread < team.size(); ++thread) oracle_rows.push_back(oracle->new_row());
  for_each_row(inputs, rows, team, [&](const GivenRow& given, int thread) {
    OracleRow& row = *oracle_rows[static_cast<size_t>(thread)];
    const OracleValues& values = row.compute(given);
    const MutantRowOracle oracle_row{values.softmax,
                                     &values.gradient,
                                     oracle->loss_upstream(values.row),
                                     oracle->loss_upstream(rows.front()),
                                     oracle->row_upstream(values.row),
                                     oracle->row_upstream(rows.front())};
    std::vector<WrongRow> differences;
    for (const WrongOracle& kernel : wrong) differences.push_back(kernel.compare(row));
    const RowView original = row_view(inputs, results, values.row);
    for (size_t m = 0; m < all.size(); ++m)
      try_row(inputs, original, context, oracle_row, differences, values, all[m], trials[static_cast<size_t>(thread)][m]);
  });

  const std::set<std::string> already_failed = failed_gates(verdict);
  std::vector<MutantVerdict> verdicts;
  for (size_t m = 0; m < all.size(); ++m) {
    MutantTrial& trial = trials[0][m];
    for (size_t thread = 1; thread < trials.size(); ++thread) {
      trial.checks.merge(trials[thread][m].checks);
      trial.planted |= trials[thread][m].planted;
      trial.differs |= trials[thread][m].differs;
    }
    if (all[m].mutant == nullptr && !trial.differs) continue;
    MutantVerdict& result = verdicts.emplace_back();
    result.name = all[m].name;
    for (const Gate& gate : mutant_gates(config, verdict, all[m].mutant, trial)) {
      if (!gate.pass && !already_failed.contains(gate.name)) result.caught_by.push_back(gate.name);
    }
    result.planted = trial.planted;
  }
  return verdicts;
}

}  // namespace tileloss::tools
