// Class probabilities instead of labels, and teachers of which some columns are known, against the oracle: all pairs of options,
// special values, and what is refused.
// On toy and cuda: SoftLabels, SureSoftLabels, SparseTeachers.
// On cuda: WantedArguments.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/api/random_options.h"
#include "tests/shared/wanted_case.h"

namespace tileloss::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<Factor> own_factors(const std::vector<Factor>& more) {
  return with_factors(common_factors(),
                      {{"schedule", {"0", "1"}},
                       {"temperature_on", {"logits"}},
                       {"reduction", {"none", "sum", "mean"}},
                       {"loss_grad", {"absent", "scalar", "per_row"}},
                       {"token_weights", {"no", "yes"}},
                       {"num_items", {"absent", "7"}},
                       {"passes", {"value_and_grad", "forward_backward"}}},
                      more);
}

std::vector<Forbidden> own_forbidden() {
  std::vector<Forbidden> all;
  forbid(all, "reduction", {"none", "sum"}, "num_items", {"7"});
  return all;
}

class SoftLabels : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SoftLabels, testing::ValuesIn(kFormats), format_name);

TEST_P(SoftLabels, AgreeForAllPairsOfOptions) {
  PairwiseSampler sampler(own_factors({{"probs_format", {"float32", "the_logits", "float16"}},
                                       {"probs_stride_extra", {"0", "5"}},
                                       {"zeros", {"0", "0.5", "0.999"}},
                                       {"label_smoothing", {"0", "0.1", "1"}},
                                       {"class_weights", {"no", "yes"}}}),
                          own_forbidden(), 23);
  const auto agree = [](const PairwiseSampler& s, std::uint64_t number) {
    SoftLabelSpec spec{.row = loss_spec(s, GetParam(), 6000 + number)};
    spec.row.class_weights = s.is("class_weights", "yes");
    spec.probs_format = s.is("probs_format", "float32")   ? NumberFormat::kFloat32
                        : s.is("probs_format", "float16") ? NumberFormat::kFloat16
                                                          : GetParam();
    spec.stride_extra = s.integer("probs_stride_extra");
    spec.zeros = s.number("zeros");
    SoftLabelCase c(spec);
    tileloss_soft_cross_entropy_options options{.label_smoothing = s.number("label_smoothing")};
    Numbers numbers;
    set_loss_options(s, spec.row, numbers, options);
    const auto ran = run_passes("soft_cross_entropy", s.level("passes"), c.row(), &options, hints_of(s));
    return ran ? agrees(c.check(options)) : ran;
  };
  expect_all_pairs_agree("soft_cross_entropy", GetParam(), sampler, kCases, agree);
}

TEST_P(SoftLabels, OfOneClassAreCrossEntropy) {
  for (const auto& [vocab, smoothing] : {std::pair(3001, 0.0), {3001, 0.2}, {1, 0.2}}) {
    SoftLabelCase c(
        {.row = {.rows = 5, .vocab = vocab, .format = GetParam(), .distribution = "wide"}, .probs_format = GetParam()});
    for (std::int64_t i = 0; i < 5; ++i) {
      for (std::int64_t j = 0; j < vocab; ++j) c.set_prob(i, j, j == c.row().labels()[static_cast<std::size_t>(i)] ? 1 : 0);
    }
    const tileloss_soft_cross_entropy_options options{.label_smoothing = smoothing};
    ASSERT_TRUE(runs("soft_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
    EXPECT_TRUE(agrees(c.check(options))) << vocab;
    const tileloss_cross_entropy_options hard{.label_smoothing = smoothing};
    EXPECT_TRUE(agrees(check_cross_entropy(c.row(), hard))) << vocab;
    c.args().target_probs = {};
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &hard, plan_options()));
    EXPECT_TRUE(agrees(check_cross_entropy(c.row(), hard))) << vocab;
  }
}

