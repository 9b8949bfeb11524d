// The two sweeps alone: a row state, and the gradient of coefficients that the caller makes of it.
// On toy and cuda: ShardsOfSweeps.
// On cuda: LinearSweeps.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/api/calls.h"
#include "tests/shared/linear_case.h"

namespace tileloss::test {
namespace {

constexpr std::int64_t kRows = 12, kVocab = 1000;

tileloss_sweep_options sweep_options() {
  tileloss_sweep_options options;
  tileloss_sweep_options_init(&options);
  return options;
}

// Four numbers a row, as a caller holds them.
class Coefficients {
 public:
  explicit Coefficients(std::int64_t rows) : values_(4, std::vector<float>(static_cast<std::size_t>(rows))) {}
  void set(std::int64_t row, const oracle::RowCoefficients& c) {
    const double numbers[] = {c.target, c.prob + c.target, c.prob_logp, c.uniform};
    for (std::size_t k = 0; k < 4; ++k) values_[k][static_cast<std::size_t>(row)] = static_cast<float>(numbers[k]);
  }
  void add_to(tileloss_args& args) {
    tileloss_vector* const places[] = {&args.target_coef, &args.prob_plus_target_coef, &args.prob_logp_coef, &args.uniform_coef};
    for (std::size_t k = 0; k < 4; ++k) {
      const auto rows = static_cast<std::int64_t>(values_[k].size());
      *places[k] = tileloss_make_vector(values_[k].data(), TILELOSS_FLOAT32, rows);
    }
  }

 private:
  std::vector<std::vector<float>> values_;
};

// The forward's arguments of those of a backward.
tileloss_args without_gradients(tileloss_args args) {
  args.dlogits = args.dhidden = args.dhead = {};
  args.dbias = {};
  return args;
}

LogitsCaseSpec spec_of_rows() {
  return {.rows = kRows, .vocab = kVocab, .ignore_prob = 0.2, .token_weights = true, .loss = false, .row_outputs = false};
}

class Sweeps : public testing::TestWithParam<oracle::NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, Sweeps, testing::ValuesIn(kFormats), format_name);

TEST_P(Sweeps, MakeTheGradientOfTheOraclesCrossEntropy) {
  for (const bool weighted : {false, true}) {
    for (tileloss_cross_entropy_options options : option_sets()) {
      options.label_smoothing = 0.1;
      options.z_loss = 1e-3;
      LogitsCaseSpec spec = spec_of_rows();
      spec.format = GetParam();
      spec.class_weights = weighted;
      LogitsCase c(spec);
      tileloss_sweep_options sweep = sweep_options();
      sweep.logit = options.logit;
      const tileloss_vector token_weights = c.args().token_weights;
      c.args().token_weights = {};
      RowStateArrays state(kRows);
      c.args().row_state = &state.get();
      const tileloss_args forward = without_gradients(c.args());
      ASSERT_TRUE(succeeds(tileloss_forward_sweep(&forward, &sweep, nullptr, nullptr)));

      const oracle::CrossEntropy oracle(make_oracle_options(options), c.labels(), c.token_weights(), c.class_weights(), {});
      Coefficients coefficients(kRows);
      oracle::SoftmaxRow row;
      oracle::GradientRow gradient;
      for (std::int64_t i = 0; i < kRows; ++i) {
        if (oracle.is_ignored(i)) continue;
        row.compute(make_transform(options.logit), c.logits_row(i), c.labels()[static_cast<std::size_t>(i)]);
        oracle.row_gradient(i, row, gradient);
        coefficients.set(i, gradient.coefficients);
      }
      coefficients.add_to(c.args());
      ASSERT_TRUE(succeeds(tileloss_backward_sweep(&c.args(), &sweep, nullptr, nullptr)));
      c.args().token_weights = token_weights;
      EXPECT_TRUE(agrees(check_cross_entropy(c, options)));
    }
  }
}

// The focal loss with gamma 2: -(1 - p)^2 logp; by logp.
double focal_slope(double p, double one_minus_p, double logp) { return one_minus_p * (2 * p * logp - one_minus_p); }

class FocalOracle : public tools::Oracle {
 public:
  explicit FocalOracle(const oracle::Transform& transform) : transform_(transform) {}
  std::unique_ptr<tools::OracleRow> new_row() const override { return std::make_unique<Row>(transform_); }
  double reduce(std::span<const oracle::RowLoss>) const override { return 0; }

 private:
  class Row : public tools::LabelRow {
   public:
    using LabelRow::LabelRow;
    std::vector<std::pair<std::string, double>> terms() const override { return {}; }

   protected:
    void compute_loss(const oracle::SoftmaxRow& softmax) override {
      const double slope = focal_slope(softmax.p(softmax.label()), softmax.one_minus_p_label(), softmax.logp());
      oracle::logprobs_gradient(softmax, {slope, 0, 0}, values_.gradient);
    }
  };

