// Distillation against the oracle: every divergence, all pairs of options, special values, and what is refused.
// On toy and cuda: Distillation.
// On cuda: DistillationRows.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "judge/oracles/oracle.h"
#include "tests/api/random_options.h"
#include "tests/shared/pair_case.h"

namespace tileloss::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

class Distillation : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, Distillation, testing::ValuesIn(kFormats), format_name);

TEST_P(Distillation, AgreesForAllPairsOfOptions) {
  const std::vector<Factor> own = {{"schedule", {"0", "1"}},
                                   {"temperature_on", {"logits"}},
                                   {"divergence", {"0", "1", "2", "3", "4", "5", "6"}},
                                   {"beta", {"0.5", "0.1", "0.9"}},
                                   {"weights", {"0", "0.3", "1"}},
                                   {"teacher", {"normal", "wide", "narrow", "confident", "offset_plus", "the_student"}},
                                   {"teacher_logit_scale", {"absent", "1", "0.5"}},
                                   {"teacher_softcap", {"absent", "0", "20"}},
                                   {"teacher_temperature", {"absent", "1", "3"}},
                                   {"label_temperature", {"absent", "1", "0.5", "3"}},
                                   {"squared", {"no", "yes"}},
                                   {"teacher_stride_extra", {"0", "5"}},
                                   {"passes", {"value_and_grad", "no_state"}}};
  const auto agree = [](const PairwiseSampler& s, std::uint64_t number) {
    PairCaseSpec spec;
    spec.student = loss_spec(s, GetParam(), 5000 + number);
    spec.teacher_is_student = s.is("teacher", "the_student");
    spec.teacher_distribution = s.level("teacher");
    spec.teacher_stride_extra = s.integer("teacher_stride_extra");
    tileloss_distillation_options options = distillation_options(static_cast<std::int32_t>(s.integer("divergence")));
    Numbers numbers;
    set_loss_options(s, spec.student, numbers, options);
    options.beta = s.number("beta");
    set_weights(options, s.number("weights"));
    if (!s.is("label_temperature", "absent")) options.label_temperature.value = s.number("label_temperature");
    if (!s.is("teacher_logit_scale", "absent")) options.teacher_logit_scale = s.number("teacher_logit_scale");
    if (!s.is("teacher_softcap", "absent")) options.teacher_softcap = s.number("teacher_softcap");
    options.scale_by_temperature_squared = s.is("squared", "yes") ? 1 : 0;
    if (!s.is("teacher_temperature", "absent")) {
      set_number(s, options.teacher_temperature, numbers.teacher_temperature, s.number("teacher_temperature"));
    }
    PairCase c(spec);
    const auto ran = run_passes("distillation", s.level("passes"), c.student(), &options, hints_of(s));
    return ran ? agrees(check_distillation(c, options)) : ran;
  };
  std::vector<Forbidden> forbidden = loss_forbidden();
  forbid_num_items(forbidden);
  forbid_beta(forbidden, {"0.1", "0.9"});
  expect_all_pairs_agree("distillation", GetParam(), {with_factors(common_factors(), loss_factors(), own), forbidden, 21}, kCases,
                         agree);
}

