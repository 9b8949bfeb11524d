#include "check/gradcheck_run.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "check/gradcheck_linear.h"
#include "check/gradcheck_policy.h"
#include "check/gradcheck_probs.h"
#include "check/gradcheck_sparse.h"
#include "check/gradcheck_teacher.h"
#include "support/arg_slots.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/safetensors.h"
#include "support/signals.h"
#include "support/timer.h"

namespace tileloss::tools {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 50;
constexpr float kUnset = std::numeric_limits<float>::quiet_NaN();

tileloss_vector vector_of(const std::vector<float>& values) {
  return tileloss_make_vector(values.data(), TILELOSS_FLOAT32, static_cast<int64_t>(values.size()));
}

// One value is broadcast over `size` rows by stride 0.
tileloss_vector broadcast(const Upstream& values, int64_t size) {
  tileloss_vector vector = vector_of(values);
  if (values.empty()) return tileloss_vector{};
  if (values.size() == 1 && size != 1) {
    vector.size = size;
    vector.stride = 0;
  }
  return vector;
}

// The shape asked for, with the file's where nothing was asked.
void set_shape(const GradcheckConfig& config, int64_t file_rows, CheckInputs& inputs) {
  inputs.batch_size = std::max<int64_t>(config.batch_size, 1);
  inputs.seq_len = config.seq_len > 0 ? config.seq_len : file_rows / inputs.batch_size;
  inputs.rows = inputs.batch_size * inputs.seq_len;  // each below 2^31
  if (inputs.rows > kMaxElements / inputs.cols) {
    throw ToolError(kExitUsage, formatted("batch_size * seq_len * vocab_size: {} rows of {} are more than 2^50 elements",
                                          inputs.rows, inputs.cols));
  }
  inputs.group_rows = config.row_groups ? inputs.seq_len : 0;
  inputs.valid = config.function.get_integer("valid_vocab", -1);
  if (inputs.valid < 0) inputs.valid = inputs.cols;
  inputs.ignore_index = config.function.get_integer("ignore_index", -100);
  inputs.has_teacher = config.has_teacher() && !config.is_linear();
  inputs.has_probs = config.has_probs();
  inputs.probs_format = config.probs.format;
  if (config.teacher.columns > kMaxElements / std::max<int64_t>(inputs.rows, 1)) {
    throw ToolError(kExitUsage, formatted("source.teacher_columns: {} rows of {} are more than 2^50 elements", inputs.rows,
                                          config.teacher.columns));
  }
  inputs.teacher_columns = config.teacher.columns;
}

// The library would refuse a label too, but knows neither the file nor the tensor's name.
void read_labels(const SafetensorsFile& file, const StoredTensor& tensor, CheckInputs& inputs) {
  if (tensor.dtype != "I64" && tensor.dtype != "I32") {
    file.refuse(tensor, formatted("expected I64 or I32 labels, got {}", tensor.dtype));
  }
  const std::vector<char> data = file.read(tensor);
  inputs.labels.resize(static_cast<size_t>(inputs.rows));
  for (size_t i = 0; i < inputs.labels.size(); ++i) {
    int64_t& label = inputs.labels[i];
    int32_t narrow = 0;
    if (tensor.dtype == "I64") {
      std::memcpy(&label, data.data() + i * sizeof label, sizeof label);
    } else {
      std::memcpy(&narrow, data.data() + i * sizeof narrow, sizeof narrow);
      label = narrow;
    }
    if ((label < 0 || label >= inputs.valid) && !inputs.is_ignored(static_cast<int64_t>(i))) {
      file.refuse(tensor, formatted("row {}: expected a label from 0 to {}, or {} (ignore_index), got {}", i, inputs.valid - 1,
                                    inputs.ignore_index, label));
    }
  }
}

void plan_shapes(const GradcheckConfig& config, const CheckInputs& inputs);

void load_file(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  const SafetensorsFile file(config.source.path);
  const StoredTensor& logits = file.tensor(config.is_linear() ? config.linear.hidden_name : config.source.logits_name);
  inputs.format = number_format(file, logits);
  if (config.dtype && *config.dtype != inputs.format) {
    file.refuse(logits,
                formatted("expected the config's dtype, {}, got {}", reference::format_info(*config.dtype).name, logits.dtype));
  }
  if (logits.shape.size() < 2 || logits.elements() == 0) {
    file.refuse(logits, "expected at least two dimensions and one element");
  }
  inputs.cols = config.is_linear() ? head_rows(config, file) : logits.shape.back();
  if (config.vocab_size > 0 && config.vocab_size != inputs.cols) {
    file.refuse(logits, formatted("expected the config's vocab_size, {}, got {} columns", config.vocab_size, inputs.cols));
  }
  const int64_t file_rows = logits.elements() / logits.shape.back();
  set_shape(config, file_rows, inputs);
  if (inputs.rows > file_rows || inputs.rows == 0) {
    file.refuse(logits, formatted("expected at least the config's batch_size * seq_len, {} rows, and one, got {}", inputs.rows,
                                  file_rows));
  }
  if (config.is_policy()) load_policy_layout(config, file, logits, inputs);
  if (config.takes_mask() && !config.is_policy()) load_mask(config, file, logits, inputs);
  if (config.is_linear()) load_linear(config, file, inputs);
  plan_shapes(config, inputs);
  read_labels(file, file.row_tensor(config.source.labels_name, logits), inputs);
  if (config.is_linear()) return;
  inputs.logits = read_logits(file, logits, inputs);
  if (inputs.has_teacher) load_teacher(config, team, inputs);
  if (inputs.teacher_columns > 0) draw_columns(config, team, inputs);
  if (!inputs.has_probs) return;
  inputs.probs = HugeBuffer(inputs.matrix_bytes(inputs.probs_format), "target_probs");
  draw_probs(config, team, inputs);
}

void generate(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  inputs.format = *config.dtype;
  inputs.cols = config.vocab_size;
  set_shape(config, 0, inputs);
  if (config.is_policy()) draw_policy_layout(config, inputs);
  if (config.takes_mask() && !config.is_policy()) {
    inputs.policy.mask = draw_mask(config.seed, inputs.rows, config.policy.mask_prob);
  }
  if (config.is_linear()) set_linear_shape(config, inputs);
  plan_shapes(config, inputs);
  // Before anything is drawn: what does not fit is refused at once.
  if (!config.is_linear()) inputs.logits = HugeBuffer(inputs.matrix_bytes(), "logits");
  if (inputs.has_teacher) inputs.teacher = HugeBuffer(inputs.matrix_bytes(), "teacher_logits");
  if (inputs.has_probs) inputs.probs = HugeBuffer(inputs.matrix_bytes(inputs.probs_format), "target_probs");
  inputs.labels = make_labels({inputs.valid, config.ignore_prob, inputs.ignore_index}, config.seed, inputs.rows);
  // The label of a row that the mask leaves out may be anything.
  for (int64_t row = 0; row < inputs.rows; ++row) {
    if (!inputs.policy.in_use(row)) inputs.labels[static_cast<size_t>(row)] = row % 2 == 0 ? -1 : int64_t{1} << 40;
  }
  if (config.is_linear()) {
    generate_linear(config, team, inputs);
    return;
  }
  team.for_each(inputs.rows, [&](int64_t row, int) {
    check_stop();
    fill_logits_row(config.source.logits, config.seed, row, inputs.labels[static_cast<size_t>(row)], inputs.format,
                    inputs.logits.data() + inputs.row_offset(row), inputs.cols);
  });
  if (inputs.has_teacher) draw_teacher(config, team, inputs);
  if (inputs.has_probs) draw_probs(config, team, inputs);
  if (inputs.teacher_columns > 0) draw_columns(config, team, inputs);
}

// In [0.5, 1.5): weights near 0 would hide the rows they belong to.
std::vector<float> random_weights(bool wanted, uint64_t seed, int64_t stream_row, int64_t count) {
  std::vector<float> weights;
  if (!wanted) return weights;
  Random random(seed, Stream::kWeights, stream_row);
  for (int64_t i = 0; i < count; ++i) weights.push_back(0.5F + static_cast<float>(random.next_uniform()));
  return weights;
}

Upstream make_upstream(const GradcheckConfig& config, int64_t stream_row, int64_t rows) {
  if (config.upstream == GradcheckConfig::Upstream::kOnes) return {1.0F};
  Random random(config.seed, Stream::kUpstream, stream_row);
  Upstream values;
  const int64_t count = config.upstream == GradcheckConfig::Upstream::kPerRow ? rows : 1;
  for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(random.next_normal()));
  return values;
}

