// logprobs with several labels a row, against the oracle: by linearity its gradient is the sum of those of one label each.
// On cuda: SeveralLabels.
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "judge/gates/error_metric.h"
#include "tests/api/kept_calls.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;
using tools::GradientMetric;

constexpr std::int64_t kIgnored = -100;

class SeveralLabels : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SeveralLabels, testing::ValuesIn(kFormats), format_name);

// What calls are given of K labels a row, and give.
struct Slots {
  std::int64_t count;
  std::vector<std::int64_t> labels;
  std::vector<float> logp, logp_grad;

  // The `given` are the last slot's of even rows, the first one's of others; one that is empty leaves all of its row empty.
  Slots(std::span<const std::int64_t> given, std::int64_t vocab, std::int64_t per_row)
      : count(per_row),
        labels(given.size() * static_cast<std::size_t>(per_row)),
        logp(labels.size(), 7),
        logp_grad(labels.size()) {
    for (std::int64_t n = 0; n < std::ssize(labels); ++n) {
      const std::int64_t i = n / count, own = given[static_cast<std::size_t>(i)], at = i % 2 == 0 ? count - 1 : 0;
      labels[static_cast<std::size_t>(n)] = n % count == at || own == kIgnored ? own : n * 7919 % vocab;
      logp_grad[static_cast<std::size_t>(n)] = static_cast<float>(n * 37 % 11 - 4) / 3.0F;
    }
  }
  std::size_t index(std::int64_t i, std::int64_t k) const { return static_cast<std::size_t>(i * count + k); }
  std::int64_t& at(std::int64_t i, std::int64_t k) { return labels[index(i, k)]; }
  std::int64_t at(std::int64_t i, std::int64_t k) const { return labels[index(i, k)]; }
  void leave_some_empty() {
    at(1, 1) = at(1, 0);  // twice
    at(2, 1) = kIgnored;
    at(3, 0) = kIgnored;
  }

  tileloss_args forward(tileloss_args args) {
    args.dlogits = args.dhidden = args.dhead = {};
    args.logp_grad = args.lse_grad = args.entropy_grad = args.dbias = {};
    args.logp = tileloss_make_vector(logp.data(), TILELOSS_FLOAT32, std::ssize(logp));
    return with_labels(args);
  }
  tileloss_args backward(tileloss_args args) {
    args.logp = args.lse = args.entropy = args.argmax = args.correct = args.log_sum_sq_probs = args.mean_logit = {};
    args.logp_grad = tileloss_make_vector(logp_grad.data(), TILELOSS_FLOAT32, std::ssize(logp_grad));
    return with_labels(args);
  }

  // -1 where all slots are empty.
  std::int64_t likeliest(std::int64_t i, std::span<const double> logits) const {
    std::int64_t best = -1;
    for (std::int64_t k = 0; k < count; ++k) {
      if (at(i, k) == kIgnored) continue;
      const auto logit = [&](std::int64_t label) { return logits[static_cast<std::size_t>(label)]; };
      if (best < 0 || logit(at(i, k)) > logit(best)) best = at(i, k);
    }
    return best;
  }
  // The row's gradient: what its labels give, and what `upstream` has of other outputs. Its logps are judged on the way.
  oracle::GradientRow gradient(const oracle::Transform& transform, std::span<const double> logits, std::int64_t i,
                               oracle::RowUpstream upstream, double error_of_z, tools::OutputMetric& logps) const {
    oracle::GradientRow sum, part;
    oracle::SoftmaxRow softmax;
    softmax.compute(transform, logits, likeliest(i, logits));
    upstream.logp = 0;
    oracle::logprobs_gradient(softmax, upstream, sum);
    for (std::int64_t k = 0; k < count; ++k) {
      const float got = logp[index(i, k)];
      if (at(i, k) == kIgnored) {
        EXPECT_EQ(got, 0);
        continue;
      }
      softmax.compute(transform, logits, at(i, k));
      logps.add(i, got, softmax.outputs().logp, tools::output_magnitudes(softmax, error_of_z)[tools::kLogp]);
      oracle::logprobs_gradient(softmax, {.logp = logp_grad[index(i, k)]}, part);
      for (std::size_t j = 0; j < logits.size(); ++j) {
        sum.gradient[j] += part.gradient[j];
        sum.magnitude[j] += part.magnitude[j];
      }
      sum.scale += part.scale;
    }
    return sum;
  }

 private:
  tileloss_args with_labels(tileloss_args args) const {
    args.labels_per_row = count;
    args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, std::ssize(labels));
    return args;
  }
};

struct Case {
  LogitsCase c;
  Slots slots;

  Case(const LogitsCaseSpec& spec, std::int64_t per_row) : c(spec), slots(c.labels(), spec.vocab, per_row) {}

  void forward(const tileloss_logprobs_options& options) {
    const tileloss_args args = slots.forward(c.args());
    ASSERT_TRUE(succeeds(tileloss_logprobs(&args, &options, nullptr, nullptr)));
  }
  void backward(const tileloss_logprobs_options& options) {
    const tileloss_args args = slots.backward(c.args());
    ASSERT_TRUE(succeeds(tileloss_logprobs_backward(&args, &options, nullptr, nullptr)));
  }

