#include <cstdint>
#include <cstdio>
#include <tileloss/tileloss.hpp>
#include <vector>

int main() {
  const std::vector<float> logits = {1, 2, 3, 4, 2, 0, 0, 0};  // 2 tokens, a vocabulary of 4
  const std::vector<std::int64_t> labels = {3, 0};
  std::vector<float> loss(1), dlogits(2 * 4);

  const tileloss::Status status = tileloss::cross_entropy_value_and_grad(
      {.logits = tileloss::Matrix(logits, 2, 4), .labels = labels, .loss = loss, .dlogits = tileloss::Matrix(dlogits, 2, 4)},
      {.label_smoothing = 0.1});
  if (!status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  std::printf("loss %.4f, dlogits[0][3] %.4f\n", loss[0], dlogits[3]);
  return 0;
}
