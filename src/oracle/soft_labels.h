// Cross-entropy with class probabilities instead of labels, in double:
//   L_i = -sum_j q'_j log p_j,  q' = (1 - s) q + s/V  (label smoothing s, V the columns of the row's set, where alone s/V is
//   added),  dL/dz_j = (sum q') p_j - q'_j
// q need not sum to 1. Weights and reductions are a Distillation's without labels (distillation.h): a row's loss times its
// token_weight, the gradient times token_weight, upstream and factor. mean then divides by the rows, as torch does.
//
// Special values: q'_j = 0 has no part in the sum, also where p_j = 0 (torch gives NaN there); p_j = 0 with q'_j > 0 gives +inf
// and the gradient as the formula, but 0 outside the set; z with a NaN, a +inf or nothing but -inf, or a q with a NaN or an
// infinity: NaN.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oracle/oracle.h"

namespace tileloss::oracle {

struct SoftLabelsRow {
  double loss = 0.0;
  std::vector<double> dz;         // [V]
  std::vector<double> dlogits;    // [V] by the logits as stored
  std::vector<double> magnitude;  // [V] of dlogits: the sum of the absolute values of the terms of each component
};

// `logits`, `q`: the valid columns, q also outside the set. Throws std::invalid_argument if their sizes differ, on a
// label_smoothing outside [0, 1], and on temperature_on logprob.
void soft_labels_row(const Transform& transform, std::span<const double> logits, std::span<const double> q,
                     double label_smoothing, SoftLabelsRow& out, Allowed allowed = {});

}  // namespace tileloss::oracle
