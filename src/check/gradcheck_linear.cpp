// The inputs and buffers of gradcheck's level linear.
#include "check/gradcheck_linear.h"

#include <cmath>
#include <cstring>

#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/progress.h"
#include "support/signals.h"

namespace tileloss::tools {
namespace {

using reference::NumberFormat;
using reference::StoredMatrix;

// Of the draws, to keep them apart from each other and from the logits'.
constexpr uint64_t kHiddenSeed = 0x68696464656eULL;
constexpr uint64_t kHeadSeed = 0x68656164ULL;
constexpr uint64_t kTeacherSeed = 0x7465616368ULL;

// Rows of the teacher's logits that are held at a time.
constexpr size_t kHeldRows = 64;

int64_t element_bytes(NumberFormat format) { return static_cast<int64_t>(reference::format_info(format).bytes); }

int64_t matrix_bytes(const StoredMatrix& m) { return m.rows * m.cols * element_bytes(m.format); }

tileloss_matrix abi_matrix(const StoredMatrix& m) {
  tileloss_matrix matrix = tileloss_make_matrix(m.data, abi_dtype(m.format), m.rows, m.cols, m.row_stride);
  matrix.col_stride = m.col_stride;
  return matrix;
}

StoredMatrix like(StoredMatrix m, NumberFormat format, const HugeBuffer& buffer) {
  m.data = buffer.data();
  m.format = format;
  return m;
}

LinearTensors make_views(const GradcheckConfig& config, int64_t hidden, const CheckInputs& inputs) {
  if (inputs.cols > (int64_t{1} << 50) / hidden) {
    throw ToolError(kExitUsage, formatted("vocab_size * hidden_size: a head of {} rows of {} has more than 2^50 elements",
                                          inputs.cols, hidden));
  }
  LinearTensors tensors;
  tensors.hidden_view = {nullptr, inputs.format, inputs.rows, hidden, hidden, 1};
  tensors.head_view = {nullptr, inputs.format, inputs.cols, hidden, hidden, 1};
  if (config.linear.transposed_head) {
    tensors.head_view.row_stride = 1;
    tensors.head_view.col_stride = inputs.cols;
  }
  if (config.linear.bias) tensors.bias.assign(static_cast<size_t>(inputs.cols), std::numeric_limits<float>::quiet_NaN());
  return tensors;
}

void allocate(LinearTensors& tensors) {
  tensors.hidden = HugeBuffer(std::max<int64_t>(matrix_bytes(tensors.hidden_view), 1), "hidden");
  tensors.head = HugeBuffer(matrix_bytes(tensors.head_view), "lm_head");
  tensors.hidden_view.data = tensors.hidden.data();
  tensors.head_view.data = tensors.head.data();
}

// A row that lies side by side, put where the view has it.
void put_row(const StoredMatrix& view, HugeBuffer& buffer, int64_t row, const char* from) {
  const int64_t bytes = element_bytes(view.format);
  if (view.col_stride == 1) {
    std::memcpy(buffer.data() + row * view.row_stride * bytes, from, static_cast<size_t>(view.cols * bytes));
    return;
  }
  for (int64_t h = 0; h < view.cols; ++h) {
    std::memcpy(buffer.data() + (row * view.row_stride + h * view.col_stride) * bytes, from + h * bytes,
                static_cast<size_t>(bytes));
  }
}

const StoredTensor& head_tensor(const GradcheckConfig& config, const SafetensorsFile& file) {
  const StoredTensor& head = file.tensor(config.linear.head_name);
  if (head.shape.size() != 2 || head.elements() == 0) file.refuse(head, "expected a matrix [V,H]");
  return head;
}

// Rows that lie side by side in the file, put where the view has them; some MB at a time.
void read_rows(const SafetensorsFile& file, const StoredTensor& tensor, const StoredMatrix& view, HugeBuffer& buffer) {
  constexpr int64_t kBytesAtOnce = int64_t{4} << 20;
  const int64_t row_bytes = view.cols * element_bytes(view.format);
  const int64_t rows_at_once = std::max<int64_t>(kBytesAtOnce / row_bytes, 1);
  std::vector<char> rows(static_cast<size_t>(std::min(rows_at_once, view.rows) * row_bytes));
  for (int64_t first = 0; first < view.rows; first += rows_at_once) {
    const int64_t count = std::min(rows_at_once, view.rows - first);
    file.read(tensor, first * row_bytes, count * row_bytes, rows.data());
    for (int64_t row = 0; row < count; ++row) put_row(view, buffer, first + row, rows.data() + row * row_bytes);
  }
}

void read_bias(const SafetensorsFile& file, const StoredTensor& tensor, std::vector<float>& bias) {
  if (tensor.dtype != "F32" || tensor.elements() != std::ssize(bias)) {
    file.refuse(tensor,
                formatted("expected F32 with {} elements, got {} {}", bias.size(), tensor.dtype, shape_text(tensor.shape)));
  }
  file.read(tensor, 0, std::ssize(bias) * static_cast<int64_t>(sizeof(float)), bias.data());
}

// What accumulation adds to, by row.
void prefill(const StoredMatrix& view, uint64_t seed, HugeBuffer& buffer) {
  std::vector<char> row(static_cast<size_t>(view.cols * element_bytes(view.format)));
  LogitsSpec spec;
  spec.std = 1e-3;
  for (int64_t v = 0; v < view.rows; ++v) {
    fill_logits_row(spec, seed, v, -1, view.format, row.data(), view.cols);
    put_row(view, buffer, v, row.data());
  }
}

// hidden ~ normal, head ~ std / sqrt(H) normal: logits of that std.
void generate(double std, uint64_t seed, ThreadTeam& team, LinearTensors& tensors) {
  allocate(tensors);
  const int64_t width = tensors.hidden_view.cols;
  LogitsSpec hidden_spec, head_spec;
  head_spec.std = std / std::sqrt(static_cast<double>(width));
  const auto fill = [&](const LogitsSpec& spec, uint64_t draws, const StoredMatrix& view, HugeBuffer& buffer) {
    std::vector<std::vector<char>> rows(static_cast<size_t>(team.size()),
                                        std::vector<char>(static_cast<size_t>(width * element_bytes(view.format))));
    team.for_each(view.rows, [&](int64_t row, int thread) {
      check_stop();
      char* values = rows[static_cast<size_t>(thread)].data();
      fill_logits_row(spec, seed ^ draws, row, -1, view.format, values, width);
      put_row(view, buffer, row, values);
    });
  };
  fill(hidden_spec, kHiddenSeed, tensors.hidden_view, tensors.hidden);
  fill(head_spec, kHeadSeed, tensors.head_view, tensors.head);
  Random random(seed ^ kHeadSeed, Stream::kWeights, 2);
  for (float& value : tensors.bias) value = static_cast<float>(random.next_normal());
}

void finish(const GradcheckConfig& config, const std::vector<uint8_t>& used, ThreadTeam& team, const CheckInputs& inputs,
            LinearTensors& tensors) {
  const std::vector<char> unread(static_cast<size_t>(tensors.hidden_view.cols * element_bytes(inputs.format)), '\xff');
  for (int64_t row = 0; row < inputs.rows; ++row) {
    if (used[static_cast<size_t>(row)] == 0) put_row(tensors.hidden_view, tensors.hidden, row, unread.data());
  }
  for (int64_t v = inputs.valid; v < inputs.cols; ++v) put_row(tensors.head_view, tensors.head, v, unread.data());
  const bool is_bfloat16 = config.linear.compute_dtype == TILELOSS_BFLOAT16 ||
                           (config.linear.compute_dtype == TILELOSS_NONE && inputs.format == NumberFormat::kBfloat16);
  tensors.operands = make_operands(tensors.hidden_view, tensors.head_view, inputs.valid, tensors.bias,
                                   is_bfloat16 ? NumberFormat::kBfloat16 : NumberFormat::kFloat32, used, team.size());
  tensors.norms.emplace(*tensors.operands);
}

tileloss_vector abi_bias(const std::vector<float>& bias) {
  if (bias.empty()) return {};
  return tileloss_make_vector(bias.data(), TILELOSS_FLOAT32, static_cast<int64_t>(bias.size()));
}

}  // namespace

void set_linear_shape(const GradcheckConfig& config, CheckInputs& inputs) {
  inputs.linear = make_views(config, config.linear.hidden_size, inputs);
  if (config.has_teacher()) inputs.teacher_linear = make_views(config, config.linear.teacher_hidden_size, inputs);
}

int64_t head_rows(const GradcheckConfig& config, const SafetensorsFile& file) { return head_tensor(config, file).shape[0]; }

void load_linear(const GradcheckConfig& config, const SafetensorsFile& file, CheckInputs& inputs) {
  const StoredTensor& hidden = file.tensor(config.linear.hidden_name);
  const StoredTensor& head = head_tensor(config, file);
  const int64_t width = hidden.shape.back();
  if (head.shape[1] != width || head.dtype != hidden.dtype) {
    file.refuse(head, formatted("expected {} with rows of {}, as {} has, got {} with rows of {}", hidden.dtype, width,
                                shown(hidden.name), head.dtype, head.shape[1]));
  }
  if (config.linear.hidden_size > 0 && config.linear.hidden_size != width) {
    file.refuse(hidden,
                formatted("expected rows of the config's hidden_size, {}, got rows of {}", config.linear.hidden_size, width));
  }
  LinearTensors& tensors = inputs.linear.emplace(make_views(config, width, inputs));
  allocate(tensors);
  file.read(hidden, 0, matrix_bytes(tensors.hidden_view), tensors.hidden.data());
  read_rows(file, head, tensors.head_view, tensors.head);
  if (!config.linear.bias_name.empty()) read_bias(file, file.tensor(config.linear.bias_name), tensors.bias);
}

void generate_linear(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  generate(config.source.logits.std, config.seed, team, *inputs.linear);
  if (inputs.teacher_linear) generate(config.teacher.logits.std, config.seed ^ kTeacherSeed, team, *inputs.teacher_linear);
}

void finish_linear(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  std::vector<uint8_t> used;
  for (int64_t row = 0; row < inputs.rows; ++row) used.push_back(inputs.is_ignored(row) ? 0 : 1);
  finish(config, used, team, inputs, *inputs.linear);
  if (inputs.teacher_linear) finish(config, used, team, inputs, *inputs.teacher_linear);
}

void add_linear(const CheckInputs& inputs, tileloss_args& args) {
  args.hidden = abi_matrix(inputs.linear->hidden_view);
  args.head = abi_matrix(inputs.linear->head_view);
  args.bias = abi_bias(inputs.linear->bias);
  if (!inputs.teacher_linear) return;
  args.teacher_hidden = abi_matrix(inputs.teacher_linear->hidden_view);
  args.teacher_head = abi_matrix(inputs.teacher_linear->head_view);
  args.teacher_bias = abi_bias(inputs.teacher_linear->bias);
}

StoredMatrix dhidden_view(const CheckInputs& inputs, const CheckedGradient& gradient) {
  return like(inputs.linear->hidden_view, gradient.dhidden_format, gradient.dhidden);
}

StoredMatrix dhead_view(const CheckInputs& inputs, const CheckedGradient& gradient) {
  return like(inputs.linear->head_view, gradient.dhead_format, gradient.dhead);
}

CheckedGradient new_linear_gradient(const GradcheckConfig& config, const CheckInputs& inputs) {
  CheckedGradient gradient;
  gradient.dhidden_format = inputs.format;
  gradient.dhead_format = config.linear.float32_dhead ? NumberFormat::kFloat32 : inputs.format;
  return gradient;
}

void make_linear_gradients(const GradcheckConfig& config, const CheckInputs& inputs, CheckedGradient& gradient) {
  const auto allocate_like = [&](const StoredMatrix& view, const char* purpose) {
    HugeBuffer buffer(std::max<int64_t>(matrix_bytes(view), 1), purpose);
    std::memset(buffer.data(), 0xFF, static_cast<size_t>(buffer.bytes()));
    return buffer;
  };
  const GradcheckConfig::Linear& linear = config.linear;
  if (linear.dhidden) gradient.dhidden = allocate_like(dhidden_view(inputs, gradient), "dhidden");
  if (linear.dhead) gradient.dhead = allocate_like(dhead_view(inputs, gradient), "dhead");
  if (linear.dbias) gradient.dbias.assign(static_cast<size_t>(inputs.cols), std::numeric_limits<float>::quiet_NaN());
  if (!linear.accumulate) return;
  if (linear.dhead) {
    const StoredMatrix view = dhead_view(inputs, gradient);
    prefill(view, config.seed, gradient.dhead);
    gradient.dhead_before = allocate_like(view, "dhead, before");
    std::memcpy(gradient.dhead_before.data(), gradient.dhead.data(), static_cast<size_t>(gradient.dhead.bytes()));
  }
  Random random(config.seed, Stream::kWeights, 3);
  for (float& value : gradient.dbias) value = static_cast<float>(random.next_normal());
  gradient.dbias_before = gradient.dbias;
}

void add_linear_gradients(const GradcheckConfig& config, const CheckInputs& inputs, const CheckedGradient& gradient,
                          tileloss_args& args) {
  const GradcheckConfig::Linear& linear = config.linear;
  if (linear.dhidden) args.dhidden = abi_matrix(dhidden_view(inputs, gradient));
  if (linear.dhead) args.dhead = abi_matrix(dhead_view(inputs, gradient));
  if (linear.dbias) args.dbias = tileloss_make_vector(gradient.dbias.data(), TILELOSS_FLOAT32, inputs.cols);
}

void for_each_linear_row(const CheckInputs& inputs, std::span<const int64_t> rows, const LinearRowWork& work) {
  const LinearTensors& own = *inputs.linear;
  if (!inputs.teacher_linear) {
    for_each_linear_row(*own.operands, *own.norms, rows, [&](const LinearRow& row) { work(row, nullptr); });
    return;
  }
  const LinearTensors& other = *inputs.teacher_linear;
  for (size_t begin = 0; begin < rows.size(); begin += kHeldRows) {
    const auto block = rows.subspan(begin, std::min(kHeldRows, rows.size() - begin));
    std::vector<std::vector<double>> logits;
    std::vector<LinearRow> teacher;
    for_each_linear_row(*other.operands, *other.norms, block, [&](const LinearRow& row) {
      logits.emplace_back(row.logits.begin(), row.logits.end());
      teacher.push_back({row.row, logits.back(), {}, row.output_error});
    });
    size_t next = 0;
    for_each_linear_row(*own.operands, *own.norms, block, [&](const LinearRow& row) { work(row, &teacher[next++]); });
  }
}

void for_each_used_linear_row(const CheckInputs& inputs, const LinearRowWork& work) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < inputs.rows; ++row) {
    if (!inputs.is_ignored(row)) rows.push_back(row);
  }
  Progress progress("oracle", std::ssize(rows));
  for_each_linear_row(inputs, rows, [&](const LinearRow& row, const LinearRow* teacher) {
    check_stop();
    work(row, teacher);
    progress.step();
  });
}

}  // namespace tileloss::tools
