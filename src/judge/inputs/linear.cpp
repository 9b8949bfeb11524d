#include "judge/inputs/linear.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"

namespace tileloss::tools {
namespace {

using oracle::NumberFormat;
using oracle::StoredMatrix;

// Of the draws, to keep them apart from each other and from the logits'.
constexpr uint64_t kHiddenSeed = 0x68696464656eULL;
constexpr uint64_t kHeadSeed = 0x68656164ULL;
constexpr uint64_t kLowRankSeed = 0x6c6f776cULL;

int64_t element_bytes(NumberFormat format) { return static_cast<int64_t>(oracle::format_info(format).bytes); }

void allocate(LinearTensors& tensors) {
  tensors.hidden = HugeBuffer(std::max<int64_t>(matrix_bytes(tensors.hidden_view), 1), "hidden");
  tensors.head = HugeBuffer(matrix_bytes(tensors.head_view), "lm_head");
  tensors.hidden_view.data = tensors.hidden.data();
  tensors.head_view.data = tensors.head.data();
}

const StoredTensor& head_tensor(const GradcheckConfig& config, const TensorFile& file) {
  const StoredTensor& head = file.tensor(config.linear.head_name);
  if (head.shape.size() != 2 || head.elements() == 0) file.refuse(head, "expected a matrix [V,H]");
  return head;
}

void check_head(const TensorFile& file, const StoredTensor& head, const StoredTensor& hidden) {
  const int64_t width = hidden.shape.back();
  if (head.shape[1] == width && head.dtype == hidden.dtype) return;
  file.refuse(head, formatted("expected {} with rows of {}, as {} has, got {} with rows of {}", hidden.dtype, width,
                              shown(hidden.name), head.dtype, head.shape[1]));
}

// Rows that lie side by side in the file, put where the view has them; some MB at a time.
void read_rows(const TensorFile& file, const StoredTensor& tensor, const StoredMatrix& view, HugeBuffer& buffer) {
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

void read_bias(const TensorFile& file, const StoredTensor& tensor, std::vector<float>& bias) {
  if (tensor.dtype != "F32" || tensor.elements() != std::ssize(bias)) {
    file.refuse(tensor,
                formatted("expected F32 with {} elements, got {} {}", bias.size(), tensor.dtype, shape_text(tensor.shape)));
  }
  file.read(tensor, 0, std::ssize(bias) * static_cast<int64_t>(sizeof(float)), bias.data());
}

// With the rows of hidden and head.
void load_low_rank(const GradcheckConfig& config, const TensorFile& file, const StoredTensor& hidden, CheckInputs& inputs) {
  const StoredTensor& hidden_r = file.tensor(config.linear.hidden_r_name);
  const StoredTensor& head_r = file.tensor(config.linear.head_r_name);
  std::vector<int64_t> shape = hidden.shape;
  if (!hidden_r.shape.empty()) shape.back() = hidden_r.shape.back();
  if (hidden_r.shape != shape || hidden_r.dtype != hidden.dtype || hidden_r.elements() == 0) {
    file.refuse(hidden_r, formatted("expected {} with the rows of {}, got {} {}", hidden.dtype, shown(hidden.name),
                                    hidden_r.dtype, shape_text(hidden_r.shape)));
  }
  if (head_r.shape.size() != 2 || head_r.shape[0] != inputs.cols)
    file.refuse(head_r, formatted("expected a matrix [{},R], got {}", inputs.cols, shape_text(head_r.shape)));
  check_head(file, head_r, hidden_r);
  add_low_rank(config, hidden_r.shape.back(), inputs);
  LinearTensors& tensors = *inputs.linear->low_rank;
  allocate(tensors);
  file.read(hidden_r, 0, matrix_bytes(tensors.hidden_view), tensors.hidden.data());
  read_rows(file, head_r, tensors.head_view, tensors.head);
}

}  // namespace

int64_t matrix_bytes(const StoredMatrix& matrix) { return matrix.rows * matrix.cols * element_bytes(matrix.format); }

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

LinearTensors make_linear(const GradcheckConfig& config, int64_t hidden, const CheckInputs& inputs) {
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

void add_low_rank(const GradcheckConfig& config, int64_t rank, CheckInputs& inputs) {
  inputs.linear->low_rank = std::make_unique<LinearTensors>(make_linear(config, rank, inputs));
  inputs.linear->low_rank->bias.clear();
}

int64_t head_rows(const GradcheckConfig& config, const TensorFile& file) { return head_tensor(config, file).shape[0]; }

void load_linear(const GradcheckConfig& config, const TensorFile& file, CheckInputs& inputs) {
  const StoredTensor& hidden = file.tensor(config.linear.hidden_name);
  const StoredTensor& head = head_tensor(config, file);
  const int64_t width = hidden.shape.back();
  check_head(file, head, hidden);
  if (config.linear.hidden_size > 0 && config.linear.hidden_size != width) {
    file.refuse(hidden,
                formatted("expected rows of the config's hidden_size, {}, got rows of {}", config.linear.hidden_size, width));
  }
  LinearTensors& tensors = inputs.linear.emplace(make_linear(config, width, inputs));
  allocate(tensors);
  file.read(hidden, 0, matrix_bytes(tensors.hidden_view), tensors.hidden.data());
  read_rows(file, head, tensors.head_view, tensors.head);
  if (!config.linear.bias_name.empty()) read_bias(file, file.tensor(config.linear.bias_name), tensors.bias);
  if (!config.linear.hidden_r_name.empty()) load_low_rank(config, file, hidden, inputs);
}

void draw_linear(double std, uint64_t seed, ThreadTeam& team, LinearTensors& tensors) {
  if (tensors.low_rank != nullptr) {
    std /= std::sqrt(2.0);
    draw_linear(std, seed ^ kLowRankSeed, team, *tensors.low_rank);
  }
  allocate(tensors);
  const int64_t width = tensors.hidden_view.cols;
  LogitsSpec hidden_spec, head_spec;
  head_spec.std = std / std::sqrt(static_cast<double>(width));
  const auto fill = [&](const LogitsSpec& spec, uint64_t draws, const StoredMatrix& view, HugeBuffer& buffer) {
    std::vector<std::vector<char>> rows(static_cast<size_t>(team.size()),
                                        std::vector<char>(static_cast<size_t>(width * element_bytes(view.format))));
    team.for_each(view.rows, [&](int64_t row, int thread) {
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

void finish_linear(const GradcheckConfig& config, ThreadTeam& team, const CheckInputs& inputs, LinearTensors& tensors) {
  if (tensors.low_rank != nullptr) finish_linear(config, team, inputs, *tensors.low_rank);
  std::vector<uint8_t> used;
  for (int64_t row = 0; row < inputs.rows; ++row) used.push_back(inputs.is_ignored(row) ? 0 : 1);
  const std::vector<char> unread(static_cast<size_t>(tensors.hidden_view.cols * element_bytes(inputs.format)), '\xff');
  for (int64_t row = 0; row < inputs.rows; ++row) {
    if (used[static_cast<size_t>(row)] == 0) put_row(tensors.hidden_view, tensors.hidden, row, unread.data());
  }
  for (int64_t v = inputs.valid; v < inputs.cols; ++v) put_row(tensors.head_view, tensors.head, v, unread.data());
  const bool is_bfloat16 = config.linear.compute_dtype == TILELOSS_BFLOAT16 ||
                           (config.linear.compute_dtype == TILELOSS_NONE && inputs.format == NumberFormat::kBfloat16);
  tensors.operands = make_operands(tensors.hidden_view, tensors.head_view, inputs.valid, tensors.bias,
                                   is_bfloat16 ? NumberFormat::kBfloat16 : NumberFormat::kFloat32, used, team.size());
  if (tensors.low_rank != nullptr)
    tensors.operands->low_rank = std::make_shared<const oracle::LinearOperands>(*std::exchange(tensors.low_rank->operands, {}));
  tensors.norms.emplace(*tensors.operands);
}

}  // namespace tileloss::tools
