#include "judge/inputs/call.h"

#include <algorithm>
#include <cstring>

#include "judge/inputs/linear.h"

namespace tileloss::tools {
namespace {

using oracle::NumberFormat;
using oracle::StoredMatrix;

tileloss_matrix abi_matrix(const StoredMatrix& m) {
  tileloss_matrix matrix = tileloss_make_matrix(m.data, abi_dtype(m.format), m.rows, m.cols, m.row_stride);
  matrix.col_stride = m.col_stride;
  return matrix;
}

// In rows of columns as the logits.
tileloss_matrix abi_logits(const CheckInputs& inputs, const void* data, NumberFormat format) {
  return tileloss_make_matrix(data, abi_dtype(format), inputs.rows, inputs.cols, inputs.cols);
}

// One value is broadcast over `size` rows by stride 0.
tileloss_vector broadcast(const Upstream& values, int64_t size) {
  tileloss_vector vector = vector_of(values);
  if (values.size() == 1 && size != 1) {
    vector.size = size;
    vector.stride = 0;
  }
  return vector;
}

// What accumulation adds to, by row.
void prefill(const StoredMatrix& view, uint64_t seed, HugeBuffer& buffer) {
  std::vector<char> row(static_cast<size_t>(view.cols) * oracle::format_info(view.format).bytes);
  LogitsSpec spec;
  spec.std = 1e-3;
  for (int64_t v = 0; v < view.rows; ++v) {
    fill_logits_row(spec, seed, v, -1, view.format, row.data(), view.cols);
    put_row(view, buffer, v, row.data());
  }
}

}  // namespace

tileloss_vector vector_of(const std::vector<float>& values) {
  if (values.empty()) return {};
  return tileloss_make_vector(values.data(), TILELOSS_FLOAT32, std::ssize(values));
}

tileloss_args base_args(const CheckInputs& inputs, const void* logits) {
  tileloss_args args;
  tileloss_args_init(&args);
  const TargetTensors& target = inputs.target;
  if (inputs.linear) {
    args.hidden = abi_matrix(inputs.linear->hidden_view);
    args.head = abi_matrix(inputs.linear->head_view);
    args.bias = vector_of(inputs.linear->bias);
    if (const LinearTensors* low_rank = inputs.linear->low_rank.get(); low_rank != nullptr) {
      args.hidden_r = abi_matrix(low_rank->hidden_view);
      args.head_r = abi_matrix(low_rank->head_view);
    }
  } else {
    args.logits = abi_logits(inputs, logits, inputs.format);
    const int64_t stride = inputs.group_rows > 0 ? (inputs.group_rows + 1) * inputs.cols : 0;
    args.row_groups = {inputs.group_rows, stride, stride, target.argument != nullptr ? stride : 0};
  }
  if (target.argument != nullptr) args.*target.argument = abi_logits(inputs, target.matrix.data(), target.format);
  if (target.columns > 0) {
    args.teacher_ids = tileloss_make_matrix(target.ids.data(), TILELOSS_INT64, inputs.rows, target.columns, target.columns);
    args.teacher_logprobs =
        tileloss_make_matrix(target.log_q.data(), TILELOSS_FLOAT32, inputs.rows, target.columns, target.columns);
  }
  if (target.linear) {
    args.teacher_hidden = abi_matrix(target.linear->hidden_view);
    args.teacher_head = abi_matrix(target.linear->head_view);
    args.teacher_bias = vector_of(target.linear->bias);
  }
  if (const AllowedSets& sets = inputs.allowed; !sets.words.empty()) {
    args.allowed =
        tileloss_make_matrix(sets.words.data(), TILELOSS_INT32, inputs.rows, sets.row_words, sets.is_shared ? 0 : sets.row_words);
  }
  const std::vector<int64_t>& labels = inputs.slots.empty() ? inputs.labels : inputs.slots;
  args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, inputs.rows * inputs.labels_per_row);
  args.labels_per_row = inputs.labels_per_row;
  args.token_weights = vector_of(inputs.token_weights);
  args.class_weights = vector_of(inputs.class_weights);
  inputs.policy.add_to(args);
  return args;
}

