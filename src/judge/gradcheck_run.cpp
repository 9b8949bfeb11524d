#include "judge/gradcheck_run.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "judge/strict/guarded_args.h"
#include "support/arg_slots.h"
#include "support/timer.h"

namespace tileloss::tools {
namespace {

constexpr float kUnset = std::numeric_limits<float>::quiet_NaN();

// The forward's row state lies in the results.
tileloss_row_state make_state(int64_t rows, bool entropy, KernelResults& results) {
  for (std::vector<float>* array : {&results.state_max, &results.state_sum, &results.state_label_logit}) {
    array->assign(static_cast<size_t>(rows), kUnset);
  }
  if (entropy) results.state_entropy_sum = results.state_max;
  tileloss_row_state state;
  tileloss_row_state_init(&state);
  state.rows = rows;
  state.max = results.state_max.data();
  state.sum = results.state_sum.data();
  state.label_logit = results.state_label_logit.data();
  if (entropy) state.entropy_sum = results.state_entropy_sum.data();
  return state;
}

tileloss_vector new_output(std::vector<float>& values, int64_t size) {
  values.assign(static_cast<size_t>(size), kUnset);
  return tileloss_make_vector(values.data(), TILELOSS_FLOAT32, size);
}

// Memory for a row output, until it is read.
class OutputBuffer {
 public:
  tileloss_vector make(const RowOutput& output, int64_t rows) {
    // What no kernel writes: 0xFE in each byte is -1.7e38, and no index.
    elements_.assign(static_cast<size_t>(rows) * element_bytes(output.dtype), '\xFE');
    return tileloss_make_vector(elements_.data(), output.dtype, rows);
  }
  std::vector<double> read(const RowOutput& output) const { return widen(output.dtype, elements_); }

