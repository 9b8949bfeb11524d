#include <array>
#include <cstdint>
#include <cstdio>
#include <tileloss/tileloss.hpp>
#include <vector>

int main() {
  const std::vector<float> logits = {1, 2, 3, 4, 2, 0, 0, 0, 1, 1, 1, 3, 0, 2, 0, 0};  // 4 tokens, a vocabulary of 4
  const std::vector<std::int64_t> labels = {3, 0, 3, 1};
  const std::vector<float> advantages = {1, -1};  // of 2 sequences of 2 tokens
  const std::vector<float> old_logp = {-0.7F, -0.4F, -0.4F, -0.5F};
  std::vector<float> loss(1), dlogits(4 * 4);
  std::array<float, TILELOSS_POLICY_METRICS> metrics{};

  tileloss::PolicyLossOptions options;
  tileloss::Status status = tileloss::set_preset(options, "gspo");
  if (status) {
    status = tileloss::policy_loss_value_and_grad({.logits = tileloss::Matrix(logits, 4, 4),
                                                   .labels = labels,
                                                   .sequence_length = 2,
                                                   .advantages = advantages,
                                                   .old_logp = old_logp,
                                                   .loss = loss,
                                                   .metrics = metrics,
                                                   .dlogits = tileloss::Matrix(dlogits, 4, 4)},
                                                  options);
  }
  if (!status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  std::printf("loss %.4f, dlogits[0][3] %.4f, mean ratio %.4f\n", loss[0], dlogits[3], metrics[TILELOSS_METRIC_RATIO_MEAN]);
  return 0;
}
