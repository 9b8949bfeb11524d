#include "judge/row_trace.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "judge/gates/rows.h"
#include "judge/inputs/checked_function.h"
#include "support/exit_codes.h"
#include "support/format.h"

namespace tileloss::tools {
namespace {

using oracle::SoftmaxRow;
using oracle::StoredMatrix;

size_t index(int64_t i) { return static_cast<size_t>(i); }

double distance(double kernel, double oracle) {
  const bool same = kernel == oracle || (std::isnan(kernel) && std::isnan(oracle));
  return same ? 0 : std::fabs(kernel - oracle);
}

std::optional<double> value_at(const std::vector<float>& values, int64_t row) {
  return values.empty() ? std::nullopt : std::optional(static_cast<double>(values[index(row)]));
}

std::optional<double> widen(const float* value) {
  return value == nullptr ? std::nullopt : std::optional(static_cast<double>(*value));
}

double norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

class Tracer {
 public:
  Tracer(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results, int64_t row,
         std::optional<int64_t> column)
      : config_(config), inputs_(inputs), results_(results), row_(row), column_(column), view_(row_view(inputs, results, row)) {}

  std::vector<Stage> take() { return std::move(stages_); }

  void trace_forward(const OracleRow& row) {
    const OracleValues& expected = row.values();
    if (!row.given().allowed.empty()) show("allowed_columns", std::nullopt, static_cast<double>(expected.softmax->classes()));
    add_state(expected);
    add_statistics(expected_outputs(expected, view_.outputs), expected.magnitudes, config_.has_divergence());
    add_slots(expected.logps, row.given().labels);
    add_probability(expected);
    for (const auto& [name, value] : row.terms()) show("term/" + name, std::nullopt, value);
    if (config_.function.is_loss()) judge("loss", widen(view_.per_loss), expected.loss.total(), expected.loss_magnitude);
    if (!config_.function.has_row_state()) return;  // its gradient has no such form
    const oracle::RowCoefficients& coefficients = expected.gradient.coefficients;
    show("coefficient/target", std::nullopt, coefficients.target);
    show("coefficient/prob", std::nullopt, coefficients.prob);
    show("coefficient/prob_logp", std::nullopt, coefficients.prob_logp);
    show("coefficient/uniform", std::nullopt, coefficients.uniform);
  }

  void trace_ignored_forward() {
    add_statistics({}, {}, config_.has_divergence());
    add_slots(std::vector<SlotLogp>(view_.logps.size()), {});
    if (config_.function.is_loss()) judge("loss", widen(view_.per_loss), 0, 0);
  }

  void trace_dlogits(const OracleValues& expected) {
    const RowReference& reference = expected.reference;
    for (size_t g = 0; g < results_.gradients.size(); ++g) {
      const CheckedGradient& gradient = results_.gradients[g];
      GradientMetric metric(gradient.dlogits_format);
      metric.add_row(row_, view_.dlogits[g], inputs_.cols, reference);
      for (const auto& [name, label] : labels_of(expected)) add_column(gradient, g, name.c_str(), label, &reference);
      if (const int64_t worst = worst_column(metric); !column_ && worst >= 0) {
        add_column(gradient, g, "worst", worst, &reference);
      } else if (column_) {
        add_column(gradient, g, "column", *column_, &reference);
      }
      std::vector<double> values(index(inputs_.valid));
      oracle::decode_row(gradient.dlogits_format, view_.dlogits[g], values);
      show(gradient.name + "dlogits/norm", norm(values), norm(expected.gradient.gradient));
      add_gates(gradient.name, metric.gates(gradient_tolerances(config_.tolerances)));
    }
  }

  void trace_ignored_dlogits() {
    for (size_t g = 0; g < results_.gradients.size(); ++g) {
      const CheckedGradient& gradient = results_.gradients[g];
      GradientMetric metric(gradient.dlogits_format);
      metric.add_ignored_row(row_, view_.dlogits[g], inputs_.cols);
      const int64_t first = metric.first_nonzero_where_ignored().column;
      if (column_ || first >= 0) add_column(gradient, g, column_ ? "column" : "worst", column_.value_or(first), nullptr);
      for (const Gate& gate : metric.gates()) {
        if (gate.name == "dlogits/nonzero_where_ignored") add_gates(gradient.name, {gate});
      }
    }
  }

