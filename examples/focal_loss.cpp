#include <cmath>
#include <cstdint>
#include <cstdio>
#include <tileloss/tileloss.hpp>
#include <vector>

int main() {
  const std::vector<float> logits = {1, 2, 3, 4, 2, 0, 0, 0};  // 2 tokens, a vocabulary of 4
  const std::vector<std::int64_t> labels = {3, 0};
  std::vector<float> max(2), sum(2), label_logit(2), slope(2), dlogits(2 * 4);
  tileloss_row_state state;
  tileloss_row_state_init(&state);
  state.rows = 2, state.max = max.data(), state.sum = sum.data(), state.label_logit = label_logit.data();

  tileloss::Status status =
      tileloss::forward_sweep({.logits = tileloss::Matrix(logits, 2, 4), .labels = labels, .row_state = &state});
  double loss = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    const double label = std::exp(label_logit[i] - max[i]), all = sum[i] + label;  // sum leaves the label's column out
    const double logp = label_logit[i] - max[i] - std::log(all), p = label / all, q = sum[i] / all;
    loss -= q * q * logp;                                   // -(1 - p)^2 log p
    slope[i] = static_cast<float>(q * (2 * p * logp - q));  // by log p, which has the gradient [j = y] - p_j
  }
  if (status) {
    status = tileloss::backward_sweep({.logits = tileloss::Matrix(logits, 2, 4),
                                       .labels = labels,
                                       .target_coef = slope,
                                       .dlogits = tileloss::Matrix(dlogits, 2, 4),
                                       .row_state = &state});
  }
  if (!status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  std::printf("loss %.4f, dlogits[0][3] %.4f\n", loss, dlogits[3]);
  return 0;
}
