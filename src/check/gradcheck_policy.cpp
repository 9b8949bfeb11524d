#include "check/gradcheck_policy.h"

#include <cstring>
#include <string>

#include "check/gradcheck_linear.h"
#include "check/gradcheck_oracle.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/oracle_options.h"
#include "support/signals.h"

namespace tileloss::tools {
namespace {

PolicyDraw make_draw(const GradcheckConfig& config, const CheckInputs& inputs) {
  PolicyDraw draw;
  draw.seed = config.seed;
  draw.rows = inputs.rows;
  draw.sequences = inputs.batch_size;
  draw.use_offsets = config.policy.use_offsets;
  draw.mask_prob = config.policy.mask_prob;
  draw.token_advantages = config.function.get_choice("advantage_level", "sequence") == "token";
  draw.old_scale = config.policy.old_scale;
  draw.ref_scale = config.policy.ref_scale;
  draw.sampler_scale = config.policy.sampler_scale;
  return draw;
}

template <class T>
T element(const std::vector<char>& data, size_t index) {
  T value{};
  std::memcpy(&value, data.data() + index * sizeof value, sizeof value);
  return value;
}

[[noreturn]] void fail(const SafetensorsFile& file, const StoredTensor& tensor, const char* expected) {
  file.refuse(tensor, formatted("expected {}, got {}", expected, tensor.dtype));
}

std::vector<float> read_floats(const SafetensorsFile& file, const StoredTensor& tensor, int64_t count) {
  if (tensor.dtype != "F32") fail(file, tensor, "F32");
  std::vector<float> values(static_cast<size_t>(count));
  file.read(tensor, 0, static_cast<int64_t>(values.size() * sizeof(float)), values.data());
  return values;
}

// One a sequence. How many sequences the rows are is the config's to say: a check of fewer takes the first.
std::vector<float> read_sequence_advantages(const SafetensorsFile& file, const StoredTensor& tensor, int64_t sequences) {
  if (tensor.elements() < sequences) {
    file.refuse(tensor, formatted("expected at least {} values, one a sequence, got {}", sequences, tensor.elements()));
  }
  return read_floats(file, tensor, sequences);
}

}  // namespace

std::vector<uint8_t> read_mask(const SafetensorsFile& file, const StoredTensor& tensor, int64_t count) {
  const std::vector<char> data = file.read(tensor);
  std::vector<uint8_t> mask;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    bool used = false;
    if (tensor.dtype == "U8" || tensor.dtype == "BOOL") {
      used = element<uint8_t>(data, i) != 0;
    } else if (tensor.dtype == "I32") {
      used = element<int32_t>(data, i) != 0;
    } else if (tensor.dtype == "I64") {
      used = element<int64_t>(data, i) != 0;
    } else if (tensor.dtype == "F32") {
      used = element<float>(data, i) != 0;
    } else {
      fail(file, tensor, "U8, BOOL, I32, I64 or F32");
    }
    mask.push_back(used ? 1 : 0);
  }
  return mask;
}

reference::PolicyOptions make_oracle_options(const Function& function, const CheckInputs& inputs) {
  return make_oracle_options(*static_cast<const tileloss_policy_loss_options*>(function.options()),
                             inputs.policy.sequence_length);
}

void draw_policy_layout(const GradcheckConfig& config, CheckInputs& inputs) {
  inputs.policy = draw_policy_layout(make_draw(config, inputs));
}

void load_policy_layout(const GradcheckConfig& config, const SafetensorsFile& file, const StoredTensor& matrix,
                        CheckInputs& inputs) {
  draw_policy_layout(config, inputs);
  const GradcheckConfig::Source& source = config.source;
  PolicyTensors& tensors = inputs.policy;
  if (!source.mask_name.empty()) tensors.mask = read_mask(file, file.row_tensor(source.mask_name, matrix), inputs.rows);
  const auto read = [&](const std::string& name, std::vector<float>& out) {
    if (!name.empty()) out = read_floats(file, file.row_tensor(name, matrix), inputs.rows);
  };
  if (config.function.get_choice("advantage_level", "") == "token") {
    read(source.advantages_name, tensors.advantages);
  } else if (!source.advantages_name.empty()) {
    tensors.advantages = read_sequence_advantages(file, file.tensor(source.advantages_name), inputs.batch_size);
  }
  read(source.old_logp_name, tensors.old_logp);
  read(source.ref_logp_name, tensors.ref_logp);
  read(source.sampler_logp_name, tensors.sampler_logp);
}

void draw_policy_logps(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  const reference::Transform transform = make_transform(config.function);
  inputs.used.assign(static_cast<size_t>(inputs.rows), 0);
  inputs.summaries.assign(static_cast<size_t>(inputs.rows), {});
  for (int64_t row = 0; row < inputs.rows; ++row) inputs.used[static_cast<size_t>(row)] = inputs.is_ignored(row) ? 0 : 1;
  if (inputs.linear) {
    for_each_used_linear_row(inputs, [&](const LinearRow& row, const LinearRow*) {
      reference::SoftmaxRow softmax;
      softmax.compute(transform, row.logits, inputs.labels[static_cast<size_t>(row.row)]);
      inputs.summaries[static_cast<size_t>(row.row)] = summarize_linear(softmax, row);
    });
  }
  team.run([&](int thread) {
    std::vector<double> logits(static_cast<size_t>(inputs.valid));
    reference::SoftmaxRow softmax;
    for (int64_t row = thread; row < inputs.rows && !inputs.linear; row += team.size()) {
      check_stop();
      if (inputs.is_ignored(row)) continue;
      reference::decode_row(inputs.format, inputs.row(row), logits);
      softmax.compute(transform, logits, inputs.labels[static_cast<size_t>(row)]);
      inputs.summaries[static_cast<size_t>(row)] = summarize(softmax);
    }
  });
  const PolicyDraw draw = make_draw(config, inputs);
  if (!draw.old_scale && !draw.ref_scale && !draw.sampler_scale) return;
  draw_policy_logps(draw, make_oracle_options(config.function, inputs), inputs.used, inputs.summaries, inputs.policy);
}

}  // namespace tileloss::tools
