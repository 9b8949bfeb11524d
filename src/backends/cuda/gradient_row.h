// What a row's gradient is made of, a column at a time.
#pragma once

namespace tileloss::impl::cuda {

// dL/dx_j of every column but the label's: 2^t (prob + prob_t t) + uniform c_j, times a softcap's own derivative.
struct GradientRow {
  double top;
  float prob;
  double prob_base, prob_t;  // in double: of rows that are nearly uniform the two all but cancel
  float uniform;
  float label;              // the label's own, as it is stored
  float bias, prob_biased;  // of a 16-bit row that is a multiple of p: 2^(x scale + bias) prob_biased
};

}  // namespace tileloss::impl::cuda
