// logprobs with several labels a row, against the oracle: by linearity its gradient is the sum of those of one label each.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "judge/gates/error_metric.h"
#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;
using tools::GradientMetric;

constexpr std::int64_t kIgnored = -100;

class SeveralLabels : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SeveralLabels, testing::ValuesIn(kFormats), format_name);

struct Case {
  LogitsCase c;
  std::int64_t count;
  std::vector<std::int64_t> labels;
  std::vector<float> logp, logp_grad;

  Case(const LogitsCaseSpec& spec, std::int64_t per_row)
      : c(spec),
        count(per_row),
        labels(static_cast<std::size_t>(spec.rows * per_row)),
        logp(labels.size(), 7),
        logp_grad(labels.size()) {
    for (std::size_t n = 0; n < labels.size(); ++n) {
      labels[n] = static_cast<std::int64_t>(n * 7919 % static_cast<std::size_t>(spec.vocab));
      logp_grad[n] = static_cast<float>(static_cast<int>(n * 37 % 11) - 4) / 3.0F;
    }
    for (std::int64_t i = 0; i < spec.rows; ++i) at(i, 0) = c.labels()[static_cast<std::size_t>(i)];  // the confident one
    c.args().labels_per_row = per_row;
    c.args().labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, std::ssize(labels));
  }
  std::int64_t& at(std::int64_t i, std::int64_t k) { return labels[static_cast<std::size_t>(i * count + k)]; }

  void forward(const tileloss_logprobs_options& options) {
    tileloss_args args = c.args();
    args.dlogits = {};
    args.logp_grad = args.lse_grad = args.entropy_grad = {};
    args.logp = tileloss_make_vector(logp.data(), TILELOSS_FLOAT32, std::ssize(logp));
    ASSERT_TRUE(succeeds(tileloss_logprobs(&args, &options, nullptr, nullptr)));
  }
  void backward(const tileloss_logprobs_options& options) {
    tileloss_args args = c.args();
    args.logp = args.lse = args.entropy = args.argmax = args.correct = args.log_sum_sq_probs = args.mean_logit = {};
    args.logp_grad = tileloss_make_vector(logp_grad.data(), TILELOSS_FLOAT32, std::ssize(logp_grad));
    ASSERT_TRUE(succeeds(tileloss_logprobs_backward(&args, &options, nullptr, nullptr)));
  }

  // Of all rows.
  testing::AssertionResult check(const tileloss_logprobs_options& options) {
    const oracle::Transform transform = make_transform(options.logit);
    GradientMetric gradient(c.spec().format);
    tools::OutputMetric logps("logp");
    for (std::int64_t i = 0; i < c.spec().rows; ++i) {
      const std::vector<double> logits = c.logits_row(i);
      oracle::GradientRow sum, part;
      oracle::SoftmaxRow softmax;
      std::int64_t likeliest = -1;
      for (std::int64_t k = 0; k < count; ++k) {
        if (at(i, k) == kIgnored) continue;
        const auto better = [&](std::int64_t label) { return logits[static_cast<std::size_t>(label)]; };
        if (likeliest < 0 || better(at(i, k)) > better(likeliest)) likeliest = at(i, k);
      }
      const auto* const dlogits = static_cast<const char*>(c.args().dlogits.data) +
                                  i * c.row_stride() * static_cast<std::int64_t>(oracle::format_info(c.spec().format).bytes);
      const auto first = static_cast<std::size_t>(i * count);
      if (likeliest < 0) {
        gradient.add_ignored_row(i, dlogits, c.spec().vocab);
        for (std::int64_t k = 0; k < count; ++k) EXPECT_EQ(logp[first + static_cast<std::size_t>(k)], 0);
        continue;
      }
      softmax.compute(transform, logits, likeliest);
      oracle::RowUpstream upstream = c.upstream(i);
      upstream.logp = 0;
      oracle::logprobs_gradient(softmax, upstream, sum);
      for (std::int64_t k = 0; k < count; ++k) {
        const float got = logp[first + static_cast<std::size_t>(k)];
        if (at(i, k) == kIgnored) {
          EXPECT_EQ(got, 0);
          continue;
        }
        softmax.compute(transform, logits, at(i, k));
        logps.add(i, got, softmax.outputs().logp, tools::output_magnitudes(softmax, 0)[tools::kLogp]);
        oracle::logprobs_gradient(softmax, {.logp = logp_grad[first + static_cast<std::size_t>(k)]}, part);
        for (std::size_t j = 0; j < logits.size(); ++j) {
          sum.gradient[j] += part.gradient[j];
          sum.magnitude[j] += part.magnitude[j];
        }
        sum.scale += part.scale;
      }
      softmax.compute(transform, logits, likeliest);
      gradient.add_row(i, dlogits, c.spec().vocab, tools::make_row_reference(softmax, sum));
    }
    std::vector<tools::Gate> gates = gradient.gates();
    for (const tools::Gate& gate : logps.gates()) gates.push_back(gate);
    gates.push_back(tools::make_gate("surroundings_written", c.surroundings_intact() ? 0.0 : 1.0, 0.0));
    return agrees({.gates = gates});
  }
};

