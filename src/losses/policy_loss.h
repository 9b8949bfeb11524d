// The GRPO family. For each token in use, with D = logp - old, rho = exp(D) or its sequence's, A the advantage:
//   loss = sum_t a_t [ f_t l(rho_t, logp_t, A_t) + beta KL_t ] - entropy bonus
// a_t the aggregation's weight, f_t = off-policy mask * entropy mask * sampler ratio (detached), l and its derivatives those of
// the kind (policy/*.h), KL_t those of policy/kl.h, times rho with kl_importance. Coefficients, u_t the upstream gradient:
//   token level:    dloss/dlogp_t = u_t a_t [ f_t (l_logp + rho l_rho) + beta (rho (KL_logp + KL), or KL_logp) ]
//   sequence level: rho_b = exp(sum D / n_b), so l_rho and KL reach every token of b: dloss/dlogp_t = u_t a_t [ f_t l_logp +
//                   beta (rho_b KL_logp, or KL_logp) ] + (rho_b / n_b) sum_t' u_t' a_t' [ f_t' l_rho,t' + beta KL_t' ]
//   dloss/dH_t = -u_t entropy_coef * (1 / tokens kept, or a_t)
// from which row_coefficients.h makes the gradient of the logits. Source: losses.md, "Policy losses", checked there against TRL,
// verl and Liger.
#pragma once

#include <algorithm>

#include "losses/aggregation.h"
#include "losses/policy/kinds.h"
#include "losses/policy/kl.h"
#include "losses/policy/metrics.h"
#include "losses/policy/options.h"
#include "losses/policy/sequences.h"

namespace tileloss::impl {

class PolicyLoss {
 public:
  using Options = tileloss_policy_loss_options;

  explicit PolicyLoss(const LossContext& context)
      : context_(context), options_(context.options_as<Options>()), scratch_(context_, has_quantile()) {}

  std::int64_t scratch_bytes() const { return scratch_.bytes; }

  std::uint32_t forward_sums() const { return backward_sums() | (has_metrics() ? kEntropySum : kNoSums); }
  std::uint32_t backward_sums() const {
    return has_quantile() || has_threshold() || may_differ(options_.entropy_coef, 0) ? kEntropySum : kNoSums;
  }

  bool is_multiple_of_p() const { return !may_differ(options_.entropy_coef, 0); }

  bool couples_rows() const {
    const bool sampler_needs_logp = has_sampler() && !context_.old_logp && options_.sampler_level == TILELOSS_LEVEL_SEQUENCE;
    return needs_sequence_ratio() || options_.kind == TILELOSS_POLICY_VESPO || has_off_policy_mask() || has_quantile() ||
           sampler_needs_logp || (has_threshold() && has_mean_bonus());
  }

  template <class Steps>
  void prepare(Steps&& steps) const {
    steps.template each<&PolicyLoss::read_numbers>(1);
    steps.template each<&PolicyLoss::start_sequence>(context_.sequences.count());
    if (scratch_.sequence_of != nullptr) steps.template each<&PolicyLoss::find_sequence>(context_.rows);
    steps.template sum<&PolicyLoss::tokens_of, &PolicyLoss::take_tokens>(context_.sequences.count());
  }

  template <class Steps, class Rows>
  void couple(Steps&& steps, const Rows& rows) const {
    steps.template each<&PolicyLoss::sum_over_sequence<Rows>>(context_.sequences.count(), rows);
    if (has_quantile()) {
      steps.template each<&PolicyLoss::keep_entropy<Rows>>(context_.rows, rows);
      steps.sort(scratch_.entropies, context_.rows);
      steps.template sum<&PolicyLoss::is_nan<Rows>, &PolicyLoss::take_quantile>(context_.rows, rows);
    }
    if (has_mean_bonus() && (has_quantile() || has_threshold()))
      steps.template sum<&PolicyLoss::is_kept<Rows>, &PolicyLoss::take_kept_tokens>(context_.rows, rows);
    if (needs_sequence_ratio()) steps.template each<&PolicyLoss::sum_ratio_gradient<Rows>>(context_.sequences.count(), rows);
  }

