// A small head whose logits can be anything: infinite, NaN, vast, tiny, rising and falling. For tests of what survives it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/synthetic.h"
#include "tests/api/calls.h"

namespace tileloss::test {

// A small head in float32, multiplied in bfloat16, whose bias and hidden states can hold anything. So few rows that the planner
// cannot take them in parts.
struct SpecialHead {
  static constexpr std::int64_t kRows = 4, kVocab = 300, kWidth = 8, kDheadStride = 9;
  std::int64_t vocab;
  std::vector<float> hidden, head, bias, dhidden, dhead, dbias, logp = std::vector<float>(kRows);
  std::vector<std::int64_t> labels;
  std::int64_t dhead_stride = kDheadStride;  // kWidth: without gaps, so that it holds the logits first
  bool has_bias = true;
  double label_smoothing = 0;
  bool wants_all = false;  // every output by row, whose values nobody reads
  std::vector<float> more = std::vector<float>(4 * kRows);
  std::vector<std::int64_t> argmax = std::vector<std::int64_t>(kRows);

  explicit SpecialHead(std::uint64_t seed = 5, std::int64_t classes = kVocab) : vocab(classes) {
    const auto size = static_cast<std::size_t>(vocab);
    bias.resize(size);
    dbias.resize(size);
    dhidden.resize(kRows * kWidth);
    dhead.resize(size * kDheadStride);
    tools::Random random(seed, tools::Stream::kLogits, -1);
    for (std::int64_t i = 0; i < kRows * kWidth; ++i) hidden.push_back(static_cast<float>(random.next_normal()));
    for (std::int64_t i = 0; i < vocab * kWidth; ++i) head.push_back(static_cast<float>(random.next_normal()));
    for (std::int64_t i = 0; i < kRows; ++i) labels.push_back(70 * i);
  }
  float& hidden_at(std::int64_t row) { return hidden[static_cast<std::size_t>(row * kWidth)]; }
  float& bias_at(std::int64_t v) { return bias[static_cast<std::size_t>(v)]; }

  // The bias as the head's last column instead, for what is done only without one.
  void fold_bias() {
    has_bias = false;
    for (std::int64_t i = 0; i < kRows; ++i) hidden[static_cast<std::size_t>((i + 1) * kWidth - 1)] = 1;
    for (std::int64_t v = 0; v < vocab; ++v) head[static_cast<std::size_t>((v + 1) * kWidth - 1)] = bias_at(v);
  }

