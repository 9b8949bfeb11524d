#include "judge/inputs/inputs.h"

#include <algorithm>
#include <cstring>

#include "judge/inputs/allowed.h"
#include "judge/inputs/call.h"
#include "judge/inputs/checked_function.h"
#include "judge/inputs/linear.h"
#include "judge/inputs/policy.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/tensor_file.h"

namespace tileloss::tools {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 50;

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
  inputs.labels_per_row = config.labels_per_row;
}

template <class T>
T element(const std::vector<char>& data, size_t index) {
  T value{};
  std::memcpy(&value, data.data() + index * sizeof value, sizeof value);
  return value;
}

// The library would refuse a label too, but knows neither the file nor the tensor's name.
void read_labels(const TensorFile& file, const StoredTensor& tensor, CheckInputs& inputs) {
  if (tensor.dtype != "I64" && tensor.dtype != "I32") {
    file.refuse(tensor, formatted("expected I64 or I32 labels, got {}", tensor.dtype));
  }
  const std::vector<char> data = file.read(tensor);
  const int64_t count = inputs.labels_per_row;
  for (int64_t n = 0; n < inputs.rows * count; ++n) {
    const auto at = static_cast<size_t>(n);
    const int64_t label = tensor.dtype == "I64" ? element<int64_t>(data, at) : element<int32_t>(data, at);
    if (count > 1) inputs.slots.push_back(label);
    if (n % count == 0) inputs.labels.push_back(label);
    if (label == inputs.ignore_index) continue;
    if (inputs.labels.back() == inputs.ignore_index) inputs.labels.back() = label;
    if ((label < 0 || label >= inputs.valid) && !inputs.is_ignored(n / count)) {
      file.refuse(tensor, formatted("row {}: expected a label from 0 to {}, or {} (ignore_index), got {}", n / count,
                                    inputs.valid - 1, inputs.ignore_index, label));
    }
  }
}

// The label of a row that the mask leaves out may be anything.
void draw_labels(const GradcheckConfig& config, CheckInputs& inputs) {
  inputs.labels = make_labels({inputs.valid, config.ignore_prob, inputs.ignore_index}, config.seed, inputs.rows);
  for (int64_t row = 0; row < inputs.rows; ++row) {
    if (!inputs.policy.in_use(row)) inputs.labels[static_cast<size_t>(row)] = row % 2 == 0 ? -1 : int64_t{1} << 40;
  }
}

void lay_out(const GradcheckConfig& config, const InputRows* rows, CheckInputs& inputs) {
  const OwnInputs& own = *config.checked->inputs;
  if (own.lay_out != nullptr) own.lay_out(config, rows, inputs);
  lay_out_allowed(config, rows, inputs);
  if (config.takes_mask() && inputs.policy.mask.empty()) inputs.policy.mask = make_mask(config, rows, inputs.rows);
}

// Once the planner has agreed, and before anything is drawn: what does not fit is refused at once.
void allocate(CheckInputs& inputs) {
  if (!inputs.linear) inputs.logits = HugeBuffer(inputs.matrix_bytes(), "logits");
  TargetTensors& target = inputs.target;
  if (target.argument == nullptr) return;
  const char* purpose = target.argument == &tileloss_args::target_probs ? "target_probs" : "teacher_logits";
  target.matrix = HugeBuffer(inputs.matrix_bytes(target.format), purpose);
}