  // The steps, in their order.
  TILELOSS_HOST_DEVICE void read_numbers(std::int64_t) {
    numbers_ = policy::read_numbers(options_);
    counts_.sequences = static_cast<double>(context_.sequences.count());
    counts_.max_length = static_cast<double>(options_.max_length > 0 ? options_.max_length : context_.sequences.length());
    counts_.num_items = numbers_.num_items;
    entropy_threshold_ = numbers_.entropy_threshold;
  }

  TILELOSS_HOST_DEVICE void start_sequence(std::int64_t b) {
    policy::Sequence s;
    for_each_used(b, [&](std::int64_t i) {
      s.tokens += 1;
      if (has_sampler() && context_.old_logp) s.sampler_sum += zero_if_nan(context_.old_logp[i] - context_.sampler_logp[i]);
    });
    scratch_.sequences[b] = s;
  }
  // By row: where offsets are wrong, which a device finds out later, sequences may share rows.
  TILELOSS_HOST_DEVICE void find_sequence(std::int64_t i) { scratch_.sequence_of[i] = context_.sequences.of(i); }
  TILELOSS_HOST_DEVICE double tokens_of(std::int64_t b) { return scratch_.sequences[b].tokens; }
  TILELOSS_HOST_DEVICE void take_tokens(double sum) { counts_.tokens = kept_tokens_ = sum; }

  template <class Rows>
  TILELOSS_HOST_DEVICE void sum_over_sequence(std::int64_t b, const Rows& rows) {
    policy::Sequence& s = scratch_.sequences[b];
    for_each_used(b, [&](std::int64_t i) {
      const double lp = logp(rows.stats(i));
      const double d = log_ratio(i, lp);
      s.log_ratio_sum += d;
      if (has_sampler() && !context_.old_logp) s.sampler_sum += zero_if_nan(difference(lp, context_.sampler_logp[i]));
      if (options_.kind == TILELOSS_POLICY_VESPO) s.log_weight += policy::vespo_log_weight(d, sampler_ratio(i, lp, s));
      const double before = context_.sampler_logp ? context_.sampler_logp[i] : context_.old_logp ? context_.old_logp[i] : lp;
      s.behind += zero_if_nan(difference(before, lp));
    });
    const double tokens = std::max(s.tokens, 1.0);
    if (is_sequence_level()) s.ratio = std::exp(s.log_ratio_sum / tokens);
    s.is_off_policy = s.behind / tokens > options_.off_policy_threshold;
  }

  template <class Rows>
  TILELOSS_HOST_DEVICE void sum_ratio_gradient(std::int64_t b, const Rows& rows) {
    for_each_used(b, [&](std::int64_t i) {
      const Terms t = terms(i, rows.stats(i));
      if (t.weight == 0) return;
      double slope = policy::scaled(t.factor, t.policy.dratio);
      if (has_importance()) slope += numbers_.beta * t.kl.value;
      scratch_.sequences[b].ratio_gradient += context_.loss_grad[i] * t.weight * slope;
    });
  }

  // The entropies of the tokens in use, then infinities in place of the other rows and of NaN.
  template <class Rows>
  TILELOSS_HOST_DEVICE void keep_entropy(std::int64_t i, const Rows& rows) {
    const double h = context_.labels.is_used(i) ? rows.stats(i).entropy : kInfinity;
    scratch_.entropies[i] = std::isnan(h) ? kInfinity : h;
  }
  template <class Rows>
  TILELOSS_HOST_DEVICE double is_nan(std::int64_t i, const Rows& rows) {
    return context_.labels.is_used(i) && std::isnan(rows.stats(i).entropy) ? 1 : 0;
  }
  // Their (1 - q) quantile, linearly interpolated.
  TILELOSS_HOST_DEVICE void take_quantile(double nans) {
    const auto count = static_cast<std::int64_t>(counts_.tokens);
    entropy_threshold_ = std::numeric_limits<double>::quiet_NaN();
    if (nans > 0 || count == 0) return;
    // A place that is a whole number but for rounding is one: 0.3 * 10 is 3 + 4e-16, which would drop the token at place 3.
    double position = (1 - options_.entropy_quantile) * static_cast<double>(count - 1);
    if (std::fabs(position - std::round(position)) < 1e-9) position = std::round(position);
    const auto below = static_cast<std::int64_t>(position);
    entropy_threshold_ = scratch_.entropies[below];
    if (below + 1 == count) return;
    entropy_threshold_ += (position - static_cast<double>(below)) * (scratch_.entropies[below + 1] - entropy_threshold_);
  }

