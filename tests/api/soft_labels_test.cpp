// Class probabilities instead of labels, and teachers of which some columns are known, against the oracle: all pairs of options,
// special values, the LM head, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/synthetic.h"
#include "tests/api/random_options.h"
#include "tests/shared/wanted_case.h"

namespace tileloss::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

tileloss_soft_cross_entropy_options soft_options() {
  tileloss_soft_cross_entropy_options options;
  tileloss_soft_cross_entropy_options_init(&options);
  return options;
}

tileloss_sparse_distillation_options sparse_options(std::int32_t divergence = TILELOSS_FORWARD_KL) {
  tileloss_sparse_distillation_options options;
  tileloss_sparse_distillation_options_init(&options);
  options.divergence = divergence;
  return options;
}

std::vector<Factor> shared_factors() {
  std::vector<Factor> factors = common_factors();
  std::erase_if(factors, [](const Factor& f) {
    return std::string_view(f.name) == "temperature_on" || std::string_view(f.name) == "schedule";
  });
  factors.insert(factors.end(), {{"schedule", {"0", "1"}},
                                 {"temperature_on", {"logits"}},
                                 {"reduction", {"none", "sum", "mean"}},
                                 {"loss_grad", {"absent", "scalar", "per_row"}},
                                 {"token_weights", {"no", "yes"}},
                                 {"num_items", {"absent", "7"}},
                                 {"passes", {"value_and_grad", "forward_backward"}}});
  return factors;
}

LogitsCaseSpec spec_of(const PairwiseSampler& s, NumberFormat format, std::uint64_t seed) {
  LogitsCaseSpec spec = common_spec(s, format, seed);
  spec.loss_grad = upstream_named(s.level("loss_grad"));
  spec.token_weights = s.is("token_weights", "yes");
  spec.per_row_loss = s.is("reduction", "none");
  return spec;
}

template <class Options>
void set_options(const PairwiseSampler& s, const LogitsCaseSpec& spec, float& temperature, Options& options) {
  set_logit_options(s, spec, temperature, options.logit);
  options.reduction = spec.per_row_loss          ? TILELOSS_REDUCTION_NONE
                      : s.is("reduction", "sum") ? TILELOSS_REDUCTION_SUM
                                                 : TILELOSS_REDUCTION_MEAN;
  if (!s.is("num_items", "absent")) options.num_items.value = s.number("num_items");
}

class SoftLabels : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SoftLabels, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(reference::format_info(param.param).name); });

TEST_P(SoftLabels, AgreeForAllPairsOfOptions) {
  std::vector<Factor> factors = shared_factors();
  factors.insert(factors.end(), {{"probs_format", {"float32", "the_logits", "float16"}},
                                 {"probs_stride_extra", {"0", "5"}},
                                 {"zeros", {"0", "0.5", "0.999"}},
                                 {"label_smoothing", {"0", "0.1", "1"}},
                                 {"class_weights", {"no", "yes"}}});
  PairwiseSampler sampler(factors, {{"class_weights", "yes", "outputs", "all"}}, 23);
  int failures = 0;
  for (int k = 0; k < kCases && failures < kMaxFailures; ++k) {
    sampler.next();
    SoftLabelSpec spec;
    spec.row = spec_of(sampler, GetParam(), static_cast<std::uint64_t>(6000 + k));
    spec.row.class_weights = sampler.is("class_weights", "yes");
    spec.probs_format = sampler.is("probs_format", "float32")   ? NumberFormat::kFloat32
                        : sampler.is("probs_format", "float16") ? NumberFormat::kFloat16
                                                                : GetParam();
    spec.stride_extra = sampler.integer("probs_stride_extra");
    spec.zeros = sampler.number("zeros");
    SoftLabelCase c(spec);
    tileloss_soft_cross_entropy_options options = soft_options();
    float temperature = 1;
    set_options(sampler, spec.row, temperature, options);
    options.label_smoothing = sampler.number("label_smoothing");
    testing::AssertionResult result =
        run_passes("soft_cross_entropy", sampler.level("passes"), c.row(), &options, wishes_of(sampler));
    if (result) result = agrees(c.check(options));
    EXPECT_TRUE(result) << "case " << k << ": " << sampler.describe();
    failures += result ? 0 : 1;
  }
  if (failures == 0) report_coverage("soft_cross_entropy", kCases, GetParam(), sampler);
}

