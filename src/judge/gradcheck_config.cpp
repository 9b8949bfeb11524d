// Reads a gradcheck config.
#include <algorithm>
#include <array>
#include <span>
#include <string_view>

#include "judge/inputs/allowed.h"
#include "judge/oracles/row_outputs.h"
#include "support/format.h"
#include "support/printable.h"

namespace tileloss::tools {
namespace {

// Hidden states and head are drawn so that their logits have the source's std.
constexpr std::array<std::string_view, 1> kLinearDistributions = {"normal"};
constexpr int64_t kMaxRank = 512;

void read_source(ConfigReader source, GradcheckConfig& config) {
  GradcheckConfig::Source& out = config.source;
  out.is_file = source.choice("kind", "synthetic", {"synthetic", "safetensors"}) == "safetensors";
  if (out.is_file) {
    out.path = source.path("path");
    if (config.is_linear()) {
      config.linear.hidden_name = source.text("hidden", config.linear.hidden_name);
      config.linear.head_name = source.text("lm_head", config.linear.head_name);
      config.linear.bias_name = source.text("bias", "");
      config.linear.hidden_r_name = source.text("hidden_r", "");
      config.linear.head_r_name = source.text("head_r", "");
      if (config.linear.hidden_r_name.empty() != config.linear.head_r_name.empty())
        source.fail(config.linear.head_r_name.empty() ? "hidden_r" : "head_r", "expected hidden_r and head_r, or neither");
    } else {
      out.logits_name = source.text("logits", out.logits_name);
    }
    out.labels_name = source.text("labels", out.labels_name);
    if (config.takes_mask()) out.mask_name = source.text("mask", "");
    config.allowed.name = source.text("allowed", "");
  } else {
    const auto names = config.is_linear() ? std::span(kLinearDistributions) : distribution_names();
    out.distribution = source.choice("distribution", out.distribution, {names.begin(), names.end()});
    out.logits = *find_distribution(out.distribution);
    out.logits.std = source.number("std", out.logits.std, {0, 1e30, false, std::nullopt});
    if (!config.is_linear()) out.logits.offset = source.number("offset", out.logits.offset, {-1e30, 1e30, false, std::nullopt});
  }
  if (config.checked->inputs->read_source != nullptr) config.checked->inputs->read_source(source, config);
  source.finish();
}

void read_mask(ConfigReader& reader, GradcheckConfig& out) {
  if (!out.takes_mask()) return;
  out.policy.mask_prob = reader.number("mask_prob", 0, {0, 1, false, std::nullopt});
  if (!out.source.mask_name.empty() && reader.has("mask_prob")) reader.fail("mask_prob", "the mask comes from the file");
}

void read_linear(ConfigReader& reader, GradcheckConfig& config) {
  if (!config.is_linear()) return;
  GradcheckConfig::Linear& out = config.linear;
  const auto absent = config.source.is_file ? std::optional<int64_t>(0) : std::nullopt;
  out.hidden_size = reader.integer("hidden_size", absent, 1, kMaxCount);
  out.compute_dtype = static_cast<tileloss_dtype>(config.function.get_integer("compute_dtype", TILELOSS_NONE));
  out.transposed_head = reader.choice("head_layout", "vh", {"vh", "hv"}) == "hv";
  if (config.source.is_file && reader.has("bias")) reader.fail("bias", "only with a synthetic source");
  out.bias = reader.choice("bias", "none", {"none", "random"}) == "random" || !out.bias_name.empty();
  if (config.source.is_file && reader.has("rank")) reader.fail("rank", "only with a synthetic source");
  out.rank = reader.integer("rank", 0, 0, kMaxRank);
  const bool has_low_rank = out.rank > 0 || !out.hidden_r_name.empty();
  const std::vector<std::string> all{"dhidden", "dhead", "dbias", "dhidden_r", "dhead_r"};
  const std::vector<std::string> given =
      has_low_rank ? std::vector<std::string>{"dhidden", "dhead", "dhidden_r", "dhead_r"} : std::vector{all[0], all[1]};
  const std::vector<std::string> gradients = reader.list("gradients", given, all);
  for (size_t which = 0; which < all.size(); ++which) {
    if (std::find(gradients.begin(), gradients.end(), all[which]) == gradients.end()) continue;
    out.gradients.push_back(static_cast<LinearOutput>(which));
    if (is_low_rank(out.gradients.back()) && !has_low_rank)
      reader.fail("gradients", formatted("expected none of a low-rank part without one, got {}", all[which]));
  }
  if (gradients.empty()) reader.fail("gradients", formatted("expected at least one of {}", fmt::join(all, ", ")));
  out.float32_dhead = reader.choice("dhead_dtype", "float32", {"float32", "head"}) == "float32";
  out.accumulate = config.function.get_integer("accumulate", 0) != 0;
}

void read_kernel(ConfigReader kernel, GradcheckConfig& out) {
  out.device = read_device(kernel);
  out.kernel = read_hints(kernel);
  if (out.kernel.cuda_kernel != "auto" && !out.device.has_kernels(out.is_linear()))
    kernel.fail("cuda_kernel", "expected auto where the device is cpu or the level linear, got " + out.kernel.cuda_kernel);
  out.kernel.workspace_bytes = out.is_linear() ? kernel.integer("workspace_bytes", 0, 0, int64_t{1} << 50) : 0;
  out.in_place = !out.is_linear() && kernel.boolean("in_place", false);
  out.row_groups = !out.is_linear() && kernel.boolean("row_groups", false);
  kernel.finish();
}

void read_tolerances(ConfigReader tolerances, bool is_linear, GradcheckConfig::Tolerances& out) {
  constexpr NumberRange kLimit{0, std::numeric_limits<double>::max(), false, std::nullopt};
  out.loss_atol = tolerances.number("loss_atol", out.loss_atol, kLimit);
  out.logp_max_abs = tolerances.number("logp_max_abs", out.logp_max_abs, kLimit);
  if (!is_linear) {
    out.dlogits_max_abs = tolerances.number("dlogits_max_abs", out.dlogits_max_abs, kLimit);
    out.dlogits_max_rel = tolerances.number("dlogits_max_rel", out.dlogits_max_rel, kLimit);
    out.ulp = tolerances.number("ulp", out.ulp, kLimit);
  }
  tolerances.finish();
}

void read_shape(ConfigReader& reader, GradcheckConfig& out) {
  // With a file what is not given is the file's.
  const auto absent = out.source.is_file ? std::optional<int64_t>(0) : std::nullopt;
  out.batch_size = reader.integer("batch_size", absent, 1, kMaxCount);
  out.seq_len = reader.integer("seq_len", absent, 1, kMaxCount);
  out.vocab_size = reader.integer("vocab_size", absent, 1, kMaxCount);
  if (reader.has("dtype") || !out.source.is_file) out.dtype = parse_dtype(reader.choice("dtype", std::nullopt, dtype_names()));
}

GradcheckConfig::Upstream read_upstream(ConfigReader& reader, const GradcheckConfig& config) {
  const std::string upstream = reader.choice("upstream", "ones", {"ones", "random", "per_row"});
  if (upstream != "per_row") return upstream == "ones" ? GradcheckConfig::Upstream::kOnes : GradcheckConfig::Upstream::kRandom;
  if (config.function.is_loss() && !config.per_row_loss())
    reader.fail("upstream", formatted("per_row needs {}: none", config.function.per_row_option()));
  return GradcheckConfig::Upstream::kPerRow;
}

bool read_weights(ConfigReader& reader, const std::string& key) {
  return reader.choice(key, "none", {"none", "random"}) == "random";
}

// Options before the keys of a section, should they have one name.
std::map<std::string, std::string> origins_of(const ConfigNode& root) {
  std::map<std::string, std::string> origins;
  for (const ConfigNode& child : root.children) origins.emplace(child.key, child.origin + ": " + child.key);
  for (const ConfigNode& section : root.children) {
    for (const ConfigNode& child : section.children) {
      origins.emplace(child.key, formatted("{}: {}.{}", child.origin, section.key, child.key));
    }
  }
  return origins;
}

}  // namespace

bool GradcheckConfig::wants(std::string_view output_name) const {
  return std::find(outputs.begin(), outputs.end(), output_name) != outputs.end();
}

ToolError GradcheckConfig::located(const LibraryError& error) const {
  std::string key = error.argument();
  std::replace(key.begin(), key.end(), '.', '_');  // dhead.dtype
  const auto origin = origins.find(key);
  return origin == origins.end() ? ToolError(error) : ToolError(error.code(), origin->second + ": " + error.problem());
}

const TensorFile& GradcheckConfig::file_at(const std::filesystem::path& path) const {
  const auto same = [&](const TensorFile& each) { return each.name() == shown(path.string()); };
  const auto found = std::find_if(files.begin(), files.end(), same);
  if (found == files.end()) throw ToolError(kExitUsage, formatted("{}: its tensors were not handed over", shown(path.string())));
  return *found;
}

GradcheckConfig read_gradcheck_config(const ConfigNode& root, const std::string& name) {
  ConfigReader reader(root);
  const bool is_linear = reader.choice("level", "logits", {"logits", "linear"}) == "linear";
  const std::string loss = reader.choice("loss", std::nullopt, checked_losses());
  GradcheckConfig config(Function::of(loss, is_linear), checked_function(loss));
  config.file = name;
  config.function.read_options(reader);
  for (const char* key : {"vocab_start", "vocab_total"}) {
    if (reader.has(key)) reader.fail(key, "gradcheck checks whole vocabularies");
  }
  read_source(reader.section("source"), config);
  read_shape(reader, config);
  read_mask(reader, config);
  read_allowed(reader, config);
  read_linear(reader, config);
  if (config.checked->inputs->read_keys != nullptr) config.checked->inputs->read_keys(reader, config);
  config.seed = static_cast<uint64_t>(reader.integer("seed", 0, 0, std::numeric_limits<int64_t>::max()));
  config.ignore_prob = reader.number("ignore_prob", 0, {0, 1, false, std::nullopt});
  if (config.source.is_file && reader.has("ignore_prob")) reader.fail("ignore_prob", "the labels come from a file");
  config.token_weights = read_weights(reader, "token_weights");
  config.class_weights = read_weights(reader, "class_weights");
  config.upstream = read_upstream(reader, config);
  config.outputs = reader.list("outputs", {"logp", "lse"}, output_names(config.has_divergence()));
  if (config.labels_per_row > 1 && config.wants("correct"))
    reader.fail("outputs", "expected none that is of one label with several a row, got correct");
  read_kernel(reader.section("kernel"), config);
  read_tolerances(reader.section("tolerances"), config.is_linear(), config.tolerances);
  config.mutants = reader.boolean("mutants", false);
  config.strict = reader.boolean("strict", false);
  if (!is_linear) config.expect_mostly_zero = reader.boolean("expect_mostly_zero", false);
  reader.finish();
  config.origins = origins_of(root);
  return config;
}

}  // namespace tileloss::tools