  template <class Rows>
  TILELOSS_HOST_DEVICE double is_kept(std::int64_t i, const Rows& rows) {
    return context_.labels.is_used(i) && keeps_entropy(rows.stats(i).entropy) ? 1 : 0;
  }
  TILELOSS_HOST_DEVICE void take_kept_tokens(double sum) { kept_tokens_ = sum; }

  TILELOSS_HOST_DEVICE void report_sequence(std::int64_t b) {
    policy::SequenceReport r;
    for_each_used(b, [&](std::int64_t i) { r.add(scratch_.records[i]); });
    scratch_.sequences[b].report = r;
  }
  // The fraction r of a sequence without tokens: what its empty sum gives, truncated or masked like any other.
  TILELOSS_HOST_DEVICE void report(std::int64_t) { policy::write_metrics(context_, options_, scratch_.sequences, corrected(1)); }

  TILELOSS_HOST_DEVICE RowResult row(std::int64_t i, const RowStats& stats) const {
    const Terms t = terms(i, stats);
    const double upstream = context_.loss_grad[i];
    RowResult r;
    if (t.weight != 0) r.loss = t.weight * (policy::scaled(t.factor, t.policy.loss) + kl_term(t));
    double g_entropy = 0;
    if (numbers_.entropy_coef != 0) {
      const double bonus = numbers_.entropy_coef * entropy_weight(t, stats.entropy);
      if (bonus != 0) r.loss -= bonus * stats.entropy;
      g_entropy = -upstream * bonus;
    }
    r.coefficients =
        coefficients_from_upstream(logp_gradient(t, upstream) / context_.logp_divisor(), 0, g_entropy, stats.entropy);
    if (scratch_.records != nullptr) scratch_.records[i] = record(t, stats);
    return r;
  }

  template <class Steps>
  void finish(Steps&& steps) const {
    if (!has_metrics()) return;
    steps.template each<&PolicyLoss::report_sequence>(context_.sequences.count());
    steps.template each<&PolicyLoss::report>(1);
  }

  static const char* limit_number(const Options& options, tileloss_field& field) { return policy::limit_number(options, field); }

  static LossInfo info() {
    return {.name = "policy_loss",
            .is_loss = true,
            .options_size = sizeof(Options),
            .fields = kPolicyLossFields,
            .tensors = kLossGrad | kMask | kSequences | kPolicyLogps | kAdvantages | kStepMetrics,
            .make = &make_stage<PolicyLoss>,
            .check = &policy::check_options,
            .check_numbers = &policy::check_numbers,
            .is_per_row = [](const void* o) { return static_cast<const Options*>(o)->aggregation == TILELOSS_AGGREGATION_NONE; },
            .presets = kPolicyLossPresetNames,
            .set_preset = &policy::set_preset,
            .metrics = kPolicyLossMetricNames};
  }

 private:
  // A token's parts, before they are put together.
  struct Terms {
    double weight = 0;  // the aggregation's
    double factor = 1;  // f
    double ratio = 1;
    double ratio_slope = 1;  // d log rho / dlogp, without a sequence's 1 / n_b: 0 beyond log_ratio_clamp
    double sampler_ratio = 1;
    double advantage = 0;
    double phi = 1;
    bool is_dropped = false;
    const policy::Sequence* sequence = nullptr;
    policy::TokenLoss policy;
    policy::Kl kl;
  };

  TILELOSS_HOST_DEVICE static double zero_if_nan(double x) { return std::isnan(x) ? 0 : x; }