  // The kernels never store dlogits there.
  void show_dlogits(const OracleValues& expected) {
    const auto show_at = [&](const std::string& name, int64_t column) {
      show("dlogits/" + name, std::nullopt, column < inputs_.valid ? expected.gradient.gradient[index(column)] : 0);
      stages_.back().column = column;
    };
    for (const auto& [name, label] : labels_of(expected)) show_at(name, label);
    if (column_) show_at("column", *column_);
    show("dlogits/norm", std::nullopt, norm(expected.gradient.gradient));
  }

  // dhidden and dhidden_r.
  void trace_tokens(const LinearOracleCase& oracle_case) {
    for (const CheckedGradient& gradient : results_.gradients) {
      for (const LinearGradient& one : gradient.linear) {
        if (is_by_token(one.which)) trace_token(gradient.name, one, oracle_case);
      }
    }
  }

  void trace_token(const std::string& call, const LinearGradient& gradient, const LinearOracleCase& oracle_case) {
    const StoredMatrix& output = gradient.view;
    const std::string name = call + name_of(gradient.which);
    const std::span<const double> expected =
        oracle_case.gradient(gradient.which).subspan(index(row_ * output.cols), index(output.cols));
    std::vector<double> values, references(expected.begin(), expected.end());
    int64_t worst = 0;
    for (int64_t h = 0; h < output.cols; ++h) {
      values.push_back(output.at(row_, h));
      if (!(distance(values[index(h)], references[index(h)]) <= distance(values[index(worst)], references[index(worst)])))
        worst = h;
    }
    show(name + "/worst", values[index(worst)], references[index(worst)]);
    stages_.back().column = worst;
    show(name + "/norm", norm(values), norm(references));
    add_gates(call, oracle_case.judge_token(gradient.which, output, row_));
  }

 private:
  // The label; of several the likeliest, and then the others.
  static std::vector<std::pair<std::string, int64_t>> labels_of(const OracleValues& expected) {
    std::vector<std::pair<std::string, int64_t>> labels{{"label", expected.softmax->label()}};
    for (const int64_t label : expected.reference.labels) {
      if (label != expected.softmax->label()) labels.emplace_back("another_label", label);
    }
    return labels;
  }

  void show(const std::string& name, std::optional<double> kernel, std::optional<double> oracle) {
    Stage& stage = stages_.emplace_back();
    stage.name = name;
    stage.kernel = kernel;
    stage.oracle = oracle;
    if (kernel && oracle) stage.difference = distance(*kernel, *oracle);
  }

  // By OutputMetric's budget.
  void judge(const std::string& name, std::optional<double> kernel, double oracle, double magnitude) {
    show(name, kernel, oracle);
    if (!kernel) return;
    OutputMetric metric(name);
    metric.add(row_, *kernel, oracle, magnitude);
    stages_.back().allowed = allowed_output_error(oracle, magnitude);
    stages_.back().pass = all_pass(metric.gates());
  }

  // Beside `limit`, a limit of the config's own.
  void limit_last(double limit) {
    Stage& stage = stages_.back();
    if (!stage.difference || !std::isfinite(limit)) return;
    stage.allowed = std::min(*stage.allowed, limit);
    stage.pass = stage.pass && *stage.difference <= limit;
  }

  void add_exact(const std::string& name, double kernel, double oracle) {
    show(name, kernel, oracle);
    stages_.back().allowed = 0;
    stages_.back().pass = kernel == oracle;
  }

  void add_gates(const std::string& prefix, const std::vector<Gate>& gates) {
    for (const Gate& gate : gates) {
      Stage& stage = stages_.emplace_back();
      stage.name = prefix + gate.name;
      stage.difference = gate.value;
      stage.allowed = gate.limit;
      stage.pass = gate.pass;
    }
  }

  // Rows with NaN or infinity have a state that is the kernel's own affair.
  void add_state(const OracleValues& expected) {
    const SoftmaxRow& softmax = *expected.softmax;
    const double others = softmax.one_minus_p_label() * softmax.sum();
    const double entropy_sum = -(softmax.entropy() - softmax.log_sum()) * softmax.sum();
    const double z = softmax.logits_z()[index(softmax.label())];
    const bool finite = std::isfinite(softmax.max()) && !results_.state_max.empty();
    const double of_exp = relative_magnitude(expected);
    const double flushed = 0x1p-104 * static_cast<double>(softmax.vocab());
    const auto add = [&](const char* name, const std::vector<float>& values, double oracle, double magnitude) {
      if (values.empty()) return;
      finite ? judge(name, value_at(values, row_), oracle, magnitude) : show(name, value_at(values, row_), oracle);
    };
    add("state/max", results_.state_max, softmax.max(), expected.magnitudes[kLse]);
    add("state/sum", results_.state_sum, others, others * of_exp + flushed);
    add("state/label_logit", results_.state_label_logit, z, expected.magnitudes[kLse]);
    add("state/entropy_sum", results_.state_entropy_sum, entropy_sum,
        (std::fabs(entropy_sum) + others) * (of_exp + 1) + 104 * flushed);
  }