  oracle::Transform transform_;
};

TEST(LinearSweeps, MakeTheGradientOfSomebodyElsesLoss) {
  for (const auto format : {oracle::NumberFormat::kFloat32, oracle::NumberFormat::kBfloat16}) {
    LinearCase c({.row = {.rows = 33, .vocab = 300, .ignore_prob = 0.2, .loss = false, .row_outputs = false},
                  .hidden = 24,
                  .format = format,
                  .head_format = format,
                  .head_layout = MatrixLayout::kTransposed,
                  .bias = true,
                  .dbias = true});
    const tileloss_sweep_options options = c.with_linear(sweep_options());
    RowStateArrays state(33);
    c.args().row_state = &state.get();
    const tileloss_args forward = without_gradients(c.args());
    ASSERT_TRUE(succeeds(tileloss_linear_forward_sweep(&forward, &options, nullptr, nullptr)));

    Coefficients coefficients(33);
    for (const std::int64_t i : c.used_rows()) {
      const tileloss_row_state& s = state.get();
      const double label = std::exp(double{s.label_logit[i]} - s.max[i]), all = s.sum[i] + label;
      const double logp = double{s.label_logit[i]} - s.max[i] - std::log(all);
      const double slope = focal_slope(label / all, s.sum[i] / all, logp);
      coefficients.set(i, {.target = slope, .prob = -slope});
    }
    coefficients.add_to(c.args());
    ASSERT_TRUE(succeeds(tileloss_linear_backward_sweep(&c.args(), &options, nullptr, nullptr)));
    EXPECT_TRUE(agrees(c.check(FocalOracle(make_transform(options.logit)))));
  }
}

TEST(ShardsOfSweeps, TakeLabelsOfTheOthersForElsewhere) {
  LogitsCaseSpec spec = spec_of_rows();
  spec.token_weights = false;
  LogitsCase whole(spec), c(spec);
  const tileloss_sweep_options options = sweep_options();
  RowStateArrays of_whole(kRows), merged(kRows);
  whole.args().row_state = &of_whole.get();
  tileloss_args args = without_gradients(whole.args());
  ASSERT_TRUE(succeeds(tileloss_forward_sweep(&args, &options, nullptr, nullptr)));
  ASSERT_TRUE(succeeds(tileloss_row_state_set_identity(&merged.get())));

  constexpr std::int64_t kCut = 337;
  const std::int64_t starts[] = {0, kCut}, columns[] = {kCut, kVocab - kCut};
  std::vector<std::int64_t> labels(kRows);
  const auto shard = [&](std::size_t k, tileloss_row_state& state) {
    for (std::size_t i = 0; i < labels.size(); ++i) {
      const bool is_ignored = c.labels()[i] == options.logit.ignore_index;
      labels[i] = is_ignored ? options.logit.ignore_index : c.labels()[i] - starts[k];  // below 0, or beyond the columns
    }
    tileloss_args part = c.args();
    for (tileloss_matrix* m : {&part.logits, &part.dlogits}) {
      m->data = static_cast<float*>(m->data) + starts[k];
      m->cols = columns[k];
    }
    part.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, kRows);
    part.row_state = &state;
    return part;
  };
  for (std::size_t k = 0; k < 2; ++k) {
    RowStateArrays state(kRows);
    args = without_gradients(shard(k, state.get()));
    ASSERT_TRUE(succeeds(tileloss_forward_sweep(&args, &options, nullptr, nullptr)));
    state.get().smoothing_weight = static_cast<double>(columns[k]);
    ASSERT_TRUE(succeeds(tileloss_row_state_merge(&merged.get(), &state.get())));
  }
  for (std::size_t i = 0; i < kRows; ++i) {
    if (c.labels()[i] == options.logit.ignore_index) continue;
    EXPECT_EQ(merged.floats()[0][i], of_whole.floats()[0][i]);
    EXPECT_NEAR(merged.floats()[1][i], of_whole.floats()[1][i], 1e-6 * of_whole.floats()[1][i]);
    EXPECT_EQ(merged.floats()[2][i], of_whole.floats()[2][i]);
  }

  Coefficients coefficients(kRows);
  for (std::int64_t i = 0; i < kRows; ++i) coefficients.set(i, {-0.75, 1.25, 0.5, -0.001});
  coefficients.add_to(c.args());
  coefficients.add_to(whole.args());
  ASSERT_TRUE(succeeds(tileloss_backward_sweep(&whole.args(), &options, nullptr, nullptr)));
  for (std::size_t k = 0; k < 2; ++k) {
    args = shard(k, of_whole.get());
    ASSERT_TRUE(succeeds(tileloss_backward_sweep(&args, &options, nullptr, nullptr)));
  }
  EXPECT_TRUE(same_bits(bytes_of(c.args().dlogits), bytes_of(whole.args().dlogits)));
}

TEST(SweepNames, AreTwoPassesAndRefuseTheRest) {
  LogitsCaseSpec spec = spec_of_rows();
  spec.token_weights = false;
  LogitsCase c(spec);
  tileloss_sweep_options options = sweep_options();
  RowStateArrays state(kRows);
  c.args().row_state = &state.get();
  tileloss_args args = without_gradients(c.args());
  EXPECT_TRUE(runs("sweep", TILELOSS_FORWARD, args, &options, plan_options()));
  EXPECT_TRUE(runs("sweep", TILELOSS_BACKWARD, c.args(), &options, plan_options()));
  for (std::int64_t i = 0; i < kVocab; ++i) EXPECT_EQ(c.dlogit(0, i), 0) << "without coefficients";
  EXPECT_TRUE(refused(tileloss_call("sweep", TILELOSS_VALUE_AND_GRAD, &c.args(), &options, nullptr, nullptr),
                      TILELOSS_INVALID_ARGUMENT, "pass: expected forward or backward: sweep has no loss, got value_and_grad"));
  options.logit.temperature_on = TILELOSS_TEMPERATURE_ON_LOGPROB;
  EXPECT_TRUE(refused(tileloss_forward_sweep(&args, &options, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "temperature_on: expected logits, got logprob"));
  options = sweep_options();
  state.get().label_logit = nullptr;
  EXPECT_TRUE(refused(tileloss_backward_sweep(&c.args(), &options, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "row_state: expected max, sum and label_logit, saved by a forward, got a null array"));
}

}  // namespace
}  // namespace tileloss::test