  TILELOSS_HOST_DEVICE bool has_quantile() const { return !std::isnan(options_.entropy_quantile); }
  TILELOSS_HOST_DEVICE bool has_threshold() const { return is_given(options_.entropy_threshold); }
  TILELOSS_HOST_DEVICE bool has_off_policy_mask() const { return !std::isnan(options_.off_policy_threshold); }
  TILELOSS_HOST_DEVICE bool has_sampler() const { return options_.sampler_correction != TILELOSS_SAMPLER_OFF; }
  TILELOSS_HOST_DEVICE bool has_metrics() const { return context_.metrics.dtype != TILELOSS_NONE; }
  TILELOSS_HOST_DEVICE bool has_kl() const { return may_differ(options_.beta, 0); }
  TILELOSS_HOST_DEVICE bool has_importance() const { return has_kl() && options_.kl_importance != 0; }
  TILELOSS_HOST_DEVICE bool has_mean_bonus() const {
    return may_differ(options_.entropy_coef, 0) && options_.entropy_reduction == TILELOSS_ENTROPY_TOKEN_MEAN;
  }
  TILELOSS_HOST_DEVICE bool uses_ratio() const { return policy::uses_ratio(options_.kind); }
  TILELOSS_HOST_DEVICE bool is_sequence_level() const { return options_.ratio_level == TILELOSS_LEVEL_SEQUENCE; }
  TILELOSS_HOST_DEVICE bool needs_sequence_ratio() const {
    return is_sequence_level() && (uses_ratio() || has_importance() || has_metrics());
  }

  TILELOSS_HOST_DEVICE std::int64_t sequence_of(std::int64_t i) const {
    if (scratch_.sequence_of != nullptr) return scratch_.sequence_of[i];
    return context_.sequences.length() > 0 ? i / context_.sequences.length() : 0;
  }

  TILELOSS_HOST_DEVICE double logp(const RowStats& stats) const { return stats.logp / context_.logp_divisor(); }

  // 0 where both are the same in float32, as the inputs are, which logprobs may have made of this very row: the ratio is then
  // exactly 1, and the KL 0. Rounding every logp instead would cost a KL near 0 its digits.
  TILELOSS_HOST_DEVICE static double difference(double a, double b) {
    return static_cast<float>(a) == static_cast<float>(b) && std::isfinite(a) ? 0 : a - b;
  }
  TILELOSS_HOST_DEVICE double log_ratio(std::int64_t i, double logp) const {
    const double d = context_.old_logp ? difference(logp, context_.old_logp[i]) : (std::isnan(logp) ? logp : 0);
    return policy::clamp(d, -options_.log_ratio_clamp, options_.log_ratio_clamp);
  }
  TILELOSS_HOST_DEVICE bool is_beyond_clamp(std::int64_t i, double logp) const {
    return context_.old_logp && std::fabs(difference(logp, context_.old_logp[i])) > options_.log_ratio_clamp;
  }

  // The sampler ratio, truncated or masked.
  TILELOSS_HOST_DEVICE double corrected(double ratio) const {
    if (options_.sampler_correction == TILELOSS_SAMPLER_TRUNCATE)
      return policy::clamp(ratio, options_.sampler_min, options_.sampler_max);
    return ratio < options_.sampler_min || ratio > options_.sampler_max ? 0 : ratio;
  }
  TILELOSS_HOST_DEVICE double sampler_ratio(std::int64_t i, double logp, const policy::Sequence& s) const {
    if (!has_sampler()) return 1;
    if (options_.sampler_level == TILELOSS_LEVEL_SEQUENCE) return corrected(std::exp(s.sampler_sum));
    return corrected(std::exp(sampler_difference(i, logp)));
  }
  TILELOSS_HOST_DEVICE double sampler_difference(std::int64_t i, double logp) const {
    return zero_if_nan(difference(context_.old_logp ? context_.old_logp[i] : logp, context_.sampler_logp[i]));
  }

  // A row whose entropy is NaN is not kept: the others' share of the bonus does not depend on it.
  TILELOSS_HOST_DEVICE bool keeps_entropy(double entropy) const {
    return std::isnan(entropy_threshold_) || entropy >= entropy_threshold_;
  }
  TILELOSS_HOST_DEVICE double entropy_factor(double entropy) const {
    if (!has_quantile() && !has_threshold()) return 1;
    if (std::isnan(entropy_threshold_)) return has_quantile() ? entropy_threshold_ : 1;
    return keeps_entropy(entropy) ? 1 : 0;
  }

  // The tokens in use of a sequence, in their order.
  template <class F>
  TILELOSS_HOST_DEVICE void for_each_used(std::int64_t b, F&& visit) const {
    for (std::int64_t i = context_.sequences.begin(b); i < context_.sequences.end(b); ++i) {
      if (context_.labels.is_used(i)) visit(i);
    }
  }