 private:
  std::vector<char> elements_;
};

// The same loss, unreduced: without what only a reduced one may have.
Function per_row_function(Function function) {
  function.set_choice(function.per_row_option(), "none");
  function.reset("num_items");
  if (!function.is_policy()) return function;
  function.reset("max_length");
  if (function.get_choice("entropy_reduction", "") == "token_mean") function.reset("entropy_coef");
  return function;
}

double run_forward(const GradcheckConfig& config, const CheckInputs& inputs, const KernelCall& kernel, tileloss_row_state* state,
                   KernelResults& results) {
  const int64_t rows = inputs.rows;
  tileloss_args args = base_args(inputs, inputs.logits.data());
  if (config.function.is_loss()) args.loss = new_output(results.forward_loss, config.per_row_loss() ? rows : 1);
  std::array<OutputBuffer, kOutputCount> outputs;
  for (size_t o = 0; o < kOutputCount; ++o) {
    const RowOutput& output = checked_outputs()[o];
    const int64_t count = o == kLogp ? rows * inputs.labels_per_row : rows;
    if (config.wants(output.name)) args.*output.argument = outputs[o].make(output, count);
  }
  if (state != nullptr) args.row_state = state;
  if (const auto names = config.function.metrics(); !names.empty()) {
    args.metrics = new_output(results.forward_metrics, static_cast<int64_t>(names.size()));
  }
  KernelHints hints = config.kernel;
  hints.schedule = "auto";  // stash and recompute are value_and_grad's
  const tileloss_plan plan = make_plan(config.function, TILELOSS_FORWARD, args, hints);
  const Timer timer;
  kernel(config.function, TILELOSS_FORWARD, args, plan, nullptr);
  const double seconds = timer.seconds();
  for (size_t o = 0; o < kOutputCount; ++o) results.outputs[o] = outputs[o].read(checked_outputs()[o]);

  if (config.per_row_loss()) {
    results.per_loss = results.forward_loss;
  } else if (config.function.is_loss()) {
    const Function per_row = per_row_function(config.function);
    tileloss_args loss_args = base_args(inputs, inputs.logits.data());
    loss_args.loss = new_output(results.per_loss, rows);
    kernel(per_row, TILELOSS_FORWARD, loss_args, make_plan(per_row, TILELOSS_FORWARD, loss_args, hints), nullptr);
  }
  return seconds;
}

void fill_dlogits(const GradcheckConfig& config, const CheckInputs& inputs, HugeBuffer& dlogits) {
  const auto bytes = static_cast<size_t>(inputs.logits.bytes());
  if (config.in_place) {
    std::memcpy(dlogits.data(), inputs.logits.data(), bytes);
  } else {
    std::memset(dlogits.data(), 0xFF, bytes);
  }
}

// The function's own way to its gradient in one call, or what follows a forward: a backward from its `state`, if there is one.
enum class Gradient { kOwn, kAfterForward };

double run_gradient(const GradcheckConfig& config, const CheckInputs& inputs, const KernelCall& kernel, Gradient which,
                    tileloss_row_state* state, KernelResults& results) {
  const Function& function = config.function;
  const bool fused = which == Gradient::kOwn && function.is_loss();
  const tileloss_pass pass = fused ? TILELOSS_VALUE_AND_GRAD : TILELOSS_BACKWARD;
  CheckedGradient gradient;
  tileloss_args args;
  if (config.is_linear()) {
    gradient.linear = linear_gradients(config, inputs);
    for (LinearGradient& one : gradient.linear) allocate(config, one);
    args = base_args(inputs, nullptr);
    add_gradients(gradient.linear, args);
  } else {
    gradient.dlogits_format = inputs.format;
    gradient.dlogits = HugeBuffer(inputs.logits.bytes(), "dlogits");
    fill_dlogits(config, inputs, gradient.dlogits);
    args = base_args(inputs, config.in_place ? gradient.dlogits.data() : inputs.logits.data());
    args.dlogits = args.logits;
    args.dlogits.data = gradient.dlogits.data();
  }
  gradient.name = std::string(state != nullptr ? "backward_from_row_state" : pass_name(pass)) + "/";
  add_upstream(config, inputs, args);
  OutputBuffer logp;
  if (fused) {
    args.loss = new_output(results.loss, config.per_row_loss() ? inputs.rows : 1);
    if (config.wants("logp")) args.logp = logp.make(checked_outputs()[kLogp], inputs.rows);
    if (const auto names = function.metrics(); !names.empty()) {
      args.metrics = new_output(results.metrics, static_cast<int64_t>(names.size()));
    }
  }
  if (state != nullptr) args.row_state = state;
  KernelHints hints = config.kernel;
  if (which == Gradient::kAfterForward) hints.schedule = "auto";
  const tileloss_plan plan = make_plan(function, pass, args, hints);
  if (which == Gradient::kOwn) {
    results.plan = plan;
    if (config.device.is_cpu()) results.tile = plan.cpu.vocab_block;
  }
  const Timer timer;
  kernel(function, pass, args, plan, nullptr);
  const double seconds = timer.seconds();
  if (fused) results.fused_logp = logp.read(checked_outputs()[kLogp]);
  results.gradients.push_back(std::move(gradient));
  return seconds;
}

// ---------------------------------------------------------------------------------------------------------------- strict

constexpr int64_t kMaxRows = 1024;
// Fused with the LM head, where each row costs a product: more than two of the kernels' tiles of 128 rows.
constexpr int64_t kMaxLinearRows = 320;

struct Size {
  int64_t rows, columns;
};

Size affordable(const GradcheckConfig& config, const CheckInputs& inputs) {
  // An operand, two gradients of it, both on guarded pages, and the two gradients that the child writes; and what a row is held
  // against, which may have twice the bytes of the logits.
  const TargetTensors& target = inputs.target;
  const int64_t matrices = target.argument != nullptr && target.format != inputs.format ? 12
                           : target.argument != nullptr || target.linear                ? 10
                                                                                        : 8;
  int64_t width = inputs.linear ? inputs.linear->hidden_view.cols : 0;
  if (inputs.linear && inputs.linear->low_rank != nullptr) width += inputs.linear->low_rank->hidden_view.cols;
  if (target.linear) width = std::max(width, target.linear->hidden_view.cols);
  const int64_t row_bytes = inputs.linear ? width * static_cast<int64_t>(sizeof(float)) : inputs.row_bytes();
  const int64_t most = std::max(kStrictBytes / matrices / row_bytes, int64_t{1});
  const int64_t rows = std::min(most, inputs.linear ? kMaxLinearRows : kMaxRows);
  // A file's head is taken as it is.
  const bool is_fixed = !inputs.linear || config.source.is_file;
  return {std::min(rows, inputs.rows), is_fixed ? inputs.cols : std::min({most, kMaxApartRows, inputs.cols})};
}

// The config of this size at most: fewer sequences first, then shorter ones.
GradcheckConfig reduced(const GradcheckConfig& config, const CheckInputs& inputs, const Size& size) {
  GradcheckConfig small = config;
  small.seq_len = std::min(inputs.seq_len, size.rows);
  small.batch_size = std::min(inputs.batch_size, size.rows / small.seq_len);
  if (size.columns == inputs.cols) return small;
  small.vocab_size = size.columns;
  const int64_t padding = inputs.cols - inputs.valid;
  if (padding > 0) small.function.set_integer("valid_vocab", std::max<int64_t>(size.columns - padding, 1));
  return small;
}

}  // namespace

KernelResults run_kernels(const GradcheckConfig& config, const CheckInputs& inputs, const KernelCall& kernel) {
  KernelResults results;
  tileloss_plan_init(&results.plan);
  const bool has_bonus = config.function.find_field("entropy_coef") != nullptr;  // whose gradient starts from the entropy's sum
  tileloss_row_state state;
  tileloss_row_state* row_state = nullptr;
  if (config.function.has_row_state()) {
    state = make_state(inputs.rows, config.wants("entropy") || has_bonus, results);
    row_state = &state;
  }
  results.forward_s = run_forward(config, inputs, kernel, row_state, results);
  results.kernel_s = run_gradient(config, inputs, kernel, Gradient::kOwn, nullptr, results);
  results.backward_s = run_gradient(config, inputs, kernel, Gradient::kAfterForward, row_state, results);
  return results;
}

StrictReport check_strict(const GradcheckConfig& config, const CheckInputs& inputs, ThreadTeam& team, const KernelCall& kernel) {
  const Size size = affordable(config, inputs);
  const bool is_reduced = size.rows < inputs.rows || size.columns < inputs.cols;
  const GradcheckConfig small_config = is_reduced ? reduced(config, inputs, size) : config;
  CheckInputs small_inputs;
  if (is_reduced) small_inputs = make_inputs(small_config, team);
  const CheckInputs& used = is_reduced ? small_inputs : inputs;

  StrictReport report;
  report.rows = used.rows;
  report.all_rows = inputs.rows;
  report.columns = used.cols;
  report.all_columns = inputs.cols;
  // What comes after a call that was not made has no inputs.
  run_kernels(small_config, used,
              [&](const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
                  const tileloss_run* /*run*/) {
                if (report.findings.empty()) call_strictly(function, pass, args, plan, kernel, report);
              });
  return report;
}

}  // namespace tileloss::tools
