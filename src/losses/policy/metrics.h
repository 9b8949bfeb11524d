// What a step reports of itself: the means of the token records, as tileloss.h's TILELOSS_METRIC_* define them.
#ifndef TILELOSS_LOSSES_POLICY_METRICS_H_
#define TILELOSS_LOSSES_POLICY_METRICS_H_

#include <algorithm>
#include <array>
#include <limits>

#include "losses/policy/sequences.h"

namespace tileloss::impl::policy {

inline constexpr const char* kMetricNames =
    "kl|entropy|clip_low_fraction|clip_high_fraction|clip_fraction|cispo_clip_fraction|ratio_mean|sampler_ratio_mean|"
    "sampler_ratio_min|sampler_ratio_max|phi_mean|dropped_sequences|tokens";

// A mean over the tokens, and one over the sequences of each one's token mean, `empty` standing for a sequence without tokens.
class Mean {
 public:
  void begin_sequence() { in_sequence_ = 0; }
  void add(double x) {
    in_tokens_ += x;
    in_sequence_ += x;
  }
  void end_sequence(double tokens, double empty) { in_sequences_ += tokens > 0 ? in_sequence_ / tokens : empty; }
  double over_tokens(double tokens) const { return tokens > 0 ? in_tokens_ / tokens : 0; }
  double over_sequences(double count) const { return count > 0 ? in_sequences_ / count : 0; }

 private:
  double in_tokens_ = 0, in_sequence_ = 0, in_sequences_ = 0;
};

class MetricsReport {
 public:
  MetricsReport(const LossContext& context, const tileloss_policy_loss_options& options, const Scratch& scratch)
      : context_(context), options_(options), scratch_(scratch) {}

  // The fraction r of a sequence without tokens: what its empty sum gives, truncated or masked like any other.
  void write(double empty_sampler_ratio) {
    gather(empty_sampler_ratio);
    std::array<double, TILELOSS_POLICY_METRICS> m;
    m.fill(std::numeric_limits<double>::quiet_NaN());
    if (context_.ref_logp) m[TILELOSS_METRIC_KL] = kl_.over_tokens(tokens_);
    m[TILELOSS_METRIC_ENTROPY] = entropy_.over_tokens(tokens_);
    const bool by_sequence = options_.ratio_level == TILELOSS_LEVEL_SEQUENCE;
    const auto mean = [&](const Mean& x) { return by_sequence ? x.over_sequences(count_) : x.over_tokens(tokens_); };
    if (options_.kind == TILELOSS_POLICY_CLIP) {
      m[TILELOSS_METRIC_CLIP_LOW_FRACTION] = mean(low_);
      m[TILELOSS_METRIC_CLIP_HIGH_FRACTION] = mean(high_);
      m[TILELOSS_METRIC_CLIP_FRACTION] = mean(either_);
    }
    if (options_.kind == TILELOSS_POLICY_CISPO) m[TILELOSS_METRIC_CISPO_CLIP_FRACTION] = mean(capped_);
    m[TILELOSS_METRIC_RATIO_MEAN] = mean(ratio_);
    if (options_.sampler_correction != TILELOSS_SAMPLER_OFF) {
      const bool whole = options_.sampler_level == TILELOSS_LEVEL_SEQUENCE;
      m[TILELOSS_METRIC_SAMPLER_RATIO_MEAN] = whole ? sampler_.over_sequences(count_) : sampler_.over_tokens(tokens_);
      const bool any = (whole ? count_ : tokens_) > 0;
      m[TILELOSS_METRIC_SAMPLER_RATIO_MIN] = any ? sampler_min_ : 0;
      m[TILELOSS_METRIC_SAMPLER_RATIO_MAX] = any ? sampler_max_ : 0;
    }
    if (options_.kind == TILELOSS_POLICY_VESPO) m[TILELOSS_METRIC_PHI_MEAN] = phi_.over_sequences(count_);
    m[TILELOSS_METRIC_DROPPED_SEQUENCES] = dropped_;
    m[TILELOSS_METRIC_TOKENS] = tokens_;
    auto* out = static_cast<float*>(context_.metrics.data);
    for (std::int64_t i = 0; i < context_.metrics.size; ++i) {
      out[i * context_.metrics.stride] = static_cast<float>(m[static_cast<std::size_t>(i)]);
    }
  }

 private:
  void gather(double empty_sampler_ratio) {
    count_ = static_cast<double>(context_.sequences.count());
    for (std::int64_t b = 0; b < context_.sequences.count(); ++b) {
      for (Mean* x : {&kl_, &entropy_, &low_, &high_, &either_, &capped_, &ratio_, &sampler_, &phi_}) x->begin_sequence();
      bool is_dropped = false;
      for (std::int64_t i = context_.sequences.begin(b); i < context_.sequences.end(b); ++i) {
        if (!context_.labels.is_used(i)) continue;
        add(scratch_.records[i]);
        is_dropped = is_dropped || scratch_.records[i].is_dropped;
      }
      const double tokens = scratch_.sequences[b].tokens;
      for (Mean* x : {&low_, &high_, &either_, &capped_}) x->end_sequence(tokens, 0);
      for (Mean* x : {&ratio_, &phi_}) x->end_sequence(tokens, 1);
      sampler_.end_sequence(tokens, empty_sampler_ratio);
      if (tokens == 0 && options_.sampler_level == TILELOSS_LEVEL_SEQUENCE) add_extreme(empty_sampler_ratio);
      tokens_ += tokens;
      dropped_ += is_dropped ? 1 : 0;
    }
  }

  void add(const TokenRecord& r) {
    kl_.add(r.kl);
    entropy_.add(r.entropy);
    low_.add(r.is_low ? 1 : 0);
    high_.add(r.is_high ? 1 : 0);
    either_.add(r.is_low || r.is_high ? 1 : 0);
    capped_.add(r.is_capped ? 1 : 0);
    ratio_.add(r.ratio);
    phi_.add(r.phi);
    sampler_.add(r.sampler_ratio);
    add_extreme(r.sampler_ratio);
  }

  void add_extreme(double r) {
    sampler_min_ = std::min(sampler_min_, r);
    sampler_max_ = std::max(sampler_max_, r);
  }

  const LossContext& context_;
  const tileloss_policy_loss_options& options_;
  const Scratch& scratch_;
  Mean kl_, entropy_, low_, high_, either_, capped_, ratio_, sampler_, phi_;
  double sampler_min_ = std::numeric_limits<double>::infinity(), sampler_max_ = 0;
  double count_ = 0, tokens_ = 0, dropped_ = 0;
};

}  // namespace tileloss::impl::policy

#endif  // TILELOSS_LOSSES_POLICY_METRICS_H_