// Nothing says which column is to be left out of the sums: it is the heaviest class's.
TEST(SureSoftLabels, HaveTheDigitsOfTheirLabels) {
  for (const std::int64_t vocab : {1, 2, 300, 3001}) {
    SoftLabelCase c(
        {.row = {.rows = 9, .vocab = vocab, .distribution = "confident", .per_row_loss = true, .row_outputs = false}});
    for (std::int64_t i = 0; i < 9; ++i) {
      for (std::int64_t j = 0; j < vocab; ++j) c.set_prob(i, j, j == c.row().labels()[static_cast<std::size_t>(i)] ? 1 : 0);
    }
    const auto numbers = [&](const char* function, const void* options) {
      c.row().reset();
      EXPECT_TRUE(runs(function, TILELOSS_VALUE_AND_GRAD, c.args(), options, plan_options()));
      std::vector<double> found;
      for (std::int64_t i = 0; i < 9; ++i) {
        found.push_back(float_at(c.args().loss, i));
        found.push_back(-c.row().dlogit(i, c.row().labels()[static_cast<std::size_t>(i)]));
      }
      return found;
    };
    const tileloss_cross_entropy_options hard{.reduction = TILELOSS_REDUCTION_NONE};
    const tileloss_soft_cross_entropy_options soft{.reduction = TILELOSS_REDUCTION_NONE};
    const tileloss_matrix probs = std::exchange(c.args().target_probs, {});
    const std::vector<double> wanted = numbers("cross_entropy", &hard);
    c.args().target_probs = probs;
    c.args().labels = {};
    const std::vector<double> found = numbers("soft_cross_entropy", &soft);
    for (std::size_t k = 0; k < wanted.size(); ++k) EXPECT_NEAR(found[k], wanted[k], 1e-6 * wanted[k]) << vocab << " " << k;
  }
}