  // Of an exp(z - m), for OutputMetric: z - m is rounded, and with a transform or the LM head z and m themselves are.
  double relative_magnitude(const OracleValues& expected) const {
    const SoftmaxRow& softmax = *expected.softmax;
    const double distance = others_distance(softmax);
    const double blur = softmax.transform().is_identity() ? 0 : std::fabs(softmax.max()) + 16;
    return distance + blur + 2 * kMagnitudeOfError * expected.error_of_z;
  }

  void add_statistics(const ExpectedRow& expected, const OutputMagnitudes& magnitudes, bool has_pair) {
    for (size_t o = 0; o < kOutputCount; ++o) {
      const RowOutput& output = checked_outputs()[o];
      if (output.of_pair && !has_pair) continue;
      const std::optional<double> value = view_.outputs[o];
      if (output.is_exact()) {
        if (value) add_exact(output.name, *value, output.expected(expected));
        continue;
      }
      if (o == kLogp && !inputs_.slots.empty()) continue;  // a slot's
      // The oracle's tells something even where the kernel was not asked.
      judge(output.name, value, output.expected(expected), magnitudes[o]);
      if (o == kLogp) limit_last(config_.tolerances.logp_max_abs);
    }
    if (!view_.fused_logp) return;
    judge("value_and_grad/logp", view_.fused_logp, expected.own.logp, magnitudes[kLogp]);
    OutputMetric bits("value_and_grad/logp_same_bits", true);
    bits.add(row_, bits_of(*view_.fused_logp), bits_of(*view_.outputs[kLogp]));
    add_gates("", bits.gates());
  }

  // `labels`: of a row in use.
  void add_slots(const std::vector<SlotLogp>& expected, std::span<const int64_t> labels) {
    for (size_t k = 0; k < expected.size(); ++k) {
      const std::optional<double> logp = view_.logps.empty() ? std::nullopt : std::optional(view_.logps[k]);
      judge(slot_name("logp", k), logp, expected[k].value, expected[k].magnitude);
      limit_last(config_.tolerances.logp_max_abs);
      if (!labels.empty() && labels[k] >= 0) stages_.back().column = labels[k];
    }
  }

  // The label's: from logp, and from the state.
  void add_probability(const OracleValues& expected) {
    const SoftmaxRow& softmax = *expected.of_logp;
    const double temperature = softmax.transform().logp_temperature();
    const double p = softmax.p(softmax.label());
    const std::optional<double> logp = view_.outputs[kLogp];
    show("p", logp ? std::optional(std::exp(temperature * *logp)) : std::nullopt, p);
    if (logp && std::isfinite(p) && p > 0) {
      const double allowed = allowed_output_error(softmax.outputs().logp, expected.magnitudes[kLogp]);
      stages_.back().allowed = p * std::expm1(temperature * allowed) + 0x1p-126;
      stages_.back().pass = *stages_.back().difference <= *stages_.back().allowed;
    }
    if (results_.state_sum.empty()) return;
    const double sum = *value_at(results_.state_sum, row_);
    const double target = std::exp(*value_at(results_.state_label_logit, row_) - *value_at(results_.state_max, row_));
    show("one_minus_p", sum / (sum + target), softmax.one_minus_p_label());
  }

  static int64_t worst_column(const GradientMetric& metric) {
    return metric.nonfinite_mismatches() > 0 ? metric.first_nonfinite_mismatch().column
                                             : metric.worst_budget_off_target().at.column;
  }

