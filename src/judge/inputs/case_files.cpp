#include "judge/inputs/case_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "schema/tensors.h"
#include "support/exit_codes.h"
#include "support/format.h"

namespace tileloss::tools {
namespace {

using Shape = std::vector<int64_t>;

// ------------------------------------------------------------------------------------------------------------- inputs

const char* stored_dtype(tileloss_dtype dtype) {
  switch (dtype) {
    case TILELOSS_FLOAT32: return "F32";
    case TILELOSS_BFLOAT16: return "BF16";
    case TILELOSS_FLOAT16: return "F16";
    case TILELOSS_INT64: return "I64";
    case TILELOSS_INT32: return "I32";
    default: return "U8";
  }
}

// Each tensor of the call that has a value; one that is broadcast over the rows once.
std::vector<StoredTensor> tensors_of(const tileloss_args& args) {
  std::vector<StoredTensor> tensors;
  const auto add = [&](const char* name, tileloss_dtype dtype, Shape shape, const void* data) {
    int64_t bytes = impl::element_bytes(dtype);
    for (const int64_t size : shape) bytes *= size;
    tensors.push_back({name, stored_dtype(dtype), std::move(shape), bytes, static_cast<const char*>(data)});
  };
  for (const impl::TensorSlot& slot : impl::tensor_slots()) {
    if (!impl::present(args, slot)) continue;
    if (slot.matrix != nullptr) {
      const tileloss_matrix& matrix = args.*slot.matrix;
      add(slot.name, matrix.dtype, {matrix.row_stride == 0 ? 1 : matrix.rows, matrix.cols}, matrix.data);
    } else {
      const tileloss_vector& vector = args.*slot.vector;
      const bool is_of_labels = slot.vector == &tileloss_args::labels || slot.vector == &tileloss_args::logp_grad;
      const int64_t count = is_of_labels ? args.labels_per_row : 1, size = vector.stride == 0 ? 1 : vector.size;
      add(slot.name, vector.dtype, size > 1 && count > 1 ? Shape{size / count, count} : Shape{size}, vector.data);
    }
  }
  return tensors;
}

// ------------------------------------------------------------------------------------------------------------ outputs

// What a row output may be stored as; the first is the kernels' own.
std::vector<std::string_view> stored_dtypes(tileloss_dtype dtype) {
  switch (dtype) {
    case TILELOSS_INT64: return {"I64", "I32"};
    case TILELOSS_UINT8: return {"U8", "BOOL"};
    default: return {"F32"};
  }
}

// Reads the outputs of one file, by name.
class OutputReader {
 public:
  OutputReader(const TensorFile& file, const GradcheckConfig& config, const CheckInputs& inputs)
      : file_(file), config_(config), inputs_(inputs) {}

  KernelResults read() {
    KernelResults results;
    tileloss_plan_init(&results.plan);
    for (const StoredTensor& tensor : file_.tensors()) {
      if (!read_tensor(tensor, results)) {
        file_.refuse(tensor, formatted("is no output of {}, which are: {}", config_.function.name(), fmt::join(names(), ", ")));
      }
    }
    if (file_.tensors().empty()) {
      throw ToolError(kExitUsage, formatted("{}: expected at least one output of {}: {}, got none", file_.name(),
                                            config_.function.name(), fmt::join(names(), ", ")));
    }
    std::sort(gradient_.linear.begin(), gradient_.linear.end(),
              [](const LinearGradient& a, const LinearGradient& b) { return a.which < b.which; });
    if (has_gradient_) results.gradients.push_back(std::move(gradient_));
    return results;
  }

 private:
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    if (config_.function.is_loss()) names.emplace_back("loss");
    for (const std::string& name : output_names(config_.has_divergence())) names.push_back(name);
    if (!config_.function.metrics().empty()) names.emplace_back("metrics");
    if (config_.is_linear()) {
      for (const LinearOutput which : linear_outputs()) names.emplace_back(name_of(which));
    } else {
      names.emplace_back("dlogits");
    }
    return names;
  }

  // Of the case.
  std::vector<LinearOutput> linear_outputs() const {
    std::vector<LinearOutput> outputs{LinearOutput::kDhidden, LinearOutput::kDhead, LinearOutput::kDbias};
    if (inputs_.linear->low_rank != nullptr) outputs.insert(outputs.end(), {LinearOutput::kDhiddenR, LinearOutput::kDheadR});
    return outputs;
  }

  // False for a name that is no output of the function.
  bool read_tensor(const StoredTensor& tensor, KernelResults& results) {
    for (size_t o = 0; o < kOutputCount; ++o) {
      const RowOutput& output = checked_outputs()[o];
      if (output.of_pair && !config_.has_divergence()) continue;
      if (tensor.name == output.name) return read_row_output(tensor, output, results.outputs[o]);
    }
    if (tensor.name == "loss" && config_.function.is_loss()) return read_loss(tensor, results);
    const auto metrics = static_cast<int64_t>(config_.function.metrics().size());
    if (tensor.name == "metrics" && metrics > 0) return read_floats(tensor, {{metrics}}, results.metrics);
    if (config_.is_linear()) return read_linear(tensor);
    return tensor.name == "dlogits" && read_dlogits(tensor);
  }

  // [N] or, where the rows are those of a batch, [B,T]; with `columns` behind them.
  std::vector<Shape> row_shapes(std::optional<int64_t> columns = std::nullopt) const {
    std::vector<Shape> shapes = {{inputs_.rows}};
    if (!config_.policy.use_offsets) shapes.push_back({inputs_.batch_size, inputs_.seq_len});
    for (Shape& shape : shapes) {
      if (columns) shape.push_back(*columns);
    }
    return shapes;
  }