  // Of all rows.
  testing::AssertionResult check(const tileloss_logprobs_options& options) {
    const oracle::Transform transform = make_transform(options.logit);
    GradientMetric gradient(c.spec().format);
    tools::OutputMetric logps("logp");
    for (std::int64_t i = 0; i < c.spec().rows; ++i) {
      const std::vector<double> logits = c.logits_row(i);
      const std::int64_t likeliest = slots.likeliest(i, logits);
      const auto* const dlogits = static_cast<const char*>(c.args().dlogits.data) +
                                  i * c.row_stride() * static_cast<std::int64_t>(oracle::format_info(c.spec().format).bytes);
      if (likeliest < 0) {
        gradient.add_ignored_row(i, dlogits, c.spec().vocab);
        for (std::int64_t k = 0; k < slots.count; ++k) EXPECT_EQ(slots.logp[slots.index(i, k)], 0);
        continue;
      }
      const oracle::GradientRow sum = slots.gradient(transform, logits, i, c.upstream(i), 0, logps);
      oracle::SoftmaxRow softmax;
      softmax.compute(transform, logits, likeliest);
      gradient.add_row(i, dlogits, c.spec().vocab, tools::make_row_reference(softmax, sum));
    }
    std::vector<tools::Gate> gates = gradient.gates();
    for (const tools::Gate& gate : logps.gates()) gates.push_back(gate);
    gates.push_back(tools::make_gate("surroundings_written", c.surroundings_intact() ? 0.0 : 1.0, 0.0));
    return agrees({.gates = gates});
  }
};

// Of a head's rows, whose label is the likeliest.
class SlotsOracle final : public tools::Oracle {
 public:
  SlotsOracle(const LinearCase& c, const Slots& slots, const oracle::Transform& transform)
      : case_(c), slots_(slots), transform_(transform) {}
  std::unique_ptr<tools::OracleRow> new_row() const override { return std::make_unique<Row>(*this); }
  double reduce(std::span<const oracle::RowLoss> /*losses*/) const override { return 0; }

  testing::AssertionResult check() {
    CheckResult result = case_.check(
        *this, [&](tools::GivenRow& given) { given.label = slots_.likeliest(given.logits.row, given.logits.logits); });
    for (const tools::Gate& gate : logps_.gates()) result.gates.push_back(gate);
    return agrees(result);
  }

 private:
  class Row final : public tools::LabelRow {
   public:
    explicit Row(const SlotsOracle& oracle) : LabelRow(oracle.transform_), oracle_(oracle) {}
    void compute_loss(const oracle::SoftmaxRow& /*softmax*/) override {
      const std::int64_t i = values_.row;
      values_.gradient = oracle_.slots_.gradient(oracle_.transform_, given_.logits.logits, i, oracle_.case_.row().upstream(i),
                                                 values_.error_of_z, oracle_.logps_);
    }
    std::vector<std::pair<std::string, double>> terms() const override { return {}; }

   private:
    const SlotsOracle& oracle_;
  };

  const LinearCase& case_;
  const Slots& slots_;
  oracle::Transform transform_;
  mutable tools::OutputMetric logps_{"logp"};
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
        c.slots.leave_some_empty();
        for (std::int64_t k = 0; k < count; ++k) c.slots.at(4, k) = kIgnored;
        c.forward(options);
        c.backward(options);
        EXPECT_TRUE(c.check(options));
      }
    }
  }
}

TEST_P(SeveralLabels, WithTheHeadTheyAreAsTheOracleHasThem) {
  for (const bool dbias : {false, true}) {
    for (const tileloss_logprobs_options& options : options_of_logprobs()) {
      SCOPED_TRACE(testing::Message() << "dbias " << dbias << ", softcap " << options.logit.softcap);
      LinearCase c({.row = {.rows = 23,
                            .vocab = 401,
                            .ignore_prob = 0.1,
                            .lse_grad = Upstream::kPerRow,
                            .entropy_grad = dbias ? Upstream::kPerRow : Upstream::kAbsent,
                            .loss = false,
                            .row_outputs = false},
                    .hidden = 40,
                    .format = GetParam(),
                    .head_format = GetParam(),
                    .compute_dtype = dbias ? TILELOSS_BFLOAT16 : TILELOSS_NONE,
                    .label_logit = dbias ? 12.0 : 0.0,
                    .bias = dbias,
                    .dbias = dbias});
      Slots slots(c.row().labels(), c.spec().row.vocab, 7);
      slots.leave_some_empty();
      const auto given = c.with_linear(options);
      ASSERT_TRUE(runs("linear_logprobs", TILELOSS_FORWARD, slots.forward(c.args()), &given, plan_options()));
      ASSERT_TRUE(runs("linear_logprobs", TILELOSS_BACKWARD, slots.backward(c.args()), &given, plan_options()));
      EXPECT_TRUE(SlotsOracle(c, slots, make_transform(options.logit)).check());
    }
  }
}

// A slot's gradient dropped, two slots' swapped, a label that is there twice counted once.
TEST_P(SeveralLabels, WrongGradientsAreCaught) {
  using Grads = std::vector<float>;
  for (void (*const spoil)(Grads & grads) :
       {+[](Grads& g) { g[2] = 0; }, +[](Grads& g) { std::swap(g[2], g[3]); }, +[](Grads& g) { g[1] = 0; }, +[](Grads&) {}}) {
    Case c({.rows = 1, .vocab = 300, .format = GetParam(), .loss = false, .row_outputs = false}, 4);
    c.slots.at(0, 1) = c.slots.at(0, 0);
    c.forward(logprobs_options());
    const Grads given = {0.5F, 1.25F, -2, 3};
    c.slots.logp_grad = given;
    spoil(c.slots.logp_grad);
    const bool is_right = c.slots.logp_grad == given;
    c.backward(logprobs_options());
    c.slots.logp_grad = given;
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
