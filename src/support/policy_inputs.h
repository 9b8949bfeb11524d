// A policy loss's inputs besides logits and labels, drawn at random.
//
//   PolicyTensors tensors = draw_policy_layout(draw);             // sequences, mask, advantages
//   used[i] = tensors.in_use(i) && label is not ignored; rows[i]: the oracle's logp and entropy of each
//   draw_policy_logps(draw, options, used, rows, tensors);        // old, ref and sampler logp, near the oracle's
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "oracle/policy.h"

namespace tileloss::tools {

// Empty vectors: not given.
struct PolicyTensors {
  std::vector<int64_t> offsets;  // [B+1]
  int64_t sequence_length = 0;   // > 0: what the library gets instead of the offsets
  std::vector<uint8_t> mask;
  std::vector<float> advantages;
  std::vector<float> old_logp, ref_logp, sampler_logp;

  bool in_use(int64_t row) const { return mask.empty() || mask[static_cast<size_t>(row)] != 0; }
  // Views of these vectors, as far as there are any; they must outlive `args`.
  void add_to(tileloss_args& args) const;
};

struct PolicyDraw {
  uint64_t seed = 0;
  int64_t rows = 0;
  int64_t sequences = 1;
  bool use_offsets = false;  // random lengths, every fifth sequence empty; otherwise all are rows / sequences long
  double mask_prob = 0;      // of a row not to be in use; 0: no mask
  bool token_advantages = false;
  // old_logp = logp + scale * normal, ...; absent: not given.
  std::optional<double> old_scale, ref_scale, sampler_scale;
};

// [rows], 0 for the share `prob` of them; empty if that is 0.
std::vector<uint8_t> draw_mask(uint64_t seed, int64_t rows, double prob);

// Advantages are normal; one in sixteen is exactly 0. Rows that are not in use hold NaN.
PolicyTensors draw_policy_layout(const PolicyDraw& draw);

// What the oracle knows of a row in use, and the errors that float32 is allowed in it.
struct RowSummary {
  double logp = 0;
  double entropy = 0;
  double logp_error = 0;
  double entropy_error = 0;
};

// No decision of the loss (a clip bound, a mask's threshold) lies closer to the data than this.
constexpr double kClearMargin = 2e-5;

// Redraws rows until they are clear of every decision. Throws ToolError (usage) if some cannot be made so: where an entropy lies
// on the threshold.
void draw_policy_logps(const PolicyDraw& draw, const oracle::PolicyOptions& options, std::span<const uint8_t> used,
                       std::span<const RowSummary> rows, PolicyTensors& tensors);

// The quantile next to `wanted` whose threshold lies halfway between two entropies that are 4 margins apart.
double clear_quantile(std::vector<double> entropies, double wanted);

}  // namespace tileloss::tools