void add_upstream(const GradcheckConfig& config, const CheckInputs& inputs, tileloss_args& args) {
  args.loss_grad = broadcast(inputs.loss_grad, config.per_row_loss() ? inputs.rows : 1);
  args.logp_grad = broadcast(inputs.logp_grad, inputs.rows * inputs.labels_per_row);
  args.lse_grad = broadcast(inputs.lse_grad, inputs.rows);
  args.entropy_grad = broadcast(inputs.entropy_grad, inputs.rows);
  args.mean_logit_grad = broadcast(inputs.mean_logit_grad, inputs.rows);
}

void plan_shapes(const GradcheckConfig& config, const CheckInputs& inputs) {
  tileloss_args args = base_args(inputs, nullptr);
  if (config.is_linear()) {
    add_gradients(linear_gradients(config, inputs), args);
  } else {
    args.dlogits = args.logits;
  }
  if (config.function.is_loss())
    args.loss = tileloss_make_vector(nullptr, TILELOSS_FLOAT32, config.per_row_loss() ? inputs.rows : 1);
  make_plan(config.function, config.function.is_loss() ? TILELOSS_VALUE_AND_GRAD : TILELOSS_BACKWARD, args, config.kernel);
}

// ------------------------------------------------------------------------------------------------------- with the LM head

std::vector<LinearGradient> linear_gradients(const GradcheckConfig& config, const CheckInputs& inputs) {
  const NumberFormat dhead_format = config.linear.float32_dhead ? NumberFormat::kFloat32 : inputs.format;
  std::vector<LinearGradient> gradients;
  for (const LinearOutput which : config.linear.gradients) {
    const LinearTensors& operands = is_low_rank(which) ? *inputs.linear->low_rank : *inputs.linear;
    StoredMatrix view{nullptr, NumberFormat::kFloat32, inputs.cols, 1, 1, 1};
    if (which != LinearOutput::kDbias) {
      view = is_by_token(which) ? operands.hidden_view : operands.head_view;
      view.data = nullptr;
      view.format = is_by_token(which) ? inputs.format : dhead_format;
    }
    gradients.push_back({which, view, {}, {}});
  }
  return gradients;
}

void allocate(const GradcheckConfig& config, LinearGradient& gradient) {
  const int64_t bytes = std::max<int64_t>(matrix_bytes(gradient.view), 1);
  gradient.data = HugeBuffer(bytes, name_of(gradient.which));
  gradient.view.data = gradient.data.data();
  std::memset(gradient.data.data(), 0xFF, static_cast<size_t>(bytes));
  if (!config.linear.accumulate || is_by_token(gradient.which)) return;
  if (gradient.which != LinearOutput::kDbias) {
    prefill(gradient.view, config.seed, gradient.data);
  } else {
    Random random(config.seed, Stream::kWeights, 3);
    for (int64_t j = 0; j < gradient.view.rows; ++j) gradient.data.as<float>()[j] = static_cast<float>(random.next_normal());
  }
  gradient.before = HugeBuffer(bytes, "a gradient, before");
  std::memcpy(gradient.before.data(), gradient.data.data(), static_cast<size_t>(bytes));
}

void add_gradients(const std::vector<LinearGradient>& gradients, tileloss_args& args) {
  constexpr tileloss_matrix tileloss_args::*kMatrices[] = {&tileloss_args::dhidden, &tileloss_args::dhead, nullptr,
                                                           &tileloss_args::dhidden_r, &tileloss_args::dhead_r};
  for (const LinearGradient& gradient : gradients) {
    if (const auto matrix = kMatrices[static_cast<size_t>(gradient.which)]; matrix != nullptr) {
      args.*matrix = abi_matrix(gradient.view);
    } else {
      args.dbias = tileloss_make_vector(gradient.view.data, TILELOSS_FLOAT32, gradient.view.rows);
    }
  }
}

}  // namespace tileloss::tools