  TILELOSS_HOST_DEVICE Terms terms(std::int64_t i, const RowStats& stats) const {
    const double lp = logp(stats);
    const std::int64_t b = sequence_of(i);
    Terms t;
    t.sequence = &scratch_.sequences[b];
    const policy::Sequence& s = *t.sequence;
    t.weight = token_weight(options_.aggregation, counts_, s.tokens);
    t.advantage = context_.advantages[options_.advantage_level == TILELOSS_LEVEL_SEQUENCE ? b : i];
    t.ratio = is_sequence_level() ? s.ratio : std::exp(log_ratio(i, lp));
    t.ratio_slope = is_beyond_clamp(i, lp) ? 0 : 1;
    t.sampler_ratio = sampler_ratio(i, lp, s);
    t.is_dropped = s.is_off_policy && t.advantage < 0;
    const bool is_vespo = options_.kind == TILELOSS_POLICY_VESPO;
    if (is_vespo) t.phi = policy::vespo_phi(s.log_weight, t.advantage, options_);
    t.factor = (t.is_dropped ? 0 : 1) * entropy_factor(stats.entropy) * (is_vespo ? 1 : t.sampler_ratio);
    t.policy = policy::token_loss(options_.kind, {lp, t.ratio, t.advantage, t.phi}, numbers_);
    if (context_.ref_logp) t.kl = policy::estimate_kl(difference(context_.ref_logp[i], lp), options_);
    return t;
  }

  TILELOSS_HOST_DEVICE double kl_term(const Terms& t) const {
    if (numbers_.beta == 0) return 0;
    return numbers_.beta * (has_importance() ? t.ratio * t.kl.value : t.kl.value);
  }

  // A ratio that the loss is not made of may be NaN, and has no share in the gradient either.
  TILELOSS_HOST_DEVICE double logp_gradient(const Terms& t, double upstream) const {
    double g = policy::scaled(t.factor, t.policy.dlogp);
    double kl = t.kl.dlogp;
    if (has_importance()) kl *= t.ratio;
    if (!is_sequence_level()) {
      if (uses_ratio()) g += policy::scaled(t.ratio_slope, policy::scaled(t.factor, policy::scaled(t.policy.dratio, t.ratio)));
      if (has_importance()) kl += policy::scaled(t.ratio_slope, t.ratio * t.kl.value);
    }
    if (numbers_.beta != 0) g += numbers_.beta * kl;
    g = t.weight == 0 ? 0 : g * upstream * t.weight;
    if (is_sequence_level() && (uses_ratio() || has_importance()))
      g += policy::scaled(t.ratio_slope, policy::scaled(t.sequence->ratio_gradient, t.ratio) / std::max(t.sequence->tokens, 1.0));
    return g;
  }

  // What a token's entropy counts for in the bonus.
  TILELOSS_HOST_DEVICE double entropy_weight(const Terms& t, double entropy) const {
    if (options_.entropy_reduction == TILELOSS_ENTROPY_AS_LOSS) return t.weight;
    return entropy_factor(entropy) / std::max(kept_tokens_, 1.0);
  }

  TILELOSS_HOST_DEVICE policy::TokenRecord record(const Terms& t, const RowStats& stats) const {
    policy::TokenRecord r;
    r.kl = options_.kl_importance != 0 ? t.ratio * t.kl.value : t.kl.value;
    r.entropy = stats.entropy;
    r.ratio = t.ratio;
    r.sampler_ratio = t.sampler_ratio;
    r.phi = t.phi;
    r.is_low = t.ratio < numbers_.low && t.advantage < 0;
    r.is_high = t.ratio > numbers_.high && t.advantage > 0;
    r.is_capped = t.ratio > numbers_.cap && t.advantage > 0;
    r.is_dropped = t.is_dropped;
    return r;
  }

  LossContext context_;
  Options options_;
  policy::Scratch scratch_;
  policy::Numbers numbers_;
  AggregationCounts counts_;
  double entropy_threshold_ = 0;
  double kept_tokens_ = 0;
};

}  // namespace tileloss::impl