  tileloss_plan run(const tileloss_plan_options& hints, double logit_scale) {
    auto args = init<tileloss_args>();
    args.hidden = tileloss_make_matrix(hidden.data(), TILELOSS_FLOAT32, kRows, kWidth, kWidth);
    args.head = tileloss_make_matrix(head.data(), TILELOSS_FLOAT32, vocab, kWidth, kWidth);
    if (has_bias) args.bias = tileloss_make_vector(bias.data(), TILELOSS_FLOAT32, vocab);
    args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, kRows);
    args.logp = tileloss_make_vector(logp.data(), TILELOSS_FLOAT32, kRows);
    args.dhidden = tileloss_make_matrix(dhidden.data(), TILELOSS_FLOAT32, kRows, kWidth, kWidth);
    args.dhead = tileloss_make_matrix(dhead.data(), TILELOSS_FLOAT32, vocab, kWidth, dhead_stride);
    if (has_bias) args.dbias = tileloss_make_vector(dbias.data(), TILELOSS_FLOAT32, vocab);
    if (wants_all) {
      args.argmax = tileloss_make_vector(argmax.data(), TILELOSS_INT64, kRows);
      tileloss_vector* const outputs[] = {&args.lse, &args.entropy, &args.log_sum_sq_probs, &args.mean_logit};
      for (std::int64_t i = 0; i < 4; ++i)
        *outputs[i] = tileloss_make_vector(&more[static_cast<std::size_t>(i * kRows)], TILELOSS_FLOAT32, kRows);
    }
    const tileloss_cross_entropy_options options{.logit = {.logit_scale = logit_scale},
                                                 .linear = {.compute_dtype = TILELOSS_BFLOAT16},
                                                 .label_smoothing = label_smoothing,
                                                 .reduction = TILELOSS_REDUCTION_SUM};
    tileloss_plan plan;
    EXPECT_TRUE(runs("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, args, &options, hints, nullptr, &plan));
    return plan;
  }
};

// NaN where it is NaN, infinite where it is infinite, 0 where it is 0, elsewhere as near as two roundings to bfloat16 are.
inline void expect_alike(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) {
      ASSERT_TRUE((std::isnan(a[i]) && std::isnan(b[i])) || a[i] == b[i]) << what << " " << i << ": " << a[i] << " " << b[i];
      continue;
    }
    if (b[i] == 0) {
      ASSERT_EQ(a[i], 0) << what << " " << i;
    }
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  EXPECT_LE(difference, size * 0x1p-14) << what;
}

struct SpecialKind {
  const char* name;
  std::function<void(SpecialHead&)> corrupt;
  double logit_scale = 1;
};
inline std::vector<SpecialKind> special_kinds() {
  constexpr float kInfinite = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
  return {
      {"nothing", [](SpecialHead&) {}},
      {"some classes at -inf",
       [=](SpecialHead& s) { s.bias_at(2) = s.bias_at(63) = s.bias_at(64) = s.bias_at(299) = -kInfinite; }},
      {"a whole tile at -inf, a label among them",
       [=](SpecialHead& s) {
         for (std::int64_t v = 64; v < 128; ++v) s.bias_at(v) = -kInfinite;
       }},
      {"a tile at -inf but for the label",
       [=](SpecialHead& s) {
         for (std::int64_t v = 64; v < 128; ++v) s.bias_at(v) = v == 70 ? 0 : -kInfinite;
       }},
      {"all at -inf", [=](SpecialHead& s) { s.bias.assign(s.bias.size(), -kInfinite); }},
      {"a class at +inf", [=](SpecialHead& s) { s.bias_at(200) = kInfinite; }},
      {"a label at +inf", [=](SpecialHead& s) { s.bias_at(70) = kInfinite; }},
      {"a class at NaN", [=](SpecialHead& s) { s.bias_at(130) = kNaN; }},
      {"a row of NaN", [=](SpecialHead& s) { s.hidden_at(3) = kNaN; }},
      {"a row of infinities", [=](SpecialHead& s) { s.hidden_at(3) = kInfinite; }},
      {"logits that rise from tile to tile",
       [](SpecialHead& s) {
         for (std::int64_t v = 0; v < SpecialHead::kVocab; ++v) s.bias_at(v) = static_cast<float>(v / 64 * 10);
       }},
      {"logits that fall from tile to tile",
       [](SpecialHead& s) {
         for (std::int64_t v = 0; v < SpecialHead::kVocab; ++v) s.bias_at(v) = static_cast<float>(v / 64 * -10);
       }},
      {"a first tile masked with a number",
       [](SpecialHead& s) {
         for (std::int64_t v = 0; v < 64; ++v) s.bias_at(v) = -1e30F;
       }},
      {"the largest numbers", [](SpecialHead& s) { s.bias_at(5) = s.bias_at(100) = 3e38F; }},
      {"the lowest numbers", [](SpecialHead& s) { s.bias_at(5) = s.bias_at(100) = -3e38F; }},
      {"a vast scale", [](SpecialHead&) {}, 1e30},
      {"a tiny scale", [](SpecialHead&) {}, 1e-30},
      {"a scale of 2^63", [](SpecialHead&) {}, 0x1p63},
      {"a scale whose steps leave float's range", [](SpecialHead&) {}, 1e37},
      {"a scale of the smallest normal number", [](SpecialHead&) {}, 0x1p-126},
  };
}

}  // namespace tileloss::test
