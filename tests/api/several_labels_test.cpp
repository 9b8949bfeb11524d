// logprobs with several labels a row, against the oracle: by linearity its gradient is the sum of those of one label each.
// On cuda: SeveralLabels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "judge/gates/error_metric.h"
#include "tests/api/kept_calls.h"
#include "tests/api/shards.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;
using tools::GradientMetric;

constexpr std::int64_t kIgnored = -100;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

struct Case {
  LogitsCase c;
  Slots slots;

  Case(const LogitsCaseSpec& spec, std::int64_t per_row) : c(spec), slots(c.labels(), spec.vocab, per_row) {}
  // `change`: before the logits are sealed.
  Case(const LogitsCaseSpec& spec, std::int64_t per_row, const std::function<void(LogitsCase&, Slots&)>& change)
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

// Labels' logits of -inf, one that is the row's largest, equal ones on two shards, rows whose labels are all on one shard.
TEST_P(SeveralLabels, OverShardsTheyAreAsTheOracleHasThem) {
  const std::vector<std::vector<Shard>> cuts = {kUneven, {kUneven[2], kUneven[0], kUneven[1]}, {{0, kShardVocab}}};
  for (std::size_t cut = 0; cut < cuts.size(); ++cut) {
    for (const std::int64_t count : {2, 5, 64}) {
      for (const tileloss_logprobs_options& options : options_of_logprobs()) {
        SCOPED_TRACE(testing::Message() << "cut " << cut << ", " << count << " labels, softcap " << options.logit.softcap);
        LogitsCaseSpec spec = {.rows = 11,
                               .vocab = kShardVocab,
                               .stride_extra = 5,
                               .format = GetParam(),
                               .distribution = count == 5 ? "confident" : "wide",
                               .lse_grad = Upstream::kPerRow,
                               .entropy_grad = Upstream::kPerRow,
                               .loss = false,
                               .row_outputs = false};
        Case c(spec, count, [](LogitsCase& logits, Slots& slots) {
          slots.leave_some_empty();
          for (std::int64_t k = 0; k < slots.count; ++k) {
            slots.at(4, k) = kIgnored;
            slots.at(5, k) = 300 + k % 37;
            slots.at(8, k) = k % 2 == 0 ? 3 : 999;
          }
          for (const auto& [row, z] : {std::pair<std::int64_t, double>{6, -kInfinity}, {7, 60}, {8, 5}, {9, -kInfinity}}) {
            for (std::int64_t k = row == 9 ? slots.count / 2 : 0; k < slots.count; ++k)
              logits.set_logit(row, slots.at(row, k), z);
          }
        });
        run_sharded("logprobs", c.slots.all_passes(c.c.args()), options, cuts[cut]);
        EXPECT_TRUE(c.check(options));
      }
    }
  }
}

TEST_P(SeveralLabels, OverShardsOfAHeadTheyAreAsTheOracleHasThem) {
  for (const tileloss_logprobs_options& options : options_of_logprobs()) {
    LinearCase c({.row = {.rows = kShardRows,
                          .vocab = kShardVocab,
                          .ignore_prob = 0.1,
                          .lse_grad = Upstream::kPerRow,
                          .entropy_grad = Upstream::kPerRow,
                          .loss = false,
                          .row_outputs = false},
                  .hidden = 40,
                  .format = GetParam(),
                  .head_format = GetParam(),
                  .float32_dhidden = true});
    Slots slots(c.row().labels(), kShardVocab, 7);
    slots.leave_some_empty();
    const auto given = c.with_linear(options);
    const tileloss_args all = slots.all_passes(c.args());
    RowStateArrays merged(kShardRows, slots.count);
    merge_states("linear_logprobs", all, given, kUneven, merged, kShardVocab, weight_of_columns, rows_of_head);
    tileloss_args args = slots.forward(without_outputs(all));
    args.hidden = args.head = {};
    args.row_state = &merged.get();
    auto own = of_shard(given, {});
    ASSERT_TRUE(runs("linear_logprobs", TILELOSS_FROM_ROW_STATE, args, &own, plan_options()));
    const tileloss_matrix dhidden = all.dhidden;
    std::vector<float> share(kShardRows * 40), sum(share.size());
    for (const Shard& s : kUneven) {
      args = rows_of_head(all, s);
      args.row_state = &merged.get();
      args.dhidden = view(share, kShardRows, 40);
      own = of_shard(given, s);
      ASSERT_TRUE(runs("linear_logprobs", TILELOSS_BACKWARD, args, &own, plan_options()));
      for (std::size_t n = 0; n < sum.size(); ++n) sum[n] += share[n];
    }
    for (std::int64_t n = 0; n < kShardRows * 40; ++n)
      static_cast<float*>(dhidden.data)[n / 40 * dhidden.row_stride + n % 40] = sum[static_cast<std::size_t>(n)];
    EXPECT_TRUE(SlotsOracle(c, slots, make_transform(options.logit)).check()) << "softcap " << options.logit.softcap;
  }
}

// Allowed columns beside them, of which a row may have none here, or none at all.
TEST(SeveralLabelsOfShards, AmongAllowedColumnsGiveWhatTheWholeGives) {
  constexpr std::int64_t kWords = (kShardVocab + 31) / 32;
  const std::vector<Shard> shards = {{0, 320}, {320, 32}, {352, 648}};
  std::vector<std::int32_t> words(kShardRows * kWords);
  for (std::size_t n = 0; n < words.size(); ++n) {
    const std::size_t i = n / kWords, w = n % kWords;
    words[n] = i == 0 || (i == 3 && w < 11) ? 0 : i == 5 ? -1 : static_cast<std::int32_t>(n * 2654435761U);
  }
  const auto with_allowed = [&](tileloss_args args, const Shard& s) {
    args.allowed = tileloss_make_matrix(words.data() + s.start / 32, TILELOSS_INT32, kShardRows, (s.columns + 31) / 32, kWords);
    return args;
  };
  for (const tileloss_logprobs_options& options : options_of_logprobs()) {
    const LogitsCaseSpec spec = {
        .rows = kShardRows, .vocab = kShardVocab, .lse_grad = Upstream::kPerRow, .loss = false, .row_outputs = false};
    Case whole(spec, 9), cut(spec, 9);
    for (Case* c : {&whole, &cut}) c->slots.leave_some_empty();
    for (const auto& [pass, args] : {std::pair{TILELOSS_FORWARD, whole.slots.forward(whole.c.args())},
                                     {TILELOSS_BACKWARD, whole.slots.backward(whole.c.args())}}) {
      ASSERT_TRUE(runs("logprobs", pass, with_allowed(args, {0, kShardVocab}), &options, plan_options()));
    }
    const tileloss_args all = cut.slots.all_passes(cut.c.args());
    std::vector<float> counts(kShardRows), part_counts(kShardRows);
    RowStateArrays merged(kShardRows, 9);
    merged.get().allowed_count = counts.data();
    ASSERT_TRUE(succeeds(tileloss_row_state_set_identity(&merged.get())));
    const auto call = [&](tileloss_pass pass, tileloss_args args, const Shard& s, tileloss_row_state& state) {
      const tileloss_logprobs_options own = of_shard(options, s);
      args.row_state = &state;
      ASSERT_TRUE(runs("logprobs", pass, args, &own, plan_options()));
    };
    for (const Shard& s : shards) {
      RowStateArrays part(kShardRows, 9);
      part.get().allowed_count = part_counts.data();
      call(TILELOSS_FORWARD, columns_alone(with_allowed(without_outputs(all), s), s), s, part.get());
      ASSERT_TRUE(succeeds(tileloss_row_state_merge(&merged.get(), &part.get())));
    }
    tileloss_args args = cut.slots.forward(without_outputs(all));
    args.logits = {};
    call(TILELOSS_FROM_ROW_STATE, args, {}, merged.get());
    for (const Shard& s : shards) call(TILELOSS_BACKWARD, columns_alone(with_allowed(all, s), s), s, merged.get());
    const auto expect_near = [](float got, float wanted, const char* what, std::size_t at) {
      const bool is_near = got == wanted || std::fabs(got - wanted) <= 1e-5F * std::max(1.0F, std::fabs(wanted));
      EXPECT_TRUE(is_near || (std::isnan(got) && std::isnan(wanted))) << what << " " << at << ": " << got << " " << wanted;
    };
    for (std::size_t n = 0; n < cut.slots.logp.size(); ++n) expect_near(cut.slots.logp[n], whole.slots.logp[n], "logp", n);
    for (std::int64_t i = 0; i < kShardRows; ++i) {
      for (std::int64_t j = 0; j < kShardVocab; ++j) {
        const auto got = static_cast<float>(cut.c.dlogit(i, j)), wanted = static_cast<float>(whole.c.dlogit(i, j));
        expect_near(got, wanted, "dlogits", static_cast<std::size_t>(i * kShardVocab + j));
        EXPECT_EQ(got == 0, wanted == 0) << i << "," << j;
      }
    }
  }
}

TEST(SeveralLabelsOfShards, ThreadsChangeNoBit) {
  std::vector<std::vector<unsigned char>> bits;
  for (const std::int32_t threads : {1, 2, 5}) {
    Case c({.rows = 40, .vocab = kShardVocab, .format = NumberFormat::kBfloat16, .loss = false, .row_outputs = false}, 6);
    tileloss_plan_options hints = plan_options();
    hints.cpu.threads = threads;
    run_sharded("logprobs", c.slots.all_passes(c.c.args()), logprobs_options(), kUneven, weight_of_columns, hints);
    bits.push_back(outputs_of(c.slots.all_passes(c.c.args())));
  }
  EXPECT_TRUE(same_bits(bits[1], bits[0]));
  EXPECT_TRUE(same_bits(bits[2], bits[0]));
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

TEST(SeveralLabelsRefused, OfAShardAsTheStateHasThem) {
  LogitsCase c({.rows = 2, .vocab = 10, .loss = false, .row_outputs = false, .dlogits = false});
  const std::int64_t labels[] = {1, 2, 3, 19};
  RowStateArrays state(2, 2), one(2);
  tileloss_args& args = c.args();
  args.labels = tileloss_make_vector(labels, TILELOSS_INT64, 4);
  args.labels_per_row = 2;
  args.row_state = &one.get();
  const tileloss_logprobs_options options = of_shard(logprobs_options(), {10, 10}, 20);
  const auto is_refused = [&](const std::string& message) {
    return refused(tileloss_logprobs(&args, &options, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT, message);
  };
  EXPECT_TRUE(is_refused("row_state.label_logits: expected an array, for several labels a row of a shard, got null"));
  args.row_state = &state.get();
  EXPECT_TRUE(succeeds(tileloss_logprobs(&args, &options, nullptr, nullptr)));
  state.get().labels_per_row = 3;
  EXPECT_TRUE(is_refused("row_state.labels_per_row: expected 2, got 3"));
  state.get().labels_per_row = 2;
  args.labels = tileloss_make_vector(labels, TILELOSS_INT64, 2);
  args.labels_per_row = 1;
  EXPECT_TRUE(is_refused("row_state.label_logits: expected null with one label a row, got an array"));

  const auto is_not_merged = [&](const tileloss_row_state& from, const std::string& message) {
    return refused(tileloss_row_state_merge(&state.get(), &from), TILELOSS_INVALID_ARGUMENT, message);
  };
  EXPECT_TRUE(is_not_merged(one.get(), "from.label_logits: expected an array, as into has one, got none"));
  RowStateArrays three(2, 3);
  EXPECT_TRUE(is_not_merged(three.get(), "from.labels_per_row: expected 2, got 3"));
  three.get().labels_per_row = 1025;
  EXPECT_TRUE(is_not_merged(three.get(), "from.labels_per_row: expected 1 to 1024 with label_logits, got 1025"));
}

TEST(SeveralLabelsRefused, WhereTheirLogitsOverlapAnother) {
  LogitsCase c({.rows = 2, .vocab = 10, .loss = false, .row_outputs = false, .dlogits = false});
  const std::int64_t labels[] = {1, 2, 3, 4};
  std::vector<float> numbers(5);
  RowStateArrays state(2, 2);
  state.get().label_logits = numbers.data();
  state.get().sum = numbers.data() + 3;
  c.args().labels = tileloss_make_vector(labels, TILELOSS_INT64, 4);
  c.args().labels_per_row = 2;
  c.args().row_state = &state.get();
  EXPECT_TRUE(refused(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "row_state.label_logits: expected a buffer apart from row_state.sum, got one that overlaps it"));
}

}  // namespace
}  // namespace tileloss::test