TEST_P(SoftLabels, OfOneClassAreCrossEntropy) {
  for (const double smoothing : {0.0, 0.2}) {
    SoftLabelCase c(
        {.row = {.rows = 5, .vocab = 3001, .format = GetParam(), .distribution = "wide"}, .probs_format = GetParam()});
    for (std::int64_t i = 0; i < 5; ++i) {
      for (std::int64_t j = 0; j < 3001; ++j) c.set_prob(i, j, j == c.row().labels()[static_cast<std::size_t>(i)] ? 1 : 0);
    }
    tileloss_soft_cross_entropy_options options = soft_options();
    options.label_smoothing = smoothing;
    ASSERT_TRUE(runs("soft_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
    EXPECT_TRUE(agrees(c.check(options)));
    tileloss_cross_entropy_options hard = cross_entropy_options();
    hard.label_smoothing = smoothing;
    EXPECT_TRUE(agrees(check_cross_entropy(c.row(), hard)));
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
  tileloss_soft_cross_entropy_options options = soft_options();
  options.reduction = TILELOSS_REDUCTION_NONE;
  ASSERT_TRUE(runs("soft_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
  EXPECT_TRUE(agrees(c.check(options)));
}

class SparseTeachers : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SparseTeachers, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(reference::format_info(param.param).name); });

TEST_P(SparseTeachers, AgreeForAllPairsOfOptions) {
  std::vector<Factor> factors = shared_factors();
  factors.insert(factors.end(), {{"columns", {"1", "5", "64"}},
                                 {"ids", {"int32", "int64"}},
                                 {"gaps", {"no", "yes"}},
                                 {"transposed", {"no", "yes"}},
                                 {"teacher_std", {"0.01", "2", "10"}},
                                 {"divergence", {"0", "1", "2", "3", "4", "5", "6"}},
                                 {"beta", {"0.5", "0.1", "0.9"}},
                                 {"alpha", {"0", "0.3", "1"}},
                                 {"label_temperature", {"absent", "0.4", "3"}},
                                 {"squared", {"no", "yes"}},
                                 {"tail", {"0", "1", "2"}}});
  PairwiseSampler sampler(factors, {}, 29);
  int failures = 0;
  for (int k = 0; k < kCases && failures < kMaxFailures; ++k) {
    sampler.next();
    SparseTeacherSpec spec;
    spec.row = spec_of(sampler, GetParam(), static_cast<std::uint64_t>(7000 + k));
    spec.columns = sampler.integer("columns");
    spec.int32_ids = sampler.is("ids", "int32");
    spec.has_gaps = sampler.is("gaps", "yes");
    spec.is_transposed = sampler.is("transposed", "yes");
    spec.teacher_std = sampler.number("teacher_std");
    SparseTeacherCase c(spec);
    tileloss_sparse_distillation_options options = sparse_options(static_cast<std::int32_t>(sampler.integer("divergence")));
    float temperature = 1;
    set_options(sampler, spec.row, temperature, options);
    options.beta = sampler.number("beta");
    options.alpha.value = sampler.number("alpha");
    if (!sampler.is("label_temperature", "absent")) options.label_temperature.value = sampler.number("label_temperature");
    options.scale_by_temperature_squared = sampler.is("squared", "yes") ? 1 : 0;
    options.tail = static_cast<tileloss_tail>(sampler.integer("tail"));
    testing::AssertionResult result =
        run_passes("sparse_distillation", sampler.level("passes"), c.row(), &options, wishes_of(sampler));
    if (result) result = agrees(c.check(options));
    EXPECT_TRUE(result) << "case " << k << ": " << sampler.describe();
    failures += result ? 0 : 1;
  }
  if (failures == 0) report_coverage("sparse_distillation", kCases, GetParam(), sampler);
}

// -inf where the teacher has mass or on the other columns, NaN on either side, a teacher without any mass.
TEST_P(SparseTeachers, SpecialValuesAreTheOracles) {
  for (const tileloss_tail tail : {TILELOSS_TAIL_LUMP, TILELOSS_TAIL_IGNORE, TILELOSS_TAIL_RENORMALISE}) {
    for (std::int32_t kind = 0; kind < 7; ++kind) {
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
      for (std::int64_t j = 0; j < 300; ++j) {
        if (!is_known(3, j)) c.row().set_logit(3, j, -kInf);  // no p for the others
        if (!is_known(4, j)) c.row().set_logit(4, j, j % 2 == 0 ? -kInf : 0);
        if (!is_known(5, j)) c.row().set_logit(5, j, j == 17 ? kNan : 0);
      }
      c.set_log_q(6, 1, kNan);
      c.row().seal();
      tileloss_sparse_distillation_options options = sparse_options(kind);
      options.reduction = TILELOSS_REDUCTION_NONE;
      options.tail = tail;
      options.beta = 0.3;
      ASSERT_TRUE(runs("sparse_distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
      EXPECT_TRUE(agrees(c.check(options))) << "divergence " << kind << ", tail " << tail;
    }
  }
}

// Of every column known q keeps a class for what it lacks of 1, of which p has nothing; but not for what rounding took.
TEST_P(SparseTeachers, WhoKnowEveryColumnMayHaveMassOutsideThem) {
  for (std::int32_t kind = 0; kind < 7; ++kind) {
    for (const double lost : {0.3, 1e-6}) {
      SparseTeacherSpec spec;
      spec.row = {.rows = 2, .vocab = 5, .format = GetParam(), .per_row_loss = true, .extra_outputs = true};
      spec.columns = 5;
      SparseTeacherCase c(spec, SparseTeacherCase::Open{});
      for (std::int64_t k = 0; k < 5; ++k) c.set_log_q(0, k, std::log((1 - lost) * static_cast<double>(k + 1) / 15));
      c.row().seal();
      tileloss_sparse_distillation_options options = sparse_options(kind);
      options.reduction = TILELOSS_REDUCTION_NONE;
      options.beta = 0.3;
      ASSERT_TRUE(runs("sparse_distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
      EXPECT_TRUE(agrees(c.check(options))) << "divergence " << kind << ", lost " << lost;
      const bool is_infinite = lost > 0.1 && (kind == TILELOSS_FORWARD_KL || kind == TILELOSS_JEFFREYS);
      EXPECT_EQ(static_cast<const float*>(c.args().loss.data)[0] == kInf, is_infinite) << "divergence " << kind;
    }
  }
}

// Logits that a head makes without rounding: each row of hidden is one column of the head. Every third row is not in use.
TEST(WantedOfAHead, IsWhatTheLogitsGive) {
  constexpr std::int64_t kRows = 40, kVocab = 700, kHidden = 8, kColumns = 6;
  std::vector<float> logits(kRows * kVocab), hidden(kRows * kHidden), head(kVocab * kHidden), probs(kRows * kVocab),
      log_q(kRows * kColumns), dlogits(kRows * kVocab), dhidden(kRows * kHidden), wanted(kRows), loss(kRows);
  std::vector<std::int32_t> ids(kRows * kColumns), labels(kRows);
  std::vector<std::uint8_t> mask(kRows);
  tools::Random random(3, tools::Stream::kLogits, 0);
  for (float& h : head) h = static_cast<float>(2 * random.next_normal());
  for (float& q : probs) q = static_cast<float>(random.next_uniform());
  for (std::int64_t i = 0; i < kRows; ++i) {
    const auto row = static_cast<std::size_t>(i);
    hidden[row * kHidden + row % kHidden] = 1;
    for (std::size_t j = 0; j < kVocab; ++j) logits[row * kVocab + j] = head[j * kHidden + row % kHidden];
    for (std::size_t k = 0; k < kColumns; ++k) {
      ids[row * kColumns + k] = static_cast<std::int32_t>(100 * k + row);
      log_q[row * kColumns + k] = -2 - static_cast<float>(random.next_uniform());
    }
    labels[row] = static_cast<std::int32_t>(17 * i);
    mask[row] = i % 3 != 0 ? 1 : 0;
  }
  tileloss_args from_logits;
  tileloss_args_init(&from_logits);
  from_logits.labels = tileloss_make_vector(labels.data(), TILELOSS_INT32, kRows);
  from_logits.mask = tileloss_make_vector(mask.data(), TILELOSS_UINT8, kRows);
  tileloss_args from_head = from_logits;
  from_logits.loss = tileloss_make_vector(wanted.data(), TILELOSS_FLOAT32, kRows);
  from_logits.logits = tileloss_make_matrix(logits.data(), TILELOSS_FLOAT32, kRows, kVocab, kVocab);
  from_logits.dlogits = tileloss_make_matrix(dlogits.data(), TILELOSS_FLOAT32, kRows, kVocab, kVocab);
  from_head.loss = tileloss_make_vector(loss.data(), TILELOSS_FLOAT32, kRows);
  from_head.hidden = tileloss_make_matrix(hidden.data(), TILELOSS_FLOAT32, kRows, kHidden, kHidden);
  from_head.head = tileloss_make_matrix(head.data(), TILELOSS_FLOAT32, kVocab, kHidden, kHidden);
  from_head.dhidden = tileloss_make_matrix(dhidden.data(), TILELOSS_FLOAT32, kRows, kHidden, kHidden);
  const auto check = [&](const char* name, const void* options) {
    const std::string linear = std::string("linear_") + name;
    ASSERT_TRUE(succeeds(tileloss_call(name, TILELOSS_VALUE_AND_GRAD, &from_logits, options, nullptr, nullptr)));
    ASSERT_TRUE(succeeds(tileloss_call(linear.c_str(), TILELOSS_VALUE_AND_GRAD, &from_head, options, nullptr, nullptr)));
    EXPECT_EQ(loss, wanted) << name;
    for (std::int64_t i = 0; i < kRows; ++i) {
      const auto row = static_cast<std::size_t>(i);
      EXPECT_EQ(wanted[row] == 0, i % 3 == 0);
      for (std::size_t h = 0; h < kHidden; ++h) {
        double sum = 0;
        for (std::size_t j = 0; j < kVocab; ++j) {
          sum += static_cast<double>(dlogits[row * kVocab + j]) * static_cast<double>(head[j * kHidden + h]);
        }
        EXPECT_NEAR(static_cast<double>(dhidden[row * kHidden + h]), sum, 1e-2) << name << i;
      }
    }
  };
  from_logits.target_probs = from_head.target_probs = tileloss_make_matrix(probs.data(), TILELOSS_FLOAT32, kRows, kVocab, kVocab);
  tileloss_soft_cross_entropy_options soft = soft_options();
  soft.reduction = TILELOSS_REDUCTION_NONE;
  soft.label_smoothing = 0.1;
  check("soft_cross_entropy", &soft);
  from_logits.target_probs = from_head.target_probs = {};
  from_logits.teacher_ids = from_head.teacher_ids = tileloss_make_matrix(ids.data(), TILELOSS_INT32, kRows, kColumns, kColumns);
  from_logits.teacher_logprobs = from_head.teacher_logprobs =
      tileloss_make_matrix(log_q.data(), TILELOSS_FLOAT32, kRows, kColumns, kColumns);
  tileloss_sparse_distillation_options sparse = sparse_options(TILELOSS_REVERSE_KL);
  sparse.reduction = TILELOSS_REDUCTION_NONE;
  sparse.alpha.value = 0.25;
  check("sparse_distillation", &sparse);
}

TEST(WantedArguments, ThatCannotBeAreNamed) {
  const auto soft = [](auto&& change) -> std::string {
    SoftLabelCase c({.row = {.rows = 4, .vocab = 100}});
    tileloss_soft_cross_entropy_options options = soft_options();
    change(c.args(), options);
    return tileloss_call("soft_cross_entropy", TILELOSS_VALUE_AND_GRAD, &c.args(), &options, nullptr, nullptr) == TILELOSS_OK
               ? "accepted"
               : tileloss_last_error();
  };
  using Args = tileloss_args;
  using Soft = tileloss_soft_cross_entropy_options;
  EXPECT_EQ(soft([](Args& a, Soft&) { a.target_probs = {}; }), "target_probs: expected a matrix of the logits' shape, got none");
  EXPECT_EQ(soft([](Args& a, Soft&) { a.target_probs.cols = 99; }),
            "target_probs: expected the logits' shape [4,100], got [4,99]");
  EXPECT_EQ(soft([](Args& a, Soft&) { a.target_probs = a.dlogits; }),
            "dlogits.data: expected a buffer apart from target_probs, got one that overlaps it");
  EXPECT_EQ(soft([](Args&, Soft& o) { o.logit.vocab_total = 200; }),
            "vocab_total: expected -1, and vocab_start 0: soft_cross_entropy takes no shards of the vocabulary without "
            "pair_state, got 200 and 0");
  EXPECT_EQ(soft([](Args&, Soft& o) { o.label_smoothing = 2; }), "label_smoothing: expected a number >= 0 and <= 1, got 2");

  std::vector<std::int64_t> ids;
  std::vector<float> log_q;
  const auto sparse = [&](auto&& change) -> std::string {
    SparseTeacherCase c({.row = {.rows = 2, .vocab = 100}, .columns = 3});
    ids = {1, 2, 3, 4, 5, 6};
    log_q.assign(6, -1);
    c.args().teacher_ids = tileloss_make_matrix(ids.data(), TILELOSS_INT64, 2, 3, 3);
    c.args().teacher_logprobs = tileloss_make_matrix(log_q.data(), TILELOSS_FLOAT32, 2, 3, 3);
    change(c.args());
    const tileloss_sparse_distillation_options options = sparse_options();
    return tileloss_call("sparse_distillation", TILELOSS_VALUE_AND_GRAD, &c.args(), &options, nullptr, nullptr) == TILELOSS_OK
               ? "accepted"
               : tileloss_last_error();
  };
  EXPECT_EQ(sparse([](Args&) {}), "accepted");
  EXPECT_EQ(sparse([](Args& a) { a.teacher_ids = {}; }), "teacher_ids: expected an int32 or int64 matrix [N,K], got none");
  EXPECT_EQ(sparse([](Args& a) { a.teacher_ids.dtype = TILELOSS_FLOAT32; }),
            "teacher_ids.dtype: expected int32 or int64, got float32");
  EXPECT_EQ(sparse([](Args& a) { a.teacher_ids.rows = 1; }), "teacher_ids.rows: expected the rows, 2, got 1");
  EXPECT_EQ(sparse([](Args& a) { a.teacher_logprobs.cols = 2; }),
            "teacher_logprobs: expected teacher_ids' shape [2,3], got [2,2]");
  EXPECT_EQ(sparse([&](Args&) { ids[4] = 100; }),
            "teacher_ids[1,1]: expected a column < 100, or a negative number for none, got 100");
  EXPECT_EQ(sparse([&](Args&) { ids[2] = 1; }), "teacher_ids[0]: expected distinct columns, got 1 twice");
  EXPECT_EQ(sparse([&](Args&) { log_q[4] = 0.5F; }),
            "teacher_logprobs[1,1]: expected the logarithm of a probability, <= 0 but for rounding, got 0.500000");
  EXPECT_EQ(sparse([&](Args&) { log_q[4] = 1e-5F; }), "accepted");
  EXPECT_EQ(sparse([&](Args&) { log_q[4] = 0.5F, ids[4] = -1; }), "accepted");
}

}  // namespace
}  // namespace tileloss::test