void set_upstream(const GradcheckConfig& config, CheckInputs& inputs) {
  if (config.function.is_loss()) {
    // Ones: not given, so that the default is checked too.
    if (config.upstream != GradcheckConfig::Upstream::kOnes) inputs.loss_grad = make_upstream(config, 0, inputs.rows);
    return;
  }
  if (config.wants("logp")) inputs.logp_grad = make_upstream(config, 1, inputs.rows);
  if (config.wants("lse")) inputs.lse_grad = make_upstream(config, 2, inputs.rows);
  if (config.wants("entropy")) inputs.entropy_grad = make_upstream(config, 3, inputs.rows);
  if (config.wants("mean_logit")) inputs.mean_logit_grad = make_upstream(config, 4, inputs.rows);
}

void poison_unread(const CheckInputs& inputs, const HugeBuffer& matrix, reference::NumberFormat format) {
  const auto bytes = static_cast<int64_t>(reference::format_info(format).bytes);
  for (int64_t row = 0; row < inputs.rows; ++row) {
    const int64_t first = inputs.is_ignored(row) ? 0 : inputs.valid;
    std::memset(matrix.data() + inputs.row_offset(row, format) + first * bytes, 0xFF,
                static_cast<size_t>((inputs.cols - first) * bytes));
  }
  for (int64_t group = 1; group <= inputs.groups(); ++group) {
    std::memset(matrix.data() + inputs.row_offset(group * inputs.group_rows, format) - inputs.row_bytes(format), 0xFF,
                static_cast<size_t>(inputs.row_bytes(format)));
  }
}

