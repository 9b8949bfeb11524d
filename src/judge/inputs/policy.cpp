#include "judge/inputs/policy.h"

#include <map>
#include <string>
#include <string_view>

#include "judge/oracles/policy.h"
#include "judge/oracles/row_outputs.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/oracle_options.h"

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

[[noreturn]] void fail(const TensorFile& file, const StoredTensor& tensor, const char* expected) {
  file.refuse(tensor, formatted("expected {}, got {}", expected, tensor.dtype));
}

std::vector<uint8_t> read_mask(const TensorFile& file, const StoredTensor& tensor, int64_t count) {
  static const std::map<std::string_view, tileloss_dtype> kDtypes = {{"U8", TILELOSS_UINT8},
                                                                     {"BOOL", TILELOSS_UINT8},
                                                                     {"I32", TILELOSS_INT32},
                                                                     {"I64", TILELOSS_INT64},
                                                                     {"F32", TILELOSS_FLOAT32}};
  const auto dtype = kDtypes.find(tensor.dtype);
  if (dtype == kDtypes.end()) fail(file, tensor, "U8, BOOL, I32, I64 or F32");
  std::vector<uint8_t> mask;
  for (const double value : widen(dtype->second, file.read(tensor))) mask.push_back(value != 0 ? 1 : 0);
  mask.resize(static_cast<size_t>(count));
  return mask;
}

std::vector<float> read_floats(const TensorFile& file, const StoredTensor& tensor, int64_t count) {
  if (tensor.dtype != "F32") fail(file, tensor, "F32");
  std::vector<float> values(static_cast<size_t>(count));
  file.read(tensor, 0, static_cast<int64_t>(values.size() * sizeof(float)), values.data());
  return values;
}

// One a sequence. How many sequences the rows are is the config's to say: a check of fewer takes the first.
std::vector<float> read_sequence_advantages(const TensorFile& file, const StoredTensor& tensor, int64_t sequences) {
  if (tensor.elements() < sequences) {
    file.refuse(tensor, formatted("expected at least {} values, one a sequence, got {}", sequences, tensor.elements()));
  }
  return read_floats(file, tensor, sequences);
}

// ------------------------------------------------------------------------------------------------------------------- keys

void read_source(ConfigReader& source, GradcheckConfig& config) {
  if (!config.source.is_file) return;
  config.source.advantages_name = source.text("advantages", "");
  config.source.old_logp_name = source.text("old_logp", "");
  config.source.ref_logp_name = source.text("ref_logp", "");
  config.source.sampler_logp_name = source.text("sampler_logp", "");
}

// Drawn near the oracle's logp, or from the file.
std::optional<double> read_noise(ConfigReader& reader, const std::string& key, const std::string& tensor) {
  if (!reader.has(key)) return std::nullopt;
  if (!tensor.empty()) reader.fail(key, "the tensor comes from the file");
  return reader.number(key, std::nullopt, {0, 100, false, std::nullopt});
}

// The library would ask for the tensor, of which a config has only these two.
void need(const ConfigReader& reader, const std::string& tensor, const std::optional<double>& scale, const std::string& in_file,
          const char* reason) {
  if (scale || !in_file.empty()) return;
  reader.fail(tensor + "_noise_scale",
              formatted("expected a number, or source.{} of a file, as {}, got neither", tensor, reason));
}

void read_keys(ConfigReader& reader, GradcheckConfig& config) {
  const GradcheckConfig::Source& source = config.source;
  GradcheckConfig::Policy& out = config.policy;
  out.use_offsets = reader.choice("sequences", "batch", {"batch", "offsets"}) == "offsets";
  out.old_scale = read_noise(reader, "old_logp_noise_scale", source.old_logp_name);
  out.ref_scale = read_noise(reader, "ref_logp_noise_scale", source.ref_logp_name);
  out.sampler_scale = read_noise(reader, "sampler_logp_noise_scale", source.sampler_logp_name);
  if (config.function.get("beta", 0) != 0) need(reader, "ref_logp", out.ref_scale, source.ref_logp_name, "beta is not 0");
  if (config.function.get_choice("sampler_correction", "off") != "off")
    need(reader, "sampler_logp", out.sampler_scale, source.sampler_logp_name, "sampler_correction is not off");
}

// ----------------------------------------------------------------------------------------------------------------- tensors

// What is near the oracle's logp has its size only.
void lay_out(const GradcheckConfig& config, const InputRows* rows, CheckInputs& inputs) {
  inputs.policy = draw_policy_layout(make_draw(config, inputs));
  if (rows == nullptr) return;
  const GradcheckConfig::Source& source = config.source;
  PolicyTensors& tensors = inputs.policy;
  if (!source.mask_name.empty()) tensors.mask = make_mask(config, rows, inputs.rows);
  const auto read = [&](const std::string& name, std::vector<float>& out) {
    if (!name.empty()) out = read_floats(rows->file, rows->file.row_tensor(name, rows->matrix), inputs.rows);
  };
  if (config.function.get_choice("advantage_level", "") == "token") {
    read(source.advantages_name, tensors.advantages);
  } else if (!source.advantages_name.empty()) {
    tensors.advantages = read_sequence_advantages(rows->file, rows->file.tensor(source.advantages_name), inputs.batch_size);
  }
  read(source.old_logp_name, tensors.old_logp);
  read(source.ref_logp_name, tensors.ref_logp);
  read(source.sampler_logp_name, tensors.sampler_logp);
}

// The oracle's sweep over the rows in use, and old, ref and sampler logp drawn near what it found.
void draw_logps(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  const std::vector<int64_t> rows = inputs.used_rows();
  const oracle::Transform transform = make_transform(config.function);
  inputs.used.assign(static_cast<size_t>(inputs.rows), 0);
  inputs.summaries.assign(static_cast<size_t>(inputs.rows), {});
  for (const int64_t row : rows) inputs.used[static_cast<size_t>(row)] = 1;
  std::vector<oracle::SoftmaxRow> softmax(static_cast<size_t>(team.size()));
  for_each_row(inputs, rows, team, [&](const GivenRow& row, int thread) {
    oracle::SoftmaxRow& values = softmax[static_cast<size_t>(thread)];
    values.compute(transform, row.logits.logits, row.label, row.allowed);
    inputs.summaries[static_cast<size_t>(row.logits.row)] = summarize(values, row.logits);
  });
  const PolicyDraw draw = make_draw(config, inputs);
  if (!draw.old_scale && !draw.ref_scale && !draw.sampler_scale) return;
  const auto& options = *static_cast<const tileloss_policy_loss_options*>(config.function.options());
  draw_policy_logps(draw, make_oracle_options(options, inputs.policy.sequence_length), inputs.used, inputs.summaries,
                    inputs.policy);
}

}  // namespace

const OwnInputs kPolicyInputs{.read_source = read_source, .read_keys = read_keys, .lay_out = lay_out, .finish = draw_logps};

std::vector<uint8_t> make_mask(const GradcheckConfig& config, const InputRows* rows, int64_t count) {
  const std::string& name = config.source.mask_name;
  if (rows == nullptr || name.empty()) return draw_mask(config.seed, count, config.policy.mask_prob);
  return read_mask(rows->file, rows->file.row_tensor(name, rows->matrix), count);
}

}  // namespace tileloss::tools
