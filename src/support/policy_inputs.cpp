#include "support/policy_inputs.h"

#include <algorithm>
#include <cmath>

#include "support/exit_codes.h"
#include "support/format.h"
#include "support/synthetic.h"

namespace tileloss::tools {
namespace {

using oracle::PolicyOptions;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kMaxRedraws = 100;

std::vector<double> widen(std::span<const float> values) { return {values.begin(), values.end()}; }

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

}  // namespace

void PolicyTensors::add_to(tileloss_args& args) const {
  if (sequence_length > 0) {
    args.sequence_length = sequence_length;
  } else if (!offsets.empty()) {
    args.sequence_offsets = tileloss_make_vector(offsets.data(), TILELOSS_INT64, static_cast<int64_t>(offsets.size()));
  }
  if (!mask.empty()) args.mask = tileloss_make_vector(mask.data(), TILELOSS_UINT8, static_cast<int64_t>(mask.size()));
  args.advantages = vector_of(advantages);
  args.old_logp = vector_of(old_logp);
  args.ref_logp = vector_of(ref_logp);
  args.sampler_logp = vector_of(sampler_logp);
}

std::vector<uint8_t> draw_mask(uint64_t seed, int64_t rows, double prob) {
  std::vector<uint8_t> mask;
  Random random(seed, Stream::kMask, 0);
  for (int64_t i = 0; prob > 0 && i < rows; ++i) mask.push_back(random.next_uniform() < prob ? 0 : 1);
  return mask;
}

PolicyTensors draw_policy_layout(const PolicyDraw& draw) {
  PolicyTensors tensors;
  if (draw.use_offsets) {
    tensors.offsets = random_offsets(draw);
  } else {
    tensors.sequence_length = draw.rows / draw.sequences;
    for (int64_t b = 0; b <= draw.sequences; ++b) tensors.offsets.push_back(b * tensors.sequence_length);
  }
  tensors.mask = draw_mask(draw.seed, draw.rows, draw.mask_prob);
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
    oracle::PolicyInputs inputs;
    inputs.used = used;
    inputs.offsets = tensors.offsets;
    inputs.advantages = advantages;
    inputs.old_logp = old_logp;
    inputs.ref_logp = ref_logp;
    inputs.sampler_logp = sampler_logp;
    const oracle::PolicyResult result = policy_loss(options, inputs, logp, entropy);
    for (size_t i = 0; i < redraw.size(); ++i) redraw[i] = result.margin[i] < kClearMargin ? 1 : 0;
    const auto unclear = std::find(redraw.begin(), redraw.end(), 1);
    if (unclear == redraw.end()) return;
    const bool last = attempt + 1 == kMaxRedraws;
    if (last) {
      throw ToolError(kExitUsage, formatted("row {} lies within {:g} of a bound of the loss, whatever is drawn: choose another "
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

}  // namespace tileloss::tools
