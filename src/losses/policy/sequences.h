// What a policy loss knows of each sequence, of each token while it reports metrics, and where that lies in the stage's scratch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "losses/loss.h"

namespace tileloss::impl::policy {

// What is reported of a token.
struct TokenRecord {
  double kl = 0, entropy = 0, ratio = 1, sampler_ratio = 1, phi = 1;
  bool is_low = false, is_high = false, is_capped = false, is_dropped = false;
};

// Sums over its tokens of what is reported of each.
struct SequenceReport {
  double kl = 0, entropy = 0, low = 0, high = 0, either = 0, capped = 0, ratio = 0, sampler = 0, phi = 0;
  double sampler_min = kInfinity, sampler_max = 0;
  bool is_dropped = false;  // a token is

  TILELOSS_HOST_DEVICE void add(const TokenRecord& t) {
    kl += t.kl;
    entropy += t.entropy;
    low += t.is_low ? 1 : 0;
    high += t.is_high ? 1 : 0;
    either += t.is_low || t.is_high ? 1 : 0;
    capped += t.is_capped ? 1 : 0;
    ratio += t.ratio;
    sampler += t.sampler_ratio;
    phi += t.phi;
    sampler_min = std::min(sampler_min, t.sampler_ratio);
    sampler_max = std::max(sampler_max, t.sampler_ratio);
    is_dropped = is_dropped || t.is_dropped;
  }
};

struct Sequence {
  double tokens = 0;          // n_b, those in use
  double log_ratio_sum = 0;   // of D_t
  double ratio = 1;           // rho_b, at ratio_level sequence
  double sampler_sum = 0;     // of old - sampler
  double log_weight = 0;      // vespo's log w before its clamp
  double behind = 0;          // of (sampler, else old) - logp: the off-policy mask's
  double ratio_gradient = 0;  // dloss / drho_b, upstream included
  bool is_off_policy = false;
  SequenceReport report;  // with metrics
};

// The arrays of a stage, one after the other, each aligned for double.
struct Scratch {
  Sequence* sequences = nullptr;        // [B]
  std::int64_t* sequence_of = nullptr;  // [N], with offsets
  TokenRecord* records = nullptr;       // [N], with metrics
  double* entropies = nullptr;          // [N], with an entropy quantile
  std::int64_t bytes = 0;

  Scratch(const LossContext& context, bool with_quantile) {
    std::byte* at = context.scratch;
    const auto take = [&]<class T>(T*& array, std::int64_t count) {
      const std::int64_t size = count * static_cast<std::int64_t>(sizeof(T));
      if (context.scratch != nullptr) array = reinterpret_cast<T*>(at);
      at = context.scratch == nullptr ? nullptr : at + size;
      bytes += size;
    };
    take(sequences, context.sequences.count());
    if (context.sequences.has_offsets()) take(sequence_of, context.rows);
    if (context.metrics.dtype != TILELOSS_NONE) take(records, context.rows);
    if (with_quantile) take(entropies, context.rows);
  }
};

}  // namespace tileloss::impl::policy