  // `reference` null: the row is ignored.
  void add_column(const CheckedGradient& gradient, size_t which, const char* name, int64_t column,
                  const RowReference* reference) {
    const bool is_zero = reference == nullptr || column >= inputs_.valid ||
                         (!reference->allowed.empty() && reference->allowed[index(column)] == 0);
    const double kernel = oracle::decode_at(gradient.dlogits_format, view_.dlogits[which], column);
    const double oracle = is_zero ? 0 : reference->gradient[index(column)];
    show(gradient.name + "dlogits/" + name, kernel, oracle);
    Stage& stage = stages_.back();
    stage.column = column;
    stage.allowed = is_zero ? 0 : config_.tolerances.ulp * allowed_error(gradient.dlogits_format, *reference, column);
    const bool overflows = std::isinf(kernel) && std::fabs(oracle) >= oracle::format_info(gradient.dlogits_format).overflow &&
                           std::signbit(kernel) == std::signbit(oracle);
    stage.pass = *stage.difference == 0 || *stage.difference <= *stage.allowed || overflows;
  }

  const GradcheckConfig& config_;
  const CheckInputs& inputs_;
  const KernelResults& results_;
  int64_t row_;
  std::optional<int64_t> column_;
  RowView view_;
  std::vector<Stage> stages_;
};

void trace_stages(const GradcheckConfig& config, const CheckInputs& inputs, int64_t row, Tracer& tracer) {
  std::optional<LinearOracleCase> linear;
  if (inputs.linear) {
    oracle::LinearGradients::NeedsGrad of_tokens{};
    of_tokens[static_cast<size_t>(LinearOutput::kDhidden)] = of_tokens[static_cast<size_t>(LinearOutput::kDhiddenR)] = true;
    linear.emplace(*inputs.linear->operands, *inputs.linear->norms, of_tokens);
  }
  if (inputs.is_ignored(row)) {
    tracer.trace_ignored_forward();
    if (!linear) tracer.trace_ignored_dlogits();
  } else {
    const std::unique_ptr<Oracle> oracle = make_oracle(config, inputs);
    const std::unique_ptr<OracleRow> oracle_row = oracle->new_row();
    ThreadTeam alone(1);
    for_each_row(inputs, std::span(&row, 1), alone, [&](const GivenRow& given, int) {
      const OracleValues& expected = oracle_row->compute(given);
      tracer.trace_forward(*oracle_row);
      if (!linear) return tracer.trace_dlogits(expected);
      tracer.show_dlogits(expected);
      linear->add_row(given.logits, *expected.softmax, expected.gradient);
    });
  }
  if (!linear) return;
  linear->finish();
  tracer.trace_tokens(*linear);
}

Json json_of(const std::optional<double>& value) { return value ? Json(*value) : Json(); }

void check_range(const char* flag, int64_t value, int64_t count, const char* what) {
  if (value >= 0 && value < count) return;
  throw ToolError(kExitUsage, formatted("{}: expected 0 to {}, of {} {}, got {}", flag, count - 1, count, what, value));
}

}  // namespace

std::vector<std::string> RowTrace::failures() const {
  std::vector<std::string> names;
  for (const Stage& stage : stages) {
    if (!stage.pass) names.push_back(stage.name);
  }
  return names;
}

Json RowTrace::to_json() const {
  Json list = Json::array();
  for (const Stage& stage : stages) {
    list.push_back({{"stage", stage.name},
                    {"column", stage.column >= 0 ? Json(stage.column) : Json()},
                    {"kernel", json_of(stage.kernel)},
                    {"oracle", json_of(stage.oracle)},
                    {"difference", json_of(stage.difference)},
                    {"allowed", json_of(stage.allowed)},
                    {"pass", stage.pass}});
  }
  return {{"row", row}, {"label", label}, {"ignored", ignored.empty() ? Json() : Json(ignored)}, {"stages", list}};
}

void check_trace_range(const CheckInputs& inputs, int64_t row, std::optional<int64_t> column) {
  check_range("--row", row, inputs.rows, "rows");
  if (column) check_range("--column", *column, inputs.cols, "columns");
}

RowTrace trace_row(const GradcheckConfig& config, const CheckInputs& inputs, const KernelResults& results, int64_t row,
                   std::optional<int64_t> column) {
  RowTrace trace;
  trace.row = row;
  trace.label = inputs.labels[index(row)];
  if (!inputs.policy.in_use(row)) {
    trace.ignored = "the mask leaves it out";
  } else if (inputs.is_ignored(row)) {
    trace.ignored = "its label is ignore_index";
  }
  Tracer tracer(config, inputs, results, row, column);
  trace_stages(config, inputs, row, tracer);
  trace.stages = tracer.take();
  return trace;
}

}  // namespace tileloss::tools
