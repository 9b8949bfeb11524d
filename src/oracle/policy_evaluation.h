// The working state of policy_loss (policy.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "oracle/dual.h"
#include "oracle/oracle.h"
#include "oracle/policy.h"

namespace tileloss::oracle {

inline bool is_given(double option) { return !std::isnan(option); }
inline double clamped(double x, double low, double high) { return clamp(Dual{x, {}}, low, high).value; }
inline double at_least_one(std::size_t count) { return static_cast<double>(std::max<std::size_t>(count, 1)); }

// What belongs to a sequence. `detached_*` are constants of the gradient.
struct PolicySequence {
  std::vector<std::size_t> tokens;  // those in use
  double log_ratio = 0.0;           // mean D
  double detached_log_ratio = 0.0;
  double sampler_ratio = 1.0;     // sampler_level sequence
  double vespo_log_weight = 0.0;  // log w_b
  bool off_policy = false;        // its tokens with A < 0 are dropped
  double through_ratio = 0.0;     // dL / d log rho_b
  double size() const { return at_least_one(tokens.size()); }
};

struct PolicyToken {
  std::size_t sequence = 0;
  double advantage = 0.0;
  double log_ratio = 0.0;           // D, clamped
  double detached_log_ratio = 0.0;  // the same from the detached logp
  bool ratio_moves = true;          // not clamped: drho/dlogp is not 0
  double sampler_ratio = 1.0;       // r, corrected
  double entropy_factor = 1.0;
  bool dropped = false;  // by the off-policy mask
  double phi = 1.0;
  double kl = 0.0;  // with its importance factor
};

// One evaluation of the loss: first what couples tokens and what is constant (policy_coupling.cpp), then each token's loss as a
// Dual, then the gradient (policy.cpp).
class PolicyEvaluation {
 public:
  PolicyEvaluation(const PolicyOptions& options, const PolicyInputs& inputs, std::span<const double> logp,
                   std::span<const double> entropy);
  PolicyResult run();

 private:
  void check_sizes() const;
  void set_log_ratios();
  void set_sampler_ratios();
  void set_off_policy_mask();
  void set_entropy_mask();
  void set_vespo_weights();

  Dual ratio(std::size_t i) const;
  double detached_ratio(std::size_t i) const;
  Dual policy_term(std::size_t i);
  Dual clip_term(std::size_t i);
  double phi(std::size_t i) const;
  Dual kl_term(std::size_t i);
  Dual total(std::size_t i);

  double weight(std::size_t i) const;
  double upstream(std::size_t i) const { return at_row(in_.loss_grad, static_cast<std::int64_t>(i), 1.0); }
  void add_gradient(std::size_t i, const Dual& loss);
  void add_ratio_gradients();
  double add_entropy_bonus();
  void set_metrics();
  template <typename Value>
  double mean(Level level, double of_empty, Value value) const;

  double old_logp(std::size_t i) const { return in_.old_logp.empty() ? detached_logp_[i] : in_.old_logp[i]; }
  double high() const { return 1.0 + (is_given(opt_.epsilon_high) ? opt_.epsilon_high : opt_.epsilon_low); }
  double low() const { return 1.0 - opt_.epsilon_low; }
  double cispo_cap() const { return opt_.cispo_cap == CispoCap::kRaw ? opt_.epsilon_high : 1.0 + opt_.epsilon_high; }
  bool has_ratio() const { return opt_.kind != PolicyKind::kVespo && opt_.kind != PolicyKind::kReinforce; }
  bool sequence_ratio() const { return opt_.ratio_level == Level::kSequence; }
  // Another rounding of the two may turn which is larger.
  void decide(std::size_t token, double value, double bound);
  void decide_relative(std::size_t token, double value, double bound);
  void decide_ratio(std::size_t token, double bound);

  const PolicyOptions& opt_;
  const PolicyInputs& in_;
  std::span<const double> logp_, entropy_, detached_logp_, detached_entropy_;
  std::vector<PolicySequence> sequences_;
  std::vector<PolicyToken> tokens_;
  std::vector<std::size_t> used_;
  PolicyResult out_;
};

}  // namespace tileloss::oracle