  void check_shape(const StoredTensor& tensor, const std::vector<Shape>& shapes) const {
    std::vector<std::string> expected;
    for (const Shape& shape : shapes) {
      if (tensor.shape == shape) return;
      expected.push_back(shape_text(shape));
    }
    file_.refuse(tensor, formatted("expected {}, got {}", fmt::join(expected, " or "), shape_text(tensor.shape)));
  }

  void check_dtype(const StoredTensor& tensor, const std::vector<std::string_view>& dtypes) const {
    for (const std::string_view dtype : dtypes) {
      if (tensor.dtype == dtype) return;
    }
    file_.refuse(tensor, formatted("expected {}, got {}", fmt::join(dtypes, " or "), tensor.dtype));
  }

  bool read_floats(const StoredTensor& tensor, const std::vector<Shape>& shapes, std::vector<float>& values) const {
    check_dtype(tensor, {"F32"});
    check_shape(tensor, shapes);
    values.resize(static_cast<size_t>(tensor.elements()));
    file_.read(tensor, 0, tensor.bytes, values.data());
    return true;
  }

  // With reduction none the rows' losses are what is judged.
  bool read_loss(const StoredTensor& tensor, KernelResults& results) const {
    read_floats(tensor, config_.per_row_loss() ? row_shapes() : std::vector<Shape>{{}, {1}}, results.loss);
    if (config_.per_row_loss()) results.per_loss = results.loss;
    return true;
  }

  bool read_row_output(const StoredTensor& tensor, const RowOutput& output, std::vector<double>& values) const {
    check_dtype(tensor, stored_dtypes(output.dtype));
    const bool is_of_labels = &output == &checked_outputs()[kLogp] && inputs_.labels_per_row > 1;
    check_shape(tensor, is_of_labels ? row_shapes(inputs_.labels_per_row) : row_shapes());
    values = widen(tensor.dtype == "I32" ? TILELOSS_INT32 : output.dtype, file_.read(tensor));
    return true;
  }

  HugeBuffer read_matrix(const StoredTensor& tensor, const std::vector<Shape>& shapes, oracle::NumberFormat& format) {
    format = number_format(file_, tensor);
    check_shape(tensor, shapes);
    HugeBuffer buffer(std::max<int64_t>(tensor.bytes, 1), "an output");
    file_.read(tensor, 0, tensor.bytes, buffer.data());
    has_gradient_ = true;
    return buffer;
  }

  bool read_dlogits(const StoredTensor& tensor) {
    gradient_.dlogits = read_matrix(tensor, row_shapes(inputs_.cols), gradient_.dlogits_format);
    return true;
  }

  bool read_linear(const StoredTensor& tensor) {
    const std::vector<LinearOutput> all = linear_outputs();
    const auto which = std::ranges::find_if(all, [&](LinearOutput one) { return tensor.name == name_of(one); });
    if (which == all.end()) return false;
    const bool is_dbias = *which == LinearOutput::kDbias;
    const LinearTensors& operands = is_low_rank(*which) ? *inputs_.linear->low_rank : *inputs_.linear;
    const int64_t rows = is_by_token(*which) ? inputs_.rows : inputs_.cols, cols = is_dbias ? 1 : operands.hidden_view.cols;
    if (is_dbias) check_dtype(tensor, {"F32"});
    const std::vector<Shape> shapes = is_by_token(*which) ? row_shapes(cols)
                                      : is_dbias          ? std::vector<Shape>{{rows}}
                                                          : std::vector<Shape>{{rows, cols}};
    LinearGradient gradient{*which, {nullptr, {}, rows, cols, cols, 1}, {}, {}};
    gradient.data = read_matrix(tensor, shapes, gradient.view.format);
    gradient.view.data = gradient.data.data();
    gradient_.linear.push_back(std::move(gradient));
    return true;
  }

  const TensorFile& file_;
  const GradcheckConfig& config_;
  const CheckInputs& inputs_;
  CheckedGradient gradient_;
  bool has_gradient_ = false;
};

}  // namespace

void forget_kernels(GradcheckConfig& config) {
  if (config.linear.accumulate) {
    throw ToolError(kExitUsage, config.origins.at("accumulate") + ": expected false where outputs are judged, got true");
  }
  config.kernel = {};
  config.in_place = config.row_groups = config.mutants = config.strict = false;
  config.linear.transposed_head = false;
}

std::vector<StoredTensor> input_tensors(const GradcheckConfig& config, const CheckInputs& inputs) {
  tileloss_args args = base_args(inputs, inputs.logits.data());
  add_upstream(config, inputs, args);
  const std::vector<int64_t>& offsets = inputs.policy.offsets;  // of a batch too
  if (!offsets.empty()) args.sequence_offsets = tileloss_make_vector(offsets.data(), TILELOSS_INT64, std::ssize(offsets));
  return tensors_of(args);
}

Json described_case(const GradcheckConfig& config, const CheckInputs& inputs) {
  Json described = {{"function", config.function.name()}, {"options", config.function.to_json()},
                    {"batch_size", inputs.batch_size},    {"seq_len", inputs.seq_len},
                    {"outputs", config.outputs},          {"mutants", config.mutants},
                    {"in_place", config.in_place}};
  if (config.is_linear()) {
    Json& gradients = described["gradients"] = Json::array();
    for (const LinearOutput which : config.linear.gradients) gradients.push_back(name_of(which));
    described["head_layout"] = config.linear.transposed_head ? "hv" : "vh";
  }
  return described;
}

KernelResults read_outputs(const TensorFile& file, const GradcheckConfig& config, const CheckInputs& inputs) {
  return OutputReader(file, config, inputs).read();
}

}  // namespace tileloss::tools