// What every call has in common.
tileloss_args base_args(const CheckInputs& inputs, const void* logits) {
  tileloss_args args;
  tileloss_args_init(&args);
  if (inputs.linear) {
    add_linear(inputs, args);
  } else {
    args.logits = tileloss_make_matrix(logits, abi_dtype(inputs.format), inputs.rows, inputs.cols, inputs.cols);
    const int64_t stride = inputs.group_rows > 0 ? (inputs.group_rows + 1) * inputs.cols : 0;
    args.row_groups = {inputs.group_rows, stride, stride, inputs.has_teacher || inputs.has_probs ? stride : 0};
  }
  if (inputs.has_teacher) {
    args.teacher_logits = args.logits;
    args.teacher_logits.data = inputs.teacher.data();
  }
  if (inputs.has_probs) {
    args.target_probs = args.logits;
    args.target_probs.data = inputs.probs.data();
    args.target_probs.dtype = abi_dtype(inputs.probs_format);
  }
  if (const int64_t columns = inputs.teacher_columns; columns > 0) {
    args.teacher_ids = tileloss_make_matrix(inputs.teacher_ids.data(), TILELOSS_INT64, inputs.rows, columns, columns);
    args.teacher_logprobs = tileloss_make_matrix(inputs.teacher_logprobs.data(), TILELOSS_FLOAT32, inputs.rows, columns, columns);
  }
  args.labels = tileloss_make_vector(inputs.labels.data(), TILELOSS_INT64, inputs.rows);
  if (!inputs.token_weights.empty()) args.token_weights = vector_of(inputs.token_weights);
  if (!inputs.class_weights.empty()) args.class_weights = vector_of(inputs.class_weights);
  inputs.policy.add_to(args);
  return args;
}

void add_upstream(const GradcheckConfig& config, const CheckInputs& inputs, tileloss_args& args) {
  args.loss_grad = broadcast(inputs.loss_grad, config.per_row_loss() ? inputs.rows : 1);
  args.logp_grad = broadcast(inputs.logp_grad, inputs.rows);
  args.lse_grad = broadcast(inputs.lse_grad, inputs.rows);
  args.entropy_grad = broadcast(inputs.entropy_grad, inputs.rows);
  args.mean_logit_grad = broadcast(inputs.mean_logit_grad, inputs.rows);
}

void plan_shapes(const GradcheckConfig& config, const CheckInputs& inputs) {
  tileloss_args args = base_args(inputs, nullptr);
  if (config.is_linear()) {
    add_linear_gradients(config, inputs, new_linear_gradient(config, inputs), args);
  } else {
    args.dlogits = args.logits;
  }
  if (config.function.is_loss())
    args.loss = tileloss_make_vector(nullptr, TILELOSS_FLOAT32, config.per_row_loss() ? inputs.rows : 1);
  make_plan(config.function, config.function.is_loss() ? TILELOSS_VALUE_AND_GRAD : TILELOSS_BACKWARD, args, config.kernel);
}

struct RowState {
  std::vector<float> max, sum, target, entropy_sum;

  RowState(int64_t rows, bool entropy)
      : max(static_cast<size_t>(rows), kUnset), sum(max), target(max), entropy_sum(entropy ? max : std::vector<float>()) {}

  tileloss_row_state* view() {
    tileloss_row_state_init(&state);
    state.rows = static_cast<int64_t>(max.size());
    state.max = max.data();
    state.sum = sum.data();
    state.target = target.data();
    state.entropy_sum = entropy_sum.empty() ? nullptr : entropy_sum.data();
    return &state;
  }

 private:
  tileloss_row_state state;
};

tileloss_vector new_output(std::vector<float>& values, int64_t size) {
  values.assign(static_cast<size_t>(size), kUnset);
  return vector_of(values);
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
  if (function.find_field("reduction") != nullptr) {
    function.set_choice("reduction", "none");
    return function;
  }
  function.set_choice("aggregation", "none");
  function.reset("num_items");
  function.reset("max_length");
  if (function.get_choice("entropy_reduction", "") == "token_mean") function.reset("entropy_coef");
  return function;
}

