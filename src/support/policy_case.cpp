#include "support/policy_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "check/error_metric.h"
#include "support/exit_codes.h"
#include "support/synthetic.h"

namespace tileloss::tools {
namespace {

using reference::PolicyOptions;
using reference::PolicyResult;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kMaxRedraws = 100;
// OutputMetric allows 2^-22 of a magnitude.
constexpr double kMagnitudeOfError = 0x1p22;

double scalar_value(const tileloss_scalar& scalar) {
  return scalar.pointer != nullptr ? static_cast<double>(*scalar.pointer) : scalar.value;
}

template <typename Enum>
Enum as(int32_t choice) {
  return static_cast<Enum>(choice);
}

std::vector<double> widen(std::span<const float> values) { return {values.begin(), values.end()}; }

reference::PolicyInputs make_inputs(std::span<const uint8_t> used, std::span<const int64_t> offsets,
                                    std::span<const double> advantages, std::span<const double> old_logp,
                                    std::span<const double> ref_logp, std::span<const double> sampler_logp) {
  reference::PolicyInputs inputs;
  inputs.used = used;
  inputs.offsets = offsets;
  inputs.advantages = advantages;
  inputs.old_logp = old_logp;
  inputs.ref_logp = ref_logp;
  inputs.sampler_logp = sampler_logp;
  return inputs;
}

tileloss_vector vector_of(const std::vector<float>& values) {
  if (values.empty()) return {};
  return tileloss_make_vector(values.data(), TILELOSS_FLOAT32, static_cast<int64_t>(values.size()));
}

// 0, then sorted cuts, then all rows; a cut that repeats the one before it makes a sequence empty.
std::vector<int64_t> random_offsets(const PolicyDraw& draw) {
  Random random(draw.seed, Stream::kSequences, 0);
  std::vector<int64_t> offsets = {0};
  for (int64_t b = 1; b < draw.sequences; ++b) offsets.push_back(random.next_below(draw.rows + 1));
  std::sort(offsets.begin(), offsets.end());
  for (size_t b = 4; b < offsets.size(); b += 5) offsets[b] = offsets[b - 1];
  offsets.push_back(draw.rows);
  return offsets;
}

// The wrong kernels of WrongCoefficients, as options of a right one.
PolicyOptions spoil(PolicyOptions options, WrongCoefficients wrong) {
  constexpr double kFar = 1e30;
  switch (wrong) {
    case WrongCoefficients::kClipIgnored:
      options.epsilon_low = options.epsilon_high = kFar;
      options.delta = options.dual_clip = options.cap_low = PolicyOptions::kNotGiven;
      break;
    case WrongCoefficients::kKlDropped: options.beta = 0; break;
    case WrongCoefficients::kRatioOfToken: options.ratio_level = reference::Level::kToken; break;
    case WrongCoefficients::kSamplerIgnored: options.sampler_correction = reference::SamplerCorrection::kOff; break;
    case WrongCoefficients::kMasksIgnored:
      options.off_policy_threshold = options.entropy_quantile = options.entropy_threshold = PolicyOptions::kNotGiven;
      break;
  }
  return options;
}

}  // namespace

PolicyOptions make_policy_options(const tileloss_policy_loss_options& from, int64_t sequence_length) {
  PolicyOptions to;
  to.kind = as<reference::PolicyKind>(from.kind);
  to.ratio_level = as<reference::Level>(from.ratio_level);
  to.aggregation = as<reference::Aggregation>(from.aggregation);
  to.advantage_level = as<reference::Level>(from.advantage_level);
  to.cispo_cap = as<reference::CispoCap>(from.cispo_cap);
  to.epsilon_low = scalar_value(from.epsilon_low);
  to.epsilon_high = scalar_value(from.epsilon_high);
  to.delta = scalar_value(from.delta);
  to.dual_clip = scalar_value(from.dual_clip);
  to.cap_low = scalar_value(from.cap_low);
  to.tau_pos = from.tau_pos;
  to.tau_neg = from.tau_neg;
  to.vespo_k_pos = from.vespo_k_pos;
  to.vespo_lambda_pos = from.vespo_lambda_pos;
  to.vespo_k_neg = from.vespo_k_neg;
  to.vespo_lambda_neg = from.vespo_lambda_neg;
  to.log_ratio_clamp = from.log_ratio_clamp;
  to.sampler_correction = as<reference::SamplerCorrection>(from.sampler_correction);
  to.sampler_level = as<reference::Level>(from.sampler_level);
  to.sampler_min = from.sampler_min;
  to.sampler_max = from.sampler_max;
  to.off_policy_threshold = from.off_policy_threshold;
  to.entropy_quantile = from.entropy_quantile;
  to.entropy_threshold = scalar_value(from.entropy_threshold);
  to.beta = scalar_value(from.beta);
  to.kl_estimator = as<reference::KlEstimator>(from.kl_estimator);
  to.kl_importance = from.kl_importance != 0;
  to.kl_log_ratio_clamp = from.kl_log_ratio_clamp;
  to.kl_clamp = from.kl_clamp;
  to.entropy_coef = scalar_value(from.entropy_coef);
  to.entropy_reduction = as<reference::EntropyReduction>(from.entropy_reduction);
  to.num_items = scalar_value(from.num_items);
  to.max_length = from.max_length > 0 ? from.max_length : sequence_length;
  return to;
}

void PolicyTensors::add_to(tileloss_args& args) const {
  if (sequence_length > 0) {
    args.sequence_length = sequence_length;
  } else {
    args.sequence_offsets = tileloss_make_vector(offsets.data(), TILELOSS_INT64, static_cast<int64_t>(offsets.size()));
  }
  if (!mask.empty()) args.mask = tileloss_make_vector(mask.data(), TILELOSS_UINT8, static_cast<int64_t>(mask.size()));
  args.advantages = vector_of(advantages);
  args.old_logp = vector_of(old_logp);
  args.ref_logp = vector_of(ref_logp);
  args.sampler_logp = vector_of(sampler_logp);
}

PolicyTensors draw_policy_layout(const PolicyDraw& draw) {
  PolicyTensors tensors;
  if (draw.use_offsets) {
    tensors.offsets = random_offsets(draw);
  } else {
    tensors.sequence_length = draw.rows / draw.sequences;
    for (int64_t b = 0; b <= draw.sequences; ++b) tensors.offsets.push_back(b * tensors.sequence_length);
  }
  Random mask(draw.seed, Stream::kMask, 0);
  for (int64_t i = 0; draw.mask_prob > 0 && i < draw.rows; ++i) {
    tensors.mask.push_back(mask.next_uniform() < draw.mask_prob ? 0 : 1);
  }
  Random random(draw.seed, Stream::kAdvantages, 0);
  const int64_t advantages = draw.token_advantages ? draw.rows : draw.sequences;
  tensors.advantages.reserve(static_cast<size_t>(advantages));
  for (int64_t i = 0; i < advantages; ++i) {
    const bool zero = random.next_below(16) == 0;
    const auto advantage = static_cast<float>(random.next_normal());
    const bool unread = draw.token_advantages && !tensors.in_use(i);
    tensors.advantages.push_back(unread ? kNan : zero ? 0.0F : advantage);
  }
  const auto rows = static_cast<size_t>(draw.rows);
  if (draw.old_scale) tensors.old_logp.assign(rows, kNan);
  if (draw.ref_scale) tensors.ref_logp.assign(rows, kNan);
  if (draw.sampler_scale) tensors.sampler_logp.assign(rows, kNan);
  return tensors;
}

RowSummary summarize(const reference::SoftmaxRow& softmax) {
  const OutputMagnitudes magnitudes = output_magnitudes(softmax);
  RowSummary row;
  row.logp = softmax.outputs().logp;
  row.entropy = softmax.entropy();
  // z_y - m and log S are rounded once each; what their own sums lost is in the magnitude.
  const double size = std::fabs(row.logp);
  if (std::isfinite(row.logp)) row.logp_error = 0x1p-23 * (size + 2 * std::min(1.0, size)) + 0x1p-22 * magnitudes.logp;
  if (std::isfinite(row.entropy)) row.entropy_error = 0x1p-22 * (row.entropy + magnitudes.entropy);
  return row;
}

void draw_policy_logps(const PolicyDraw& draw, const PolicyOptions& options, std::span<const uint8_t> used,
                       std::span<const RowSummary> rows, PolicyTensors& tensors) {
  std::vector<double> logp, entropy;
  for (const RowSummary& row : rows) {
    logp.push_back(row.logp);
    entropy.push_back(row.entropy);
  }
  const std::vector<double> advantages = widen(tensors.advantages);
  std::vector<uint8_t> redraw(used.begin(), used.end());
  for (int attempt = 0; attempt < kMaxRedraws; ++attempt) {
    const auto draw_row = [&](size_t i, std::optional<double> scale, uint64_t which, std::vector<float>& out) {
      if (!scale) return;
      const Random random(draw.seed, Stream::kPolicyLogp, static_cast<int64_t>(i));
      out[i] = static_cast<float>(logp[i] + *scale * random.normal(3 * static_cast<uint64_t>(attempt) + which));
    };
    for (size_t i = 0; i < redraw.size(); ++i) {
      if (redraw[i] == 0) continue;
      draw_row(i, draw.old_scale, 0, tensors.old_logp);
      draw_row(i, draw.ref_scale, 1, tensors.ref_logp);
      draw_row(i, draw.sampler_scale, 2, tensors.sampler_logp);
    }
    const std::vector<double> old_logp = widen(tensors.old_logp), ref_logp = widen(tensors.ref_logp),
                              sampler_logp = widen(tensors.sampler_logp);
    const PolicyResult result =
        policy_loss(options, make_inputs(used, tensors.offsets, advantages, old_logp, ref_logp, sampler_logp), logp, entropy);
    for (size_t i = 0; i < redraw.size(); ++i) redraw[i] = result.margin[i] < kClearMargin ? 1 : 0;
    const auto unclear = std::find(redraw.begin(), redraw.end(), 1);
    if (unclear == redraw.end()) return;
    const bool last = attempt + 1 == kMaxRedraws;
    if (last) {
      throw ToolError(kExitUsage, fmt::format("row {} lies within {:g} of a bound of the loss, whatever is drawn: choose another "
                                              "entropy_quantile, entropy_threshold or bound",
                                              unclear - redraw.begin(), kClearMargin));
    }
  }
}

double clear_quantile(std::vector<double> entropies, double wanted) {
  std::sort(entropies.begin(), entropies.end());
  const auto last = static_cast<double>(entropies.size()) - 1;
  double best = 1;
  for (size_t k = 0; k + 1 < entropies.size(); ++k) {
    if (entropies[k + 1] - entropies[k] < 4 * kClearMargin) continue;
    const double q = 1 - (static_cast<double>(k) + 0.5) / last;
    if (std::fabs(q - wanted) < std::fabs(best - wanted)) best = q;
  }
  return best;
}

// ------------------------------------------------------------------------------------------------------------- witness

PolicyWitness::PolicyWitness(const PolicyOptions& options, const PolicyTensors& tensors, std::span<const uint8_t> used,
                             std::span<const RowSummary> rows, std::span<const float> loss_grad)
    : options_(options),
      used_(used.begin(), used.end()),
      offsets_(tensors.offsets),
      rows_(rows.begin(), rows.end()),
      advantages_(widen(tensors.advantages)),
      old_logp_(widen(tensors.old_logp)),
      ref_logp_(widen(tensors.ref_logp)),
      sampler_logp_(widen(tensors.sampler_logp)),
      loss_grad_(widen(loss_grad)) {
  for (const RowSummary& row : rows_) entropy_.push_back(row.entropy);
  result_ = evaluate(options_, advantages_, {});
  set_errors();
  for (size_t wrong = 0; wrong < kWrongCoefficients; ++wrong) {
    wrong_[wrong] = evaluate(spoil(options_, static_cast<WrongCoefficients>(wrong)), advantages_, {});
  }
}

PolicyResult PolicyWitness::evaluate(const PolicyOptions& options, std::span<const double> advantages,
                                     std::span<const double> shifts) const {
  std::vector<double> logp;
  for (size_t i = 0; i < rows_.size(); ++i) {
    logp.push_back(rows_[i].logp + (shifts.empty() ? 0 : shifts[i] * rows_[i].logp_error));
  }
  reference::PolicyInputs inputs = make_inputs(used_, offsets_, advantages, old_logp_, ref_logp_, sampler_logp_);
  inputs.loss_grad = loss_grad_;
  return policy_loss(options, inputs, logp, entropy_);
}

// Every logp moved by its error, up and down, then up where the advantage is positive and down where it is not, and the other
// way round: what that changes is what float32 may change. Errors of one sign add up in a sequence's mean, those with the
// advantage's sign in a sum over tokens.
void PolicyWitness::add_errors(const PolicyOptions& options, std::span<const double> advantages) {
  const PolicyResult base = evaluate(options, advantages, {});
  std::vector<double> dlogp(rows_.size(), 0), token(rows_.size(), 0);
  std::array<double, reference::kPolicyMetrics> metrics{};
  double loss = 0;
  const auto widen_by = [](double& error, double moved, double value) {
    if (std::isfinite(moved - value)) error = std::max(error, std::fabs(moved - value));
  };
  for (const int pattern : {0, 1, 2, 3}) {
    std::vector<double> shifts(rows_.size(), pattern % 2 == 0 ? 1.0 : -1.0);
    for (size_t i = 0; pattern >= 2 && i < shifts.size(); ++i) shifts[i] *= result_.advantage[i] > 0 ? 1 : -1;
    const PolicyResult moved = evaluate(options, advantages, shifts);
    for (size_t i = 0; i < rows_.size(); ++i) {
      widen_by(dlogp[i], moved.dlogp[i], base.dlogp[i]);
      widen_by(token[i], moved.token_loss[i], base.token_loss[i]);
    }
    for (size_t m = 0; m < metrics.size(); ++m) widen_by(metrics[m], moved.metrics[m], base.metrics[m]);
    widen_by(loss, moved.loss, base.loss);
  }
  for (size_t i = 0; i < rows_.size(); ++i) {
    dlogp_error_[i] += dlogp[i];
    token_error_[i] += token[i];
  }
  for (size_t m = 0; m < metrics.size(); ++m) metric_error_[m] += metrics[m];
  loss_error_ += loss;
}

void PolicyWitness::set_errors() {
  dlogp_error_.assign(rows_.size(), 0);
  token_error_ = dlogp_error_;
  // The policy's part and the KL's apart: in their sum a row's own error and its sequence's could cancel.
  PolicyOptions without_kl = options_;
  without_kl.beta = 0;
  add_errors(without_kl, advantages_);
  if (options_.beta != 0) add_errors(options_, std::vector<double>(advantages_.size(), 0));
  token_magnitude_ = result_.token_size;
  const double tokens = std::max(1.0, result_.metrics[reference::kMetricTokens]);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const double upstream = std::fabs(loss_upstream(static_cast<int64_t>(i)));
    const double bonus = upstream == 0 ? 0 : std::fabs(result_.dentropy[i]) / upstream * rows_[i].entropy_error;
    if (options_.entropy_reduction == reference::EntropyReduction::kAsLoss) {
      token_error_[i] += std::fabs(options_.entropy_coef) * rows_[i].entropy_error;
    }
    const double slope = result_.own_slope[i] + std::fabs(options_.beta) * result_.kl_slope[i];
    if (std::isfinite(slope)) token_error_[i] += slope * rows_[i].logp_error;
    token_magnitude_[i] += kMagnitudeOfError * token_error_[i];
    if (used_[i] == 0) continue;
    loss_error_ += result_.token_weight[i] * token_error_[i] + bonus;
    loss_magnitude_ += result_.token_weight[i] * result_.token_size[i];
    metric_error_[reference::kMetricKl] += result_.kl_slope[i] * rows_[i].logp_error / tokens;
    metric_error_[reference::kMetricEntropy] += rows_[i].entropy_error / tokens;
  }
  loss_magnitude_ += kMagnitudeOfError * loss_error_;
  for (size_t m = 0; m < metric_error_.size(); ++m) metric_magnitude_[m] = kMagnitudeOfError * metric_error_[m];
}