TEST_P(SoftLabels, SpecialValuesAreTheOracles) {
  LogitsCaseSpec row = {.rows = 7, .vocab = 300, .format = GetParam(), .per_row_loss = true, .extra_outputs = true};
  SoftLabelSpec spec{.row = row};
  SoftLabelCase c(spec);
  for (std::int64_t j = 0; j < 300; ++j) c.set_prob(0, j, 0);
  c.set_prob(1, 4, kNan);
  c.set_prob(2, 4, kInf);
  c.set_prob(3, 4, -0.25);
  c.set_prob(4, 4, 1e30);
  const tileloss_soft_cross_entropy_options options{.reduction = TILELOSS_REDUCTION_NONE};
  ASSERT_TRUE(runs("soft_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
  EXPECT_TRUE(agrees(c.check(options)));
}

class SparseTeachers : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SparseTeachers, testing::ValuesIn(kFormats), format_name);

TEST_P(SparseTeachers, AgreeForAllPairsOfOptions) {
  std::vector<Forbidden> forbidden = own_forbidden();
  forbid_beta(forbidden, {"0.1", "0.9"});
  PairwiseSampler sampler(own_factors({{"columns", {"1", "5", "64"}},
                                       {"ids", {"int32", "int64"}},
                                       {"gaps", {"no", "yes"}},
                                       {"transposed", {"no", "yes"}},
                                       {"teacher_std", {"0.01", "2", "10"}},
                                       {"divergence", {"0", "1", "2", "3", "4", "5", "6"}},
                                       {"beta", {"0.5", "0.1", "0.9"}},
                                       {"weights", {"0", "0.3", "1"}},
                                       {"label_temperature", {"absent", "0.4", "3"}},
                                       {"squared", {"no", "yes"}},
                                       {"tail", {"0", "1", "2"}}}),
                          forbidden, 29);
  const auto agree = [](const PairwiseSampler& s, std::uint64_t number) {
    const SparseTeacherSpec spec{.row = loss_spec(s, GetParam(), 7000 + number),
                                 .columns = s.integer("columns"),
                                 .int32_ids = s.is("ids", "int32"),
                                 .has_gaps = s.is("gaps", "yes"),
                                 .is_transposed = s.is("transposed", "yes"),
                                 .teacher_std = s.number("teacher_std")};
    SparseTeacherCase c(spec);
    tileloss_sparse_distillation_options options{.divergence = static_cast<std::int32_t>(s.integer("divergence")),
                                                 .tail = static_cast<tileloss_tail>(s.integer("tail"))};
    Numbers numbers;
    set_loss_options(s, spec.row, numbers, options);
    options.beta = s.number("beta");
    set_weights(options, s.number("weights"));
    if (!s.is("label_temperature", "absent")) options.label_temperature.value = s.number("label_temperature");
    options.scale_by_temperature_squared = s.is("squared", "yes") ? 1 : 0;
    const auto ran = run_passes("sparse_distillation", s.level("passes"), c.row(), &options, hints_of(s));
    return ran ? agrees(c.check(options)) : ran;
  };
  expect_all_pairs_agree("sparse_distillation", GetParam(), sampler, kCases, agree);
}

// -inf where the teacher has mass or on the other columns, NaN on either side, a teacher without any mass. The last row's largest
// logits lie far from 0, and only its label's temperature makes them round.
TEST_P(SparseTeachers, SpecialValuesAreTheOracles) {
  for (const tileloss_tail tail : {TILELOSS_TAIL_LUMP, TILELOSS_TAIL_IGNORE, TILELOSS_TAIL_RENORMALISE}) {
    for (std::int32_t kind = 0; kind < kDivergences; ++kind) {
      SparseTeacherSpec spec;
      spec.row = {.rows = 9, .vocab = 300, .format = GetParam(), .per_row_loss = true, .extra_outputs = true};
      spec.columns = 6;
      SparseTeacherCase c(spec, SparseTeacherCase::Open{});
      const auto is_known = [&](std::int64_t row, std::int64_t column) {
        for (std::int64_t k = 0; k < 6; ++k) {
          if (c.id(row, k) == column) return true;
        }
        return false;
      };
      c.row().set_logit(0, c.id(0, 2), -kInf);
      c.row().set_logit(1, c.id(1, 3), kNan);
      c.row().set_logit(2, c.id(2, 3), kInf);
      const std::int64_t far = c.row().labels()[8];
      for (std::int64_t j = 0; j < 300; ++j) {
        if (!is_known(3, j)) c.row().set_logit(3, j, -kInf);  // no p for the others
        if (!is_known(4, j)) c.row().set_logit(4, j, j % 2 == 0 ? -kInf : 0);
        if (!is_known(5, j)) c.row().set_logit(5, j, j == 17 ? kNan : 0);
        c.row().set_logit(8, j, j == far ? 1e4 : j == (far + 1) % 300 ? 1e4 + 2 : 1e4 - 20);
      }
      c.set_log_q(6, 1, kNan);
      c.row().seal();
      tileloss_sparse_distillation_options options{
          .divergence = kind, .reduction = TILELOSS_REDUCTION_NONE, .beta = 0.3, .tail = tail};
      set_weights(options, 0.5);
      options.label_temperature.value = 3;
      leave_out_without_effect("sparse_distillation", options);
      ASSERT_TRUE(runs("sparse_distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
      EXPECT_TRUE(agrees(c.check(options))) << "divergence " << kind << ", tail " << tail;
    }
  }
}

// Of every column known q keeps a class for what it lacks of 1, of which p has nothing; but not for what rounding took.
TEST_P(SparseTeachers, WhoKnowEveryColumnMayHaveMassOutsideThem) {
  for (std::int32_t kind = 0; kind < kDivergences; ++kind) {
    for (const double lost : {0.3, 1e-6}) {
      SparseTeacherSpec spec;
      spec.row = {.rows = 2, .vocab = 5, .format = GetParam(), .per_row_loss = true, .extra_outputs = true};
      spec.columns = 5;
      SparseTeacherCase c(spec, SparseTeacherCase::Open{});
      for (std::int64_t k = 0; k < 5; ++k) c.set_log_q(0, k, std::log((1 - lost) * static_cast<double>(k + 1) / 15));
      c.row().seal();
      tileloss_sparse_distillation_options options{.divergence = kind, .reduction = TILELOSS_REDUCTION_NONE, .beta = 0.3};
      leave_out_without_effect("sparse_distillation", options);
      ASSERT_TRUE(runs("sparse_distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
      EXPECT_TRUE(agrees(c.check(options))) << "divergence " << kind << ", lost " << lost;
      const bool is_infinite = lost > 0.1 && (kind == TILELOSS_FORWARD_KL || kind == TILELOSS_JEFFREYS);
      EXPECT_EQ(float_at(c.args().loss, 0) == kInf, is_infinite) << "divergence " << kind;
    }
  }
}

TEST(WantedArguments, OfClassProbabilitiesThatCannotBeAreNamed) {
  using Args = tileloss_args;
  using Options = tileloss_soft_cross_entropy_options;
  const struct {
    const char* message;
    std::function<void(Args&, Options&)> change;
  } cases[] = {
      {"target_probs: expected a matrix of the logits' shape, got none", [](Args& a, Options&) { a.target_probs = {}; }},
      {"target_probs: expected the logits' shape [4,100], got [4,99]", [](Args& a, Options&) { a.target_probs.cols = 99; }},
      {"dlogits.data: expected a buffer apart from target_probs, got one that overlaps it",
       [](Args& a, Options&) { a.target_probs = a.dlogits; }},
      {"vocab_total: expected -1, and vocab_start 0: soft_cross_entropy takes no shards of the vocabulary without pair_state, "
       "got 200 and 0",
       [](Args&, Options& o) { o.logit.vocab_total = 200; }},
      {"label_smoothing: expected a number >= 0 and <= 1, got 2", [](Args&, Options& o) { o.label_smoothing = 2; }}};
  for (const auto& [message, change] : cases) {
    SoftLabelCase c({.row = {.rows = 4, .vocab = 100}});
    tileloss_soft_cross_entropy_options options;
    change(c.args(), options);
    EXPECT_EQ(answer("soft_cross_entropy", c.args(), &options), message);
  }
}

TEST(WantedArguments, OfSomeColumnsThatCannotBeAreNamed) {
  struct Known {
    tileloss_args& args;
    std::vector<std::int64_t> ids = {1, 2, 3, 4, 5, 6};
    std::vector<float> log_q = std::vector<float>(6, -1);
  };
  const struct {
    const char* message;
    std::function<void(Known&)> change;
  } cases[] = {
      {"accepted", [](Known&) {}},
      {"teacher_ids: expected an int32 or int64 matrix [N,K], got none", [](Known& k) { k.args.teacher_ids = {}; }},
      {"teacher_ids.dtype: expected int32 or int64, got float32", [](Known& k) { k.args.teacher_ids.dtype = TILELOSS_FLOAT32; }},
      {"teacher_ids.rows: expected the rows, 2, got 1", [](Known& k) { k.args.teacher_ids.rows = 1; }},
      {"teacher_logprobs: expected teacher_ids' shape [2,3], got [2,2]", [](Known& k) { k.args.teacher_logprobs.cols = 2; }},
      {"teacher_ids[1,1]: expected a column < 100, or a negative number for none, got 100", [](Known& k) { k.ids[4] = 100; }},
      {"teacher_ids[0]: expected distinct columns, got 1 twice", [](Known& k) { k.ids[2] = 1; }},
      {"teacher_logprobs[1,1]: expected the logarithm of a probability, <= 0 but for rounding, got 0.500000",
       [](Known& k) { k.log_q[4] = 0.5F; }},
      {"accepted", [](Known& k) { k.log_q[4] = 1e-5F; }},
      {"accepted", [](Known& k) { k.log_q[4] = 0.5F, k.ids[4] = -1; }}};
  for (const auto& [message, change] : cases) {
    SparseTeacherCase c({.row = {.rows = 2, .vocab = 100}, .columns = 3});
    Known known{c.args()};
    c.args().teacher_ids = view(known.ids, 2, 3);
    c.args().teacher_logprobs = view(known.log_q, 2, 3);
    change(known);
    const tileloss_sparse_distillation_options options;
    EXPECT_EQ(answer("sparse_distillation", c.args(), &options), message);
  }
}

}  // namespace
}  // namespace tileloss::test