double run_forward(const GradcheckConfig& config, const CheckInputs& inputs, const KernelCall& kernel, RowState* state,
                   KernelResults& results) {
  const int64_t rows = inputs.rows;
  tileloss_args args = base_args(inputs, inputs.logits.data());
  if (config.function.is_loss()) args.loss = new_output(results.forward_loss, config.per_row_loss() ? rows : 1);
  std::array<OutputBuffer, kOutputCount> outputs;
  for (size_t o = 0; o < kOutputCount; ++o) {
    const RowOutput& output = checked_outputs()[o];
    if (config.wants(output.name)) args.*output.argument = outputs[o].make(output, rows);
  }
  if (state != nullptr) args.row_state = state->view();
  if (const auto names = config.function.metrics(); !names.empty()) {
    args.metrics = new_output(results.forward_metrics, static_cast<int64_t>(names.size()));
  }
  KernelWishes wishes = config.kernel;
  wishes.schedule = "auto";  // stash and recompute are value_and_grad's
  const tileloss_plan plan = make_plan(config.function, TILELOSS_FORWARD, args, wishes);
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
    kernel(per_row, TILELOSS_FORWARD, loss_args, make_plan(per_row, TILELOSS_FORWARD, loss_args, wishes), nullptr);
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
                    RowState* state, KernelResults& results) {
  const Function& function = config.function;
  const bool fused = which == Gradient::kOwn && function.is_loss();
  const tileloss_pass pass = fused ? TILELOSS_VALUE_AND_GRAD : TILELOSS_BACKWARD;
  CheckedGradient gradient;
  tileloss_args args;
  if (config.is_linear()) {
    gradient = new_linear_gradient(config, inputs);
    make_linear_gradients(config, inputs, gradient);
    args = base_args(inputs, nullptr);
    add_linear_gradients(config, inputs, gradient, args);
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
    if (config.wants("logp")) args.logp = logp.make(row_outputs()[kLogp], inputs.rows);
    if (const auto names = function.metrics(); !names.empty()) {
      args.metrics = new_output(results.metrics, static_cast<int64_t>(names.size()));
    }
  }
  if (state != nullptr) args.row_state = state->view();
  KernelWishes wishes = config.kernel;
  if (which == Gradient::kAfterForward) wishes.schedule = "auto";
  const tileloss_plan plan = make_plan(function, pass, args, wishes);
  if (which == Gradient::kOwn) results.plan = plan;
  const Timer timer;
  kernel(function, pass, args, plan, nullptr);
  const double seconds = timer.seconds();
  if (fused) results.fused_logp = logp.read(row_outputs()[kLogp]);
  results.gradients.push_back(std::move(gradient));
  return seconds;
}

}  // namespace

CheckInputs make_inputs(const GradcheckConfig& config, ThreadTeam& team) {
  CheckInputs inputs;
  if (config.source.is_file) {
    load_file(config, team, inputs);
  } else {
    generate(config, team, inputs);
  }
  if (config.is_linear()) {
    finish_linear(config, team, inputs);
  } else {
    poison_unread(inputs, inputs.logits, inputs.format);
    if (inputs.has_teacher) poison_unread(inputs, inputs.teacher, inputs.format);
    if (inputs.has_probs) poison_unread(inputs, inputs.probs, inputs.probs_format);
  }
  if (config.is_policy()) draw_policy_logps(config, team, inputs);
  inputs.token_weights = random_weights(config.token_weights, config.seed, 0, inputs.rows);
  inputs.class_weights = random_weights(config.class_weights, config.seed, 1, inputs.valid);
  set_upstream(config, inputs);
  return inputs;
}

KernelResults run_kernels(const GradcheckConfig& config, const CheckInputs& inputs, const KernelCall& kernel) {
  KernelResults results;
  tileloss_plan_init(&results.plan);
  std::optional<RowState> state;
  if (config.function.has_row_state()) state.emplace(inputs.rows, config.wants("entropy") || config.is_policy());
  RowState* const row_state = state ? &*state : nullptr;
  results.forward_s = run_forward(config, inputs, kernel, row_state, results);
  check_stop();
  results.kernel_s = run_gradient(config, inputs, kernel, Gradient::kOwn, nullptr, results);
  check_stop();
  results.backward_s = run_gradient(config, inputs, kernel, Gradient::kAfterForward, row_state, results);
  check_stop();
  if (!state) return results;
  results.state_max = std::move(state->max);
  results.state_sum = std::move(state->sum);
  results.state_target = std::move(state->target);
  results.state_entropy_sum = std::move(state->entropy_sum);
  return results;
}

}  // namespace tileloss::tools
