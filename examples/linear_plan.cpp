#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <tileloss/tileloss.hpp>
#include <vector>

struct alignas(64) CacheLine {
  std::array<std::byte, 64> bytes;
};

// A step of two micro-batches of 4 tokens, hidden size 2, a vocabulary of 3, with the gradients added up in place.
int main() {
  const std::vector<float> hidden = {1, 0, 0, 1, 1, 1, -1, 1, 2, 0, 0, 2, 1, -1, -1, -1};  // [8, 2]
  const std::vector<std::int64_t> labels = {0, 1, 2, 1, 0, 1, 0, 2};
  const std::vector<float> head = {1, 0, 0, 1, 1, 1};  // [3, 2]
  std::vector<float> dhidden(8 * 2), dhead(3 * 2);     // zeros, which the calls add to
  std::vector<CacheLine> workspace;
  tileloss::Plan plan;
  double loss = 0;

  const tileloss::CrossEntropyOptions options = {.linear = {.accumulate = 1}, .num_items = 8};  // the mean over both
  for (const std::size_t batch : {0, 1}) {
    float part = 0;
    const tileloss::LinearHead lm_head = {.hidden = tileloss::Matrix(std::span(hidden).subspan(8 * batch, 8), 4, 2),
                                          .head = tileloss::Matrix(head, 3, 2),
                                          .dhidden = tileloss::Matrix(std::span(dhidden).subspan(8 * batch, 8), 4, 2),
                                          .dhead = tileloss::Matrix(dhead, 3, 2)};
    const tileloss::CrossEntropyArgs args = {.labels = std::span(labels).subspan(4 * batch, 4), .loss = std::span(&part, 1)};
    if (batch == 0) {  // the plan holds for every call of these shapes
      tileloss::PlanResult made = tileloss::linear_plan(tileloss::Pass::kValueAndGrad, lm_head, args, options);
      if (!made.status) return std::fprintf(stderr, "%s\n", made.status.message().c_str()), 1;
      plan = made.plan;
      workspace.resize((static_cast<std::size_t>(plan.workspace_bytes()) + 63) / 64);
    }
    const tileloss::Status status = tileloss::linear_cross_entropy_value_and_grad(
        lm_head, args, options, {.plan = &plan, .workspace = std::as_writable_bytes(std::span(workspace))});
    if (!status) return std::fprintf(stderr, "%s\n", status.message().c_str()), 1;
    loss += part;
  }
  std::printf("loss %.4f, dhead[0] %.4f %.4f\n", loss, dhead[0], dhead[1]);
  return 0;
}