TEST_P(Distillation, OfATeacherThatIsTheStudentIsExactlyZero) {
  for (int kind = 0; kind < kDivergences; ++kind) {
    for (const double softcap : {0.0, 20.0}) {
      PairCaseSpec spec;
      spec.student = {.rows = 3, .vocab = 5000, .format = GetParam(), .distribution = "normal", .extra_outputs = true};
      spec.teacher_is_student = true;
      PairCase c(spec);
      tileloss_distillation_options options = distillation_options(kind);
      options.logit.softcap = options.teacher_softcap = softcap;
      options.beta = 0.3;
      leave_out_without_effect("distillation", options);
      ASSERT_TRUE(runs("distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
      EXPECT_EQ(float_at(c.args().loss, 0), 0) << kind;
      for (std::int64_t i = 0; i < 3; ++i) {
        EXPECT_EQ(static_cast<const std::uint8_t*>(c.args().agreement.data)[i], 1);
        for (std::int64_t j = 0; j < 5000; ++j) ASSERT_EQ(c.student().dlogit(i, j), 0) << kind << " column " << j;
      }
    }
  }
}

// -inf on either side or on both, at the label and elsewhere; NaN and +inf corrupt their row alone. The last row's largest logits
// lie far from 0, and only its label's temperature makes them round.
TEST_P(Distillation, SpecialValuesAreTheOracles) {
  for (int kind = 0; kind < kDivergences; ++kind) {
    for (const double share : {0.0, 0.5, 1.0}) {
      PairCaseSpec spec;
      spec.student = {.rows = 9, .vocab = 300, .format = GetParam(), .distribution = "normal", .extra_outputs = true};
      spec.student.per_row_loss = true;
      PairCase c(spec, PairCase::Open{});
      const std::int64_t label = c.student().labels()[3];
      c.set_logits(0, 5, 1, -kInf);
      c.set_logits(1, 7, -kInf, 1);
      c.set_logits(2, 9, -kInf, -kInf);
      c.set_logits(3, label, 1, -kInf);
      c.set_logits(4, 11, kNan, 1);
      c.set_logits(5, 13, 1, kNan);
      c.set_logits(6, 15, kInf, 1);
      for (std::int64_t j = 0; j < 300; ++j) c.set_logits(7, j, -kInf, 0);
      const std::int64_t far = c.student().labels()[8];
      for (std::int64_t j = 0; j < 300; ++j)
        c.set_logits(8, j, j == far ? 1e4 : j == (far + 1) % 300 ? 1e4 + 2 : 1e4 - 20, j % 7);
      c.seal();
      tileloss_distillation_options options = distillation_options(kind);
      options.reduction = TILELOSS_REDUCTION_NONE;
      options.label_temperature.value = 3;
      set_weights(options, share);
      ASSERT_TRUE(runs("distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
      EXPECT_TRUE(agrees(check_distillation(c, options))) << "divergence " << kind << ", label_weight " << share;
    }
  }
}

TEST(DistillationRows, MayDoWithoutLabels) {
  PairCaseSpec spec;
  spec.student = {.rows = 5, .vocab = 1000, .row_outputs = false};
  PairCase c(spec);
  const tileloss_vector labels = c.args().labels;
  c.args().labels = {};
  const tileloss_distillation_options options = distillation_options(TILELOSS_JSD);
  ASSERT_TRUE(runs("distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
  c.args().labels = labels;
  EXPECT_TRUE(agrees(check_distillation(c, options)));
}

struct MixtureError {
  double loss = 0, gradient = 0;  // over what a few roundings are worth
};

// Rows of several certainties, some of them of one column. The budgets: of the loss, 2^-20 of its terms' sizes; of the gradient,
// 2^-20 of the row's largest, and 2^-22 of p |g|, which in a sure column all but cancels.
MixtureError mixture_error(std::int32_t divergence, double beta, std::int64_t vocab) {
  PairCaseSpec spec;
  spec.student = {.rows = 24, .vocab = vocab, .row_outputs = false};
  spec.student.per_row_loss = true;
  PairCase c(spec);
  const std::vector<std::int64_t> labels(c.student().labels().begin(), c.student().labels().end());
  c.args().labels = {};
  tileloss_distillation_options options = distillation_options(divergence);
  options.beta = beta;
  options.reduction = TILELOSS_REDUCTION_NONE;
  options.logit.logit_scale = 3;
  options.teacher_logit_scale = 6;
  EXPECT_TRUE(runs("distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
  tools::OracleTensors tensors;
  tensors.labels = labels;
  const auto oracle = make_distillation(tools::Function("distillation", &options), tensors);
  const auto row = oracle->new_row();
  const double of_p = divergence == TILELOSS_SKEW_REVERSE_KL ? beta : 1 - beta, of_q = 1 - of_p;
  MixtureError worst;
  oracle::SoftmaxRow teacher;
  for (std::int64_t i = 0; i < spec.student.rows; ++i) {
    const std::int64_t label = labels[static_cast<std::size_t>(i)];
    const std::vector<double> logits = c.student().logits_row(i), teacher_logits = c.teacher().logits_row(i);
    const tools::OracleValues& expected = row->compute({{i, logits}, label, {i, teacher_logits}});
    const oracle::GradientRow& gradient = expected.gradient;
    teacher.compute({.logit_scale = options.teacher_logit_scale}, teacher_logits, label);
    double terms = 0, largest = 0, cancelled = 0;
    for (std::int64_t j = 0; j < vocab; ++j) {
      const double p = expected.softmax->p(j), q = teacher.p(j), m = of_p * p + of_q * q;
      const double log_p = std::fabs(std::log(p / m)), log_q = std::fabs(std::log(q / m));
      terms += divergence == TILELOSS_JSD               ? of_p * p * log_p + of_q * q * log_q
               : divergence == TILELOSS_SKEW_REVERSE_KL ? p * log_p
                                                        : q * log_q;
      largest = std::fmax(largest, std::fabs(gradient.gradient[static_cast<std::size_t>(j)]));
      const double g = divergence == TILELOSS_JSD               ? of_p * log_p
                       : divergence == TILELOSS_SKEW_REVERSE_KL ? log_p + beta * (1 - beta) * std::fabs(q - p) / m
                                                                : (1 - beta) * std::fmin(q / m, std::fabs(1 - q / m));
      cancelled = std::fmax(cancelled, 3 * 6 * p * g);
    }
    worst.loss = std::fmax(worst.loss, std::fabs(float_at(c.args().loss, i) - expected.loss.total()) / terms);
    for (std::int64_t j = 0; j < vocab; ++j) {
      const double error = std::fabs(c.student().dlogit(i, j) - gradient.gradient[static_cast<std::size_t>(j)]);
      worst.gradient = std::fmax(worst.gradient, error / (0x1p-20 * largest + 0x1p-22 * cancelled));
    }
  }
  worst.loss /= 0x1p-20;
  return worst;
}

TEST(DistillationRows, OfAMixtureKeepTheirDigitsForAnyBeta) {
  for (const std::int32_t divergence : {TILELOSS_JSD, TILELOSS_SKEW_FORWARD_KL, TILELOSS_SKEW_REVERSE_KL}) {
    for (const double beta : {1e-4, 1e-3, 0.01, 0.1, 0.3, 0.7, 0.9, 0.99, 0.999, 0.9999}) {
      for (const std::int64_t vocab : {33, 2048}) {
        const MixtureError error = mixture_error(divergence, beta, vocab);
        EXPECT_LE(error.loss, 1) << "divergence " << divergence << ", beta " << beta << ", vocab " << vocab;
        EXPECT_LE(error.gradient, 1) << "divergence " << divergence << ", beta " << beta << ", vocab " << vocab;
      }
    }
  }
}

TEST(DistillationRows, HaveTheSameBitsForAnyThreadsAndBlocks) {
  for (int kind = 0; kind < kDivergences; ++kind) {
    PairCaseSpec spec;
    spec.student = {.rows = 33, .vocab = 3001, .format = NumberFormat::kBfloat16, .distribution = "wide"};
    const tileloss_distillation_options options = distillation_options(kind);
    const auto results = [&](std::int32_t threads, std::int64_t row_block) {
      PairCase c(spec);
      tileloss_plan_options hints = plan_options();
      hints.cpu.threads = threads;
      hints.cpu.row_block = row_block;
      EXPECT_TRUE(runs("distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, hints));
      std::vector<double> all = {static_cast<double>(float_at(c.args().loss, 0))};
      for (std::int64_t i = 0; i < 33; ++i) {
        for (std::int64_t j = 0; j < 3001; ++j) all.push_back(c.student().dlogit(i, j));
      }
      return all;
    };
    const std::vector<double> wanted = results(1, 1);
    EXPECT_EQ(results(3, 1), wanted) << kind;
    EXPECT_EQ(results(2, 7), wanted) << kind;
  }
}

TEST(DistillationArguments, ThatCannotBeAreNamed) {
  using Args = tileloss_args;
  using Options = tileloss_distillation_options;
  const struct {
    const char* message;
    std::function<void(Args&, Options&)> change;
  } cases[] = {
      {"teacher_logits: expected a matrix like the logits, got none", [](Args& a, Options&) { a.teacher_logits = {}; }},
      {"teacher_logits: expected the logits' shape [4,100], got [4,99]", [](Args& a, Options&) { a.teacher_logits.cols = 99; }},
      {"teacher_logits.dtype: expected the logits', float32, got bfloat16",
       [](Args& a, Options&) { a.teacher_logits.dtype = TILELOSS_BFLOAT16; }},
      {"teacher_logits.row_stride: expected >= cols = 100, got 99", [](Args& a, Options&) { a.teacher_logits.row_stride = 99; }},
      {"dlogits.data: expected a buffer apart from teacher_logits, got one that overlaps it",
       [](Args& a, Options&) { a.teacher_logits = a.dlogits; }},
      {"beta: expected a number > 0 and < 1 with this divergence (at the ends it is a KL: forward_kl, reverse_kl), got 1.000000",
       [](Args&, Options& o) { o.beta = 1, o.divergence = TILELOSS_JSD; }},
      {"label_weight: expected a number >= 0, got -1", [](Args&, Options& o) { o.label_weight.value = -1; }},
      {"divergence_weight: expected a number >= 0, got -0.5", [](Args&, Options& o) { o.divergence_weight.value = -0.5; }},
      {"teacher_logit_scale: expected a number > 0, got 0", [](Args&, Options& o) { o.teacher_logit_scale = 0; }},
      {"beta: expected none with divergence = forward_kl, only with jsd or skew_forward_kl or skew_reverse_kl, got a number",
       [](Args&, Options& o) { o.beta = 0.3; }},
      {"labels: expected a vector, as label_weight is not 0, got none",
       [](Args& a, Options& o) { a.labels = {}, a.logp = a.lse = {}, o.label_weight.value = 0.5; }},
      {"labels: expected a vector, for logp, got none", [](Args& a, Options&) { a.labels = {}, a.lse = {}; }},
      {"vocab_total: expected -1, and vocab_start 0: distillation takes no shards of the vocabulary without pair_state, "
       "got 200 and 0",
       [](Args&, Options& o) { o.logit.vocab_total = 200; }},
      {"teacher_temperature: expected a number > 0, got 0", [](Args&, Options& o) { o.teacher_temperature.value = 0; }},
      {"teacher_softcap: expected teacher_softcap / teacher_temperature from 1.18e-38 to 8.5e+37, for float32, got 1e-39 / 1",
       [](Args&, Options& o) { o.teacher_softcap = 1e-39; }}};
  for (const auto& [message, change] : cases) {
    PairCase c({.student = {.rows = 4, .vocab = 100}});
    tileloss_distillation_options options;
    change(c.args(), options);
    EXPECT_EQ(answer("distillation", c.args(), &options), message);
  }
}

// No tensor is dropped in silence: by functions on logits or with the LM head.
TEST(DistillationArguments, ATeacherIsRefusedWhereThereIsNone) {
  std::vector<float> numbers(64);
  const std::vector<std::int32_t> labels(4);
  auto args = init<tileloss_args>();
  args.labels = view(labels);
  args.teacher_logits = view(numbers, 4, 8);
  args.hidden = view(numbers, 4, 2);
  args.head = view(numbers, 8, 2);
  EXPECT_EQ(answer("linear_cross_entropy", args, nullptr, TILELOSS_FORWARD),
            "teacher_logits: expected none: linear_cross_entropy does not take it, got a matrix");
  args.hidden = args.head = {};
  args.logits = args.teacher_logits;
  EXPECT_EQ(answer("cross_entropy", args, nullptr, TILELOSS_FORWARD),
            "teacher_logits: expected none: cross_entropy does not take it, got a matrix");
}

}  // namespace
}  // namespace tileloss::test