double PolicyWitness::margin() const {
  return result_.margin.empty() ? std::numeric_limits<double>::infinity()
                                : *std::min_element(result_.margin.begin(), result_.margin.end());
}

void PolicyWitness::row_gradient(int64_t row, const reference::SoftmaxRow& softmax, reference::GradientRow& out) const {
  reference::logprobs_gradient(softmax, {dlogp_error_[static_cast<size_t>(row)], 0, 0}, out);
  std::vector<double> blur = std::move(out.magnitude);
  reference::logprobs_gradient(softmax, upstream(row), out);
  out.blur = std::move(blur);
}

reference::RowUpstream PolicyWitness::upstream(int64_t row) const {
  const auto i = static_cast<size_t>(row);
  return {result_.dlogp[i], 0, result_.dentropy[i]};
}

double PolicyWitness::loss_upstream(int64_t row) const {
  if (loss_grad_.empty()) return 1;
  return loss_grad_[loss_grad_.size() == 1 ? 0 : static_cast<size_t>(row)];
}

reference::RowUpstream PolicyWitness::wrong_upstream(WrongCoefficients wrong, int64_t row) const {
  const auto i = static_cast<size_t>(row);
  const PolicyResult& other = wrong_[static_cast<size_t>(wrong)];
  return {other.dlogp[i] - result_.dlogp[i], 0, other.dentropy[i] - result_.dentropy[i]};
}

}  // namespace tileloss::tools
