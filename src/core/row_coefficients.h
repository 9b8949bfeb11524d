// A row's backward in four floats: dL/dz_j = target [j = y] + p_j (prob + prob_logp log p_j) + uniform u_j.  (losses.md, "One
// gradient form for every loss".)
#ifndef TILELOSS_CORE_ROW_COEFFICIENTS_H_
#define TILELOSS_CORE_ROW_COEFFICIENTS_H_

namespace tileloss {

struct RowCoefficients {
  float target = 0;
  float prob = 0;
  float prob_logp = 0;
  float uniform = 0;  // times 1, or times the class weight c_j
};

// From upstream gradients of logp, lse and the entropy H. At temperature_on = logprob the upstream of logp' is divided by T.
inline RowCoefficients coefficients_from_upstream(double g_logp, double g_lse, double g_entropy, double entropy) {
  RowCoefficients c;
  c.target = static_cast<float>(g_logp);
  c.prob = static_cast<float>(-g_logp + g_lse - (g_entropy == 0 ? 0.0 : g_entropy * entropy));
  c.prob_logp = static_cast<float>(-g_entropy);
  return c;
}

}  // namespace tileloss

#endif  // TILELOSS_CORE_ROW_COEFFICIENTS_H_
