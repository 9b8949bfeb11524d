// A test case of logprobs with several labels a row: its slots, beside logits or a head, and their judgement by the oracle, by
// whose linearity the gradient is the sum of those of one label each.
#ifndef TILELOSS_TESTS_API_SLOTS_CASE_H_
#define TILELOSS_TESTS_API_SLOTS_CASE_H_

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "judge/gates/error_metric.h"
#include "tests/api/kept_calls.h"

namespace tileloss::test {

using oracle::NumberFormat;
using tools::GradientMetric;

inline constexpr std::int64_t kIgnored = -100;

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
  // What all shards' calls are cut from.
  tileloss_args all_passes(const tileloss_args& args) {
    tileloss_args all = forward(args), gradient = backward(args);
    gradient.logp = all.logp;
    return gradient;
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

struct SlotsCase {
  LogitsCase c;
  Slots slots;

  SlotsCase(const LogitsCaseSpec& spec, std::int64_t per_row) : c(spec), slots(c.labels(), spec.vocab, per_row) {}
  // `change`: before the logits are sealed.
  SlotsCase(const LogitsCaseSpec& spec, std::int64_t per_row, const std::function<void(LogitsCase&, Slots&)>& change)
      : c(spec, LogitsCase::Open{}), slots(c.labels(), spec.vocab, per_row) {
    change(c, slots);
    c.seal();
  }

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

inline std::vector<tileloss_logprobs_options> options_of_logprobs() {
  std::vector<tileloss_logprobs_options> sets(4, logprobs_options());
  sets[1].logit.softcap = 10;
  sets[2].logit.temperature.value = 0.7;
  sets[3].logit.temperature = {2, nullptr};
  sets[3].logit.temperature_on = TILELOSS_TEMPERATURE_ON_LOGPROB;
  return sets;
}

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_API_SLOTS_CASE_H_