std::vector<tileloss_logprobs_options> options_of_logprobs() {
  std::vector<tileloss_logprobs_options> sets(4, logprobs_options());
  sets[1].logit.softcap = 10;
  sets[2].logit.temperature.value = 0.7;
  sets[3].logit.temperature = {2, nullptr};
  sets[3].logit.temperature_on = TILELOSS_TEMPERATURE_ON_LOGPROB;
  return sets;
}

TEST_P(SeveralLabels, AreAsTheOracleHasThem) {
  for (const char* distribution : {"normal", "wide", "confident"}) {
    for (const std::int64_t count : {2, 5, 64}) {
      for (const tileloss_logprobs_options& options : options_of_logprobs()) {
        SCOPED_TRACE(testing::Message() << distribution << ", " << count << " labels, softcap " << options.logit.softcap);
        Case c({.rows = 6,
                .vocab = 1003,
                .stride_extra = 5,
                .format = GetParam(),
                .distribution = distribution,
                .lse_grad = Upstream::kPerRow,
                .entropy_grad = Upstream::kPerRow,
                .loss = false,
                .row_outputs = false},
               count);
        c.at(1, 1) = c.at(1, 0);  // twice
        c.at(2, 1) = kIgnored;    // an empty slot
        c.at(3, 0) = kIgnored;
        for (std::int64_t k = 0; k < count; ++k) c.at(4, k) = kIgnored;
        c.forward(options);
        c.backward(options);
        EXPECT_TRUE(c.check(options));
      }
    }
  }
}

// A slot's gradient dropped, two slots' swapped, a label that is there twice counted once.
TEST_P(SeveralLabels, WrongGradientsAreCaught) {
  using Grads = std::vector<float>;
  for (void (*const spoil)(Grads & grads) :
       {+[](Grads& g) { g[2] = 0; }, +[](Grads& g) { std::swap(g[2], g[3]); }, +[](Grads& g) { g[1] = 0; }, +[](Grads&) {}}) {
    Case c({.rows = 1, .vocab = 300, .format = GetParam(), .loss = false, .row_outputs = false}, 4);
    c.at(0, 1) = c.at(0, 0);
    c.forward(logprobs_options());
    const Grads given = {0.5F, 1.25F, -2, 3};
    c.logp_grad = given;
    spoil(c.logp_grad);
    const bool is_right = c.logp_grad == given;
    c.backward(logprobs_options());
    c.logp_grad = given;
    EXPECT_EQ(bool(c.check(logprobs_options())), is_right);
  }
}

TEST(SeveralLabelsRefused, WithTheArgumentsName) {
  LogitsCase c({.rows = 2, .vocab = 10, .extra_outputs = true, .dlogits = false});
  const std::int64_t labels[] = {1, 2, 3, 10};
  float logp[4];
  c.args().loss = {};
  c.args().labels_per_row = 2;
  c.args().labels = tileloss_make_vector(labels, TILELOSS_INT64, 4);
  c.args().logp = tileloss_make_vector(logp, TILELOSS_FLOAT32, 4);
  EXPECT_TRUE(refused(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "correct: expected none with several labels a row, got a vector"));
  c.args().correct = {};
  EXPECT_TRUE(refused(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr), TILELOSS_LABEL_OUT_OF_RANGE,
                      "labels[1,1]: expected 0 <= label < 10 or ignore_index -100, got 10"));
  EXPECT_TRUE(refused(tileloss_cross_entropy(&c.args(), nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "labels_per_row: expected 0 or 1, as cross_entropy takes one label a row, got 2"));
  c.args().labels_per_row = 1025;
  EXPECT_TRUE(refused(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "labels_per_row: expected 0 to 1024, got 1025"));
  c.args().labels_per_row = 3;
  EXPECT_TRUE(refused(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "labels.size: expected 6, got 4"));
}

}  // namespace
}  // namespace tileloss::test
