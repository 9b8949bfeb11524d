// What a step reports of itself: the means of the token records, as tileloss.h's TILELOSS_METRIC_* define them.
#pragma once

#include <algorithm>
#include <limits>

#include "losses/policy/sequences.h"

namespace tileloss::impl::policy {

// A mean over the tokens, and one over the sequences of each one's token mean, `empty` standing for a sequence without tokens.
class Mean {
 public:
  TILELOSS_HOST_DEVICE void add(double sum, double tokens, double empty = 0) {
    in_tokens_ += sum;
    in_sequences_ += tokens > 0 ? sum / tokens : empty;
  }
  TILELOSS_HOST_DEVICE double over_tokens(double tokens) const { return tokens > 0 ? in_tokens_ / tokens : 0; }
  TILELOSS_HOST_DEVICE double over_sequences(double count) const { return count > 0 ? in_sequences_ / count : 0; }

 private:
  double in_tokens_ = 0, in_sequences_ = 0;
};

// From the sequences' reports. `empty_sampler_ratio`: that of a sequence without tokens.
TILELOSS_HOST_DEVICE inline void write_metrics(const LossContext& context, const tileloss_policy_loss_options& options,
                                               const Sequence* sequences, double empty_sampler_ratio) {
  const bool by_sequence = options.ratio_level == TILELOSS_LEVEL_SEQUENCE;
  const bool by_whole_sampler = options.sampler_level == TILELOSS_LEVEL_SEQUENCE;
  Mean kl, entropy, low, high, either, capped, ratio, sampler, phi;
  double sampler_min = kInfinity, sampler_max = 0, tokens = 0, dropped = 0;
  const auto count = static_cast<double>(context.sequences.count());
  for (std::int64_t b = 0; b < context.sequences.count(); ++b) {
    const SequenceReport& r = sequences[b].report;
    const double n = sequences[b].tokens;
    kl.add(r.kl, n);
    entropy.add(r.entropy, n);
    low.add(r.low, n);
    high.add(r.high, n);
    either.add(r.either, n);
    capped.add(r.capped, n);
    ratio.add(r.ratio, n, 1);
    sampler.add(r.sampler, n, empty_sampler_ratio);
    phi.add(r.phi, n, 1);
    const bool is_empty = n == 0 && by_whole_sampler;
    sampler_min = std::min(sampler_min, is_empty ? empty_sampler_ratio : r.sampler_min);
    sampler_max = std::max(sampler_max, is_empty ? empty_sampler_ratio : r.sampler_max);
    tokens += n;
    dropped += r.is_dropped ? 1 : 0;
  }
  double m[TILELOSS_POLICY_METRICS];
  for (double& x : m) x = std::numeric_limits<double>::quiet_NaN();
  if (context.ref_logp) m[TILELOSS_METRIC_KL] = kl.over_tokens(tokens);
  m[TILELOSS_METRIC_ENTROPY] = entropy.over_tokens(tokens);
  const auto mean = [&](const Mean& x) { return by_sequence ? x.over_sequences(count) : x.over_tokens(tokens); };
  if (options.kind == TILELOSS_POLICY_CLIP) {
    m[TILELOSS_METRIC_CLIP_LOW_FRACTION] = mean(low);
    m[TILELOSS_METRIC_CLIP_HIGH_FRACTION] = mean(high);
    m[TILELOSS_METRIC_CLIP_FRACTION] = mean(either);
  }
  if (options.kind == TILELOSS_POLICY_CISPO) m[TILELOSS_METRIC_CISPO_CLIP_FRACTION] = mean(capped);
  m[TILELOSS_METRIC_RATIO_MEAN] = mean(ratio);
  if (options.sampler_correction != TILELOSS_SAMPLER_OFF) {
    m[TILELOSS_METRIC_SAMPLER_RATIO_MEAN] = by_whole_sampler ? sampler.over_sequences(count) : sampler.over_tokens(tokens);
    const bool any = (by_whole_sampler ? count : tokens) > 0;
    m[TILELOSS_METRIC_SAMPLER_RATIO_MIN] = any ? sampler_min : 0;
    m[TILELOSS_METRIC_SAMPLER_RATIO_MAX] = any ? sampler_max : 0;
  }
  if (options.kind == TILELOSS_POLICY_VESPO) m[TILELOSS_METRIC_PHI_MEAN] = phi.over_sequences(count);
  m[TILELOSS_METRIC_DROPPED_SEQUENCES] = dropped;
  m[TILELOSS_METRIC_TOKENS] = tokens;
  auto* out = static_cast<float*>(context.metrics.data);
  for (std::int64_t i = 0; i < context.metrics.size; ++i) out[i * context.metrics.stride] = static_cast<float>(m[i]);
}

}  // namespace tileloss::impl::policy
