#include "tests/shared/policy_case.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "support/synthetic.h"

namespace tileloss::test {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

tools::PolicyDraw make_draw(const PolicyCaseSpec& spec, const tileloss_policy_loss_options& options) {
  tools::PolicyDraw draw;
  draw.seed = spec.logits.seed;
  draw.rows = spec.logits.rows;
  draw.sequences = spec.sequences;
  draw.use_offsets = spec.use_offsets;
  draw.token_advantages = options.advantage_level == TILELOSS_LEVEL_TOKEN;
  if (spec.mask_dtype != TILELOSS_NONE) draw.mask_prob = 0.2;
  if (spec.old_logp) draw.old_scale = 0.3;
  if (spec.ref_logp) draw.ref_scale = 0.3;
  if (spec.sampler_logp) draw.sampler_scale = 0.2;
  return draw;
}

}  // namespace

LogitsCaseSpec PolicyCase::with_loss_kind(LogitsCaseSpec spec, const tileloss_policy_loss_options& options) {
  spec.per_row_loss = options.aggregation == TILELOSS_AGGREGATION_NONE;
  return spec;
}

PolicyCase::PolicyCase(const PolicyCaseSpec& spec, tileloss_policy_loss_options& options)
    : spec_(spec), options_(options), logits_(with_loss_kind(spec.logits, options)) {
  const tools::PolicyDraw draw = make_draw(spec, options);
  tensors_ = tools::draw_policy_layout(draw);
  labels_.assign(logits_.labels().begin(), logits_.labels().end());
  mask_ignored_rows();
  for (std::int64_t i = 0; i < spec.logits.rows; ++i) {
    used_.push_back(tensors_.in_use(i) && logits_.labels()[index(i)] != spec.logits.ignore_index ? 1 : 0);
  }
  summarize_rows();
  clear_entropy_masks(options);
  const oracle::PolicyOptions oracle_options = make_oracle_options(options, tensors_.sequence_length);
  tools::draw_policy_logps(draw, oracle_options, used_, rows_, tensors_);
  if (spec.with_nan != nullptr) {
    const auto first = std::find(used_.begin(), used_.end(), 1) - used_.begin();
    (tensors_.*spec.with_nan).at(index(first)) = std::numeric_limits<float>::quiet_NaN();
  }
  add_tensors();
}

// Where the entropies are all alike (one class, saturated rows) no threshold lies clear of them: every token is kept then.
void PolicyCase::clear_entropy_masks(tileloss_policy_loss_options& options) const {
  std::vector<double> entropies;
  bool is_clear = true;
  for (std::size_t i = 0; i < used_.size(); ++i) {
    if (used_[i] == 0) continue;
    entropies.push_back(rows_[i].entropy);
    if (std::fabs(rows_[i].entropy - options.entropy_threshold.value) < 4 * tools::kClearMargin) is_clear = false;
  }
  if (!is_clear) options.entropy_threshold.value = -1;
  if (std::isnan(options.entropy_quantile)) return;
  options.entropy_quantile = tools::clear_quantile(entropies, options.entropy_quantile);
  if (options.entropy_quantile == 1) options.entropy_quantile = std::numeric_limits<double>::quiet_NaN();
}

// A masked row's label may be anything.
void PolicyCase::mask_ignored_rows() {
  if (tensors_.mask.empty()) return;
  for (std::size_t i = 0; i < labels_.size(); ++i) {
    if (logits_.labels()[i] == spec_.logits.ignore_index && i % 2 == 0) tensors_.mask[i] = 0;
    if (tensors_.mask[i] == 0) labels_[i] = std::int64_t{1} << 40;
  }
}

void PolicyCase::summarize_rows() {
  const oracle::Transform transform = make_transform(options_.logit);
  oracle::SoftmaxRow softmax;
  rows_.resize(used_.size());
  for (std::size_t i = 0; i < used_.size(); ++i) {
    if (used_[i] == 0) continue;
    softmax.compute(transform, logits_.logits_row(static_cast<std::int64_t>(i)), logits_.labels()[i]);
    rows_[i] = tools::summarize(softmax);
  }
}

template <class To, class From>
tileloss_vector PolicyCase::copy(const std::vector<From>& values, tileloss_dtype dtype) {
  GuardBuffer& buffer = buffers_.emplace_back(values.size() * sizeof(To), spec_.logits.flush);
  for (std::size_t i = 0; i < values.size(); ++i) buffer.as<To>()[i] = static_cast<To>(values[i]);
  buffer.make_read_only();
  return tileloss_make_vector(buffer.data(), dtype, static_cast<std::int64_t>(values.size()));
}

tileloss_vector PolicyCase::copy_mask() {
  switch (spec_.mask_dtype) {
    case TILELOSS_INT32: return copy<std::int32_t>(tensors_.mask, TILELOSS_INT32);
    case TILELOSS_INT64: return copy<std::int64_t>(tensors_.mask, TILELOSS_INT64);
    case TILELOSS_FLOAT32: return copy<float>(tensors_.mask, TILELOSS_FLOAT32);
    default: return copy<std::uint8_t>(tensors_.mask, TILELOSS_UINT8);
  }
}

void PolicyCase::add_tensors() {
  tileloss_args& args = logits_.args();
  args.sequence_length = tensors_.sequence_length;
  if (spec_.use_offsets) {
    args.sequence_offsets = spec_.int32_offsets ? copy<std::int32_t>(tensors_.offsets, TILELOSS_INT32)
                                                : copy<std::int64_t>(tensors_.offsets, TILELOSS_INT64);
  }
  if (!tensors_.mask.empty()) {
    args.mask = copy_mask();
    if (!spec_.logits.int32_labels) args.labels = copy<std::int64_t>(labels_, TILELOSS_INT64);
  }
  args.advantages = copy<float>(tensors_.advantages, TILELOSS_FLOAT32);
  if (spec_.old_logp) args.old_logp = copy<float>(tensors_.old_logp, TILELOSS_FLOAT32);
  if (spec_.ref_logp) args.ref_logp = copy<float>(tensors_.ref_logp, TILELOSS_FLOAT32);
  if (spec_.sampler_logp) args.sampler_logp = copy<float>(tensors_.sampler_logp, TILELOSS_FLOAT32);
  if (!spec_.metrics) return;
  metrics_ = GuardBuffer(TILELOSS_POLICY_METRICS * sizeof(float), spec_.logits.flush);
  args.metrics = tileloss_make_vector(metrics_.data(), TILELOSS_FLOAT32, TILELOSS_POLICY_METRICS);
}

CheckResult PolicyCase::check() const {
  tools::OracleTensors tensors = logits_.oracle_tensors();
  tensors.policy = tensors_;
  tensors.used = used_;
  tensors.summaries = rows_;
  const auto rows = [&](const RowWork& work) {
    for (std::int64_t i = 0; i < logits_.spec().rows; ++i) {
      if (used_[index(i)] == 0) continue;
      const std::vector<double> logits = logits_.logits_row(i);
      work({{.row = i, .logits = logits}, logits_.labels()[index(i)]});
    }
  };
  CheckResult result = check_rows(logits_, *make_policy_loss(tools::Function("policy_loss", &options_), tensors), rows);
  result.gates.push_back(tools::make_gate("surroundings_of_metrics_written", !metrics_ || metrics_.canary_intact() ? 0 : 1, 0));
  return result;
}

}  // namespace tileloss::test