void load_file(const GradcheckConfig& config, CheckInputs& inputs) {
  const TensorFile& file = config.file_at(config.source.path);
  const StoredTensor& logits = file.tensor(config.is_linear() ? config.linear.hidden_name : config.source.logits_name);
  inputs.format = number_format(file, logits);
  if (config.dtype && *config.dtype != inputs.format) {
    file.refuse(logits,
                formatted("expected the config's dtype, {}, got {}", oracle::format_info(*config.dtype).name, logits.dtype));
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
  const InputRows rows{file, logits};
  lay_out(config, &rows, inputs);
  if (config.is_linear()) load_linear(config, file, inputs);
  plan_shapes(config, inputs);
  const int64_t per_row = inputs.labels_per_row;
  read_labels(file, file.row_tensor(config.source.labels_name, logits, per_row > 1 ? per_row : 0), inputs);
  allocate(inputs);
  if (!config.is_linear()) read_logits(file, logits, inputs, inputs.logits);
}

void generate(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  inputs.format = *config.dtype;
  inputs.cols = config.vocab_size;
  set_shape(config, 0, inputs);
  if (config.is_linear()) inputs.linear = make_linear(config, config.linear.hidden_size, inputs);
  if (config.linear.rank > 0) add_low_rank(config, config.linear.rank, inputs);
  lay_out(config, nullptr, inputs);
  plan_shapes(config, inputs);
  allocate(inputs);
  draw_labels(config, inputs);
  if (config.is_linear()) return draw_linear(config.source.logits.std, config.seed, team, *inputs.linear);
  team.for_each(inputs.rows, [&](int64_t row, int) {
    fill_logits_row(config.source.logits, config.seed, row, inputs.labels[static_cast<size_t>(row)], inputs.format,
                    inputs.row(row), inputs.cols);
  });
}

// In [0.5, 1.5): weights near 0 would hide the rows they belong to.
std::vector<float> random_weights(bool is_given, uint64_t seed, int64_t stream_row, int64_t count) {
  std::vector<float> weights;
  if (!is_given) return weights;
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
  if (config.wants("logp")) inputs.logp_grad = make_upstream(config, 1, inputs.rows * inputs.labels_per_row);
  if (config.wants("lse")) inputs.lse_grad = make_upstream(config, 2, inputs.rows);
  if (config.wants("entropy")) inputs.entropy_grad = make_upstream(config, 3, inputs.rows);
  if (config.wants("mean_logit")) inputs.mean_logit_grad = make_upstream(config, 4, inputs.rows);
}

void poison_unread(const CheckInputs& inputs, const HugeBuffer& matrix, oracle::NumberFormat format) {
  if (matrix.empty()) return;
  const auto bytes = static_cast<int64_t>(oracle::format_info(format).bytes);
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

// A row's labels where these are several, its set, and its target in double.
class RowReader {
 public:
  explicit RowReader(const CheckInputs& inputs) : inputs_(inputs) {}

  void read(int64_t row, GivenRow& given) {
    given.allowed = allowed_ = inputs_.allowed.of_row(row, inputs_.valid);
    if (!inputs_.slots.empty()) {
      const auto slots = inputs_.slots_of(std::span(inputs_.slots), row);
      labels_.assign(slots.begin(), slots.end());
      std::replace(labels_.begin(), labels_.end(), inputs_.ignore_index, int64_t{-1});
      given.labels = labels_;
    }
    const TargetTensors& target = inputs_.target;
    if (target.argument != nullptr) {
      values_.resize(static_cast<size_t>(inputs_.valid));
      oracle::decode_row(target.format, inputs_.target_row(row), values_);
    } else if (target.columns > 0) {
      const auto count = static_cast<size_t>(target.columns), first = static_cast<size_t>(row) * count;
      const auto log_q = std::span(target.log_q).subspan(first, count);
      values_.assign(log_q.begin(), log_q.end());
      given.ids = std::span(target.ids).subspan(first, count);
    }
    given.target = {.row = row, .logits = values_};
  }

 private:
  const CheckInputs& inputs_;
  std::vector<uint8_t> allowed_;
  std::vector<int64_t> labels_;
  std::vector<double> values_;
};

// Of LM heads, a teacher's some rows at a time.
void for_each_product_row(const CheckInputs& inputs, std::span<const int64_t> rows, const RowWork& work) {
  const LinearTensors& own = *inputs.linear;
  const std::optional<LinearTensors>& teacher = inputs.target.linear;
  RowReader reader(inputs);
  for (size_t begin = 0; begin < rows.size(); begin += kBlockRows) {
    const auto block = rows.subspan(begin, std::min(kBlockRows, rows.size() - begin));
    std::vector<std::vector<double>> held;
    std::vector<LogitsRow> targets;
    if (teacher) {
      for_each_linear_row(*teacher->operands, *teacher->norms, block, [&](const LogitsRow& row) {
        held.emplace_back(row.logits.begin(), row.logits.end());
        targets.push_back({.row = row.row, .logits = held.back(), .output_error = row.output_error});
      });
    }
    size_t next = 0;
    for_each_linear_row(*own.operands, *own.norms, block, [&](const LogitsRow& row) {
      GivenRow given{row, inputs.labels[static_cast<size_t>(row.row)]};
      reader.read(row.row, given);
      if (teacher) given.target = targets[next++];
      work(given, 0);
    });
  }
}

}  // namespace

std::vector<int64_t> CheckInputs::used_rows() const {
  std::vector<int64_t> in_use;
  for (int64_t row = 0; row < rows; ++row) {
    if (!is_ignored(row)) in_use.push_back(row);
  }
  return in_use;
}

CheckInputs make_inputs(const GradcheckConfig& config, ThreadTeam& team) {
  CheckInputs inputs;
  config.source.is_file ? load_file(config, inputs) : generate(config, team, inputs);
  const OwnInputs& own = *config.checked->inputs;
  draw_allowed(config, inputs);
  if (own.draw != nullptr) own.draw(config, team, inputs);
  clear_outside(config, team, inputs);
  poison_unread(inputs, inputs.logits, inputs.format);
  poison_unread(inputs, inputs.target.matrix, inputs.target.format);
  for (std::optional<LinearTensors>* tensors : {&inputs.linear, &inputs.target.linear}) {
    if (*tensors) finish_linear(config, team, inputs, **tensors);
  }
  if (own.finish != nullptr) own.finish(config, team, inputs);
  inputs.token_weights = random_weights(config.token_weights, config.seed, 0, inputs.rows);
  inputs.class_weights = random_weights(config.class_weights, config.seed, 1, inputs.valid);
  set_upstream(config, inputs);
  return inputs;
}

void read_logits(const TensorFile& file, const StoredTensor& tensor, const CheckInputs& inputs, const HugeBuffer& buffer) {
  const int64_t rows_at_once = inputs.group_rows > 0 ? inputs.group_rows : inputs.rows;
  for (int64_t row = 0; row < inputs.rows; row += rows_at_once) {
    file.read(tensor, row * inputs.row_bytes(), rows_at_once * inputs.row_bytes(), buffer.data() + inputs.row_offset(row));
  }
}

OracleTensors oracle_tensors(const CheckInputs& inputs) {
  const auto wide = [](const std::vector<float>& values) { return std::vector<double>(values.begin(), values.end()); };
  OracleTensors tensors;
  tensors.labels = inputs.labels;
  for (int64_t row = 0; row < inputs.rows; ++row) {
    if (inputs.is_ignored(row)) tensors.labels[static_cast<size_t>(row)] = inputs.ignore_index;
  }
  tensors.labels_per_row = inputs.labels_per_row;
  tensors.token_weights = wide(inputs.token_weights);
  tensors.class_weights = wide(inputs.class_weights);
  tensors.loss_grad = wide(inputs.loss_grad);
  tensors.logp_grad = wide(inputs.logp_grad);
  tensors.lse_grad = wide(inputs.lse_grad);
  tensors.entropy_grad = wide(inputs.entropy_grad);
  tensors.mean_logit_grad = wide(inputs.mean_logit_grad);
  tensors.allowed = inputs.allowed;
  tensors.policy = inputs.policy;
  tensors.used = inputs.used;
  tensors.summaries = inputs.summaries;
  return tensors;
}

std::unique_ptr<Oracle> make_oracle(const GradcheckConfig& config, const CheckInputs& inputs) {
  return config.checked->make_oracle(config.function, oracle_tensors(inputs));
}

std::vector<WrongOracle> wrong_oracles(const GradcheckConfig& config, const CheckInputs& inputs) {
  std::vector<WrongKernel> kernels(wrong_allowed_sets().begin(), wrong_allowed_sets().end());
  if (config.checked->wrong_kernels != nullptr) {
    const std::span<const WrongKernel> own = config.checked->wrong_kernels();
    kernels.insert(kernels.end(), own.begin(), own.end());
  }
  if (inputs.linear && inputs.linear->low_rank != nullptr) {
    kernels.insert(kernels.end(), wrong_low_rank_parts().begin(), wrong_low_rank_parts().end());
  }
  return wrong_oracles(kernels, config.checked->make_oracle, config.function, oracle_tensors(inputs));
}

void for_each_row(const CheckInputs& inputs, std::span<const int64_t> rows, ThreadTeam& team, const RowWork& work) {
  if (inputs.linear) return for_each_product_row(inputs, rows, work);
  team.run([&](int thread) {
    RowReader reader(inputs);
    std::vector<double> logits(static_cast<size_t>(inputs.valid));
    for (const int64_t row : rows) {
      if (row % team.size() != thread) continue;
      oracle::decode_row(inputs.format, inputs.row(row), logits);
      GivenRow given{{.row = row, .logits = logits}, inputs.labels[static_cast<size_t>(row)]};
      reader.read(row, given);
      work(given, thread);
    }
  });
}

}  // namespace tileloss::tools
