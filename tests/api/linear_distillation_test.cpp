// linear_distillation, two LM heads, against the oracle: every divergence, all pairs of shapes, layouts, options and workspaces;
// the bits of any plan; and what is refused.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/api/calls.h"
#include "tests/api/random_options.h"
#include "tests/shared/linear_pair_case.h"

namespace tileloss::test {
namespace {

constexpr int kKinds = 7;

tileloss_distillation_options distillation_options(std::int32_t divergence = TILELOSS_FORWARD_KL) {
  tileloss_distillation_options options;
  tileloss_distillation_options_init(&options);
  options.divergence = divergence;
  return options;
}

std::vector<Factor> factors() {
  return {{"rows", {"1", "7", "33", "70"}},
          {"vocab", {"2", "17", "64", "300", "1000"}},
          {"hidden", {"1", "7", "33"}},
          {"teacher_hidden", {"1", "9", "40"}},
          {"valid_vocab", {"all", "fewer"}},
          {"hidden_layout", {"0", "1", "2"}},
          {"head_layout", {"0", "1", "2"}},
          {"teacher_layout", {"0", "1", "2"}},
          {"misalignment", {"0", "1", "3"}},
          {"flush", {"right", "left"}},
          {"ignored", {"0", "0.3", "1"}},
          {"compute", {"0", "1", "2"}},  // none, float32, bfloat16
          {"logit_std", {"0.01", "2", "30"}},
          {"teacher_logit_std", {"0.01", "2", "10"}},
          {"teacher", {"other", "the_student"}},
          {"bias", {"no", "yes"}},
          {"teacher_bias", {"no", "yes"}},
          {"dbias", {"no", "yes"}},
          {"dhead", {"yes", "no"}},
          {"float32_dhead", {"no", "yes"}},
          {"accumulate", {"no", "yes"}},
          {"row_block", {"all", "16"}},
          {"threads", {"1", "3"}},
          {"divergence", {"0", "1", "2", "3", "4", "5", "6"}},
          {"beta", {"0.5", "0.1"}},
          {"alpha", {"0", "0.3"}},
          {"reduction", {"none", "mean"}},
          {"token_weights", {"no", "yes"}},
          {"squared", {"no", "yes"}},
          {"logit_scale", {"1", "3"}},
          {"softcap", {"0", "30"}},
          {"temperature", {"1", "0.6"}},
          {"teacher_softcap", {"0", "20"}},
          {"teacher_temperature", {"absent", "2"}},
          {"label_temperature", {"absent", "0.5", "3"}}};
}

LinearPairSpec spec_of(const PairwiseSampler& s, NumberFormat format, std::uint64_t seed) {
  const std::int64_t vocab = s.integer("vocab");
  return {.student = {.row = {.rows = s.integer("rows"),
                              .vocab = vocab,
                              .valid_vocab = s.is("valid_vocab", "fewer") ? (vocab + 1) / 2 : -1,
                              .misalignment = s.integer("misalignment"),
                              .flush = s.is("flush", "left") ? Flush::kLeft : Flush::kRight,
                              .seed = seed,
                              .ignore_prob = s.number("ignored"),
                              .token_weights = s.is("token_weights", "yes"),
                              .per_row_loss = s.is("reduction", "none"),
                              .extra_outputs = true},
                      .hidden = s.integer("hidden"),
                      .format = format,
                      .head_format = format,
                      .compute_dtype = static_cast<tileloss_dtype>(s.integer("compute")),
                      .hidden_layout = static_cast<MatrixLayout>(s.integer("hidden_layout")),
                      .head_layout = static_cast<MatrixLayout>(s.integer("head_layout")),
                      .logit_std = s.number("logit_std"),
                      .bias = s.is("bias", "yes"),
                      .dhead = s.is("dhead", "yes"),
                      .dbias = s.is("dbias", "yes"),
                      .float32_dhead = s.is("float32_dhead", "yes"),
                      .accumulate = s.is("accumulate", "yes")},
          .teacher_hidden = s.integer("teacher_hidden"),
          .teacher_layout = static_cast<MatrixLayout>(s.integer("teacher_layout")),
          .teacher_logit_std = s.number("teacher_logit_std"),
          .teacher_bias = s.is("teacher_bias", "yes"),
          .teacher_is_student = s.is("teacher", "the_student")};
}

class LinearDistillation : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, LinearDistillation, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(reference::format_info(param.param).name); });

TEST_P(LinearDistillation, AgreesForAllPairsOfOptions) {
  constexpr int kCases = 160;
  PairwiseSampler sampler(factors(), {}, 17);
  int failures = 0, in_dhead = 0, in_chunks = 0;
  for (int k = 0; k < kCases && failures < kMaxFailures; ++k) {
    sampler.next();
    LinearPair c(spec_of(sampler, GetParam(), static_cast<std::uint64_t>(3000 + k)));
    tileloss_distillation_options options =
        c.student().with_linear(distillation_options(static_cast<std::int32_t>(sampler.integer("divergence"))));
    options.beta = sampler.number("beta");
    options.alpha.value = sampler.number("alpha");
    if (!sampler.is("label_temperature", "absent")) options.label_temperature.value = sampler.number("label_temperature");
    options.reduction = sampler.is("reduction", "none") ? TILELOSS_REDUCTION_NONE : TILELOSS_REDUCTION_MEAN;
    options.scale_by_temperature_squared = sampler.is("squared", "yes") ? 1 : 0;
    options.logit.logit_scale = sampler.number("logit_scale");
    options.logit.softcap = sampler.number("softcap");
    options.logit.temperature.value = sampler.number("temperature");
    options.logit.valid_vocab = c.student().spec().row.valid_vocab;
    options.teacher_softcap = sampler.number("teacher_softcap");
    if (!sampler.is("teacher_temperature", "absent")) {
      options.teacher_temperature.value = sampler.number("teacher_temperature");
    }
    tileloss_plan_options wishes = plan_options();
    wishes.threads = static_cast<std::int32_t>(sampler.integer("threads"));
    wishes.row_block = sampler.is("row_block", "all") ? 0 : sampler.integer("row_block");
    tileloss_plan plan;
    tileloss_plan_init(&plan);
    ASSERT_TRUE(succeeds(
        tileloss_make_plan("linear_distillation", TILELOSS_VALUE_AND_GRAD, &c.args(), &options, &wishes, nullptr, &plan)));
    in_dhead += plan.cpu.kept_rows > 0 ? 1 : 0;
    in_chunks += plan.cpu.row_block < c.student().spec().row.rows ? 1 : 0;
    ASSERT_TRUE(runs("linear_distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, wishes)) << sampler.describe();
    const testing::AssertionResult result = agrees(c.check(options));
    EXPECT_TRUE(result) << "case " << k << ": " << sampler.describe();
    failures += result ? 0 : 1;
  }
  EXPECT_GT(in_dhead, 0);
  EXPECT_GT(in_chunks, 0);
  if (failures == 0) report_coverage("linear_distillation", kCases, GetParam(), sampler);
}

// A head of 5 tiles, the last of 87 columns, whose gradient has room for 128 of 300 rows' dlogits in 16 bits.
LinearPairSpec waiting_spec(MatrixLayout head_layout, bool float32_dhead) {
  return {.student = {.row = {.rows = 300, .vocab = 1111, .seed = 5, .ignore_prob = 0.1},
                      .hidden = 160,
                      .head_layout = head_layout,
                      .float32_dhead = float32_dhead},
          .teacher_hidden = 48};
}

TEST(LinearDistillationWaits, InDheadOrInTheWorkspace) {
  struct Wanted {
    MatrixLayout layout;
    bool float32_dhead;
    std::int64_t rows;
  };
  for (const Wanted& w : {Wanted{MatrixLayout::kRows, false, 128}, Wanted{MatrixLayout::kRows, true, 300},
                          Wanted{MatrixLayout::kTransposed, false, 128}, Wanted{MatrixLayout::kTransposed, true, 300},
                          Wanted{MatrixLayout::kGaps, false, 0}}) {
    for (const std::int32_t kind : {TILELOSS_FORWARD_KL, TILELOSS_JSD}) {
      LinearPair c(waiting_spec(w.layout, w.float32_dhead));
      const auto options = c.student().with_linear(distillation_options(kind));
      tileloss_plan plan;
      tileloss_plan_init(&plan);
      const tileloss_plan_options wishes = plan_options();
      ASSERT_TRUE(succeeds(
          tileloss_make_plan("linear_distillation", TILELOSS_VALUE_AND_GRAD, &c.args(), &options, &wishes, nullptr, &plan)));
      EXPECT_EQ(plan.cpu.kept_rows, w.rows);
      ASSERT_TRUE(runs("linear_distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, wishes));
      EXPECT_TRUE(agrees(c.check(options))) << static_cast<int>(w.layout) << w.float32_dhead << kind;
    }
  }
}

TEST(LinearDistillationBits, AreTheSameForAnyThreadsAndWorkspace) {
  for (const std::int64_t row_block : {0, 64}) {
    const auto bytes = [&](std::int32_t threads, bool is_tight) {
      LinearPair c(waiting_spec(MatrixLayout::kRows, false));
      const auto options = c.student().with_linear(distillation_options(TILELOSS_JSD));
      tileloss_plan_options wishes = plan_options();
      wishes.threads = threads;
      wishes.row_block = row_block;
      wishes.chunk_columns = 512;
      if (is_tight) {  // as little as the message says
        wishes.workspace_bytes = 1;
        tileloss_plan plan;
        tileloss_plan_init(&plan);
        EXPECT_EQ(
            tileloss_make_plan("linear_distillation", TILELOSS_VALUE_AND_GRAD, &c.args(), &options, &wishes, nullptr, &plan),
            TILELOSS_WORKSPACE_TOO_SMALL);
        wishes.workspace_bytes =
            std::stoll(std::string(tileloss_last_error()).substr(std::strlen("workspace_bytes: expected at least ")));
      }
      EXPECT_TRUE(runs("linear_distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, wishes));
      std::vector<unsigned char> all = c.student().gradient_bytes();
      const auto* loss = static_cast<const unsigned char*>(c.args().loss.data);
      all.insert(all.end(), loss, loss + sizeof(float));
      return all;
    };
    const std::vector<unsigned char> wanted = bytes(1, false);
    EXPECT_EQ(bytes(3, false), wanted);
    if (row_block == 0) continue;  // less room is more chunks of rows
    EXPECT_EQ(bytes(2, true), wanted);
  }
}

TEST(LinearDistillationRows, AForwardHasTheLossOfAValueAndGrad) {
  LinearPairSpec spec = waiting_spec(MatrixLayout::kRows, false);
  LinearPair both(spec);
  const auto options = both.student().with_linear(distillation_options(TILELOSS_REVERSE_KL));
  ASSERT_TRUE(runs("linear_distillation", TILELOSS_VALUE_AND_GRAD, both.args(), &options, plan_options()));
  spec.student.dhidden = spec.student.dhead = false;
  LinearPair forward(spec);
  ASSERT_TRUE(runs("linear_distillation", TILELOSS_FORWARD, forward.args(), &options, plan_options()));
  EXPECT_EQ(*static_cast<const float*>(forward.args().loss.data), *static_cast<const float*>(both.args().loss.data));
  EXPECT_TRUE(agrees(forward.check(options)));
}

// The same tensors on either side: exactly 0, gradient and all.
TEST(LinearDistillationRows, OfEqualHeadsAreZero) {
  for (int kind = 0; kind < kKinds; ++kind) {
    LinearPairSpec spec = waiting_spec(MatrixLayout::kRows, false);
    spec.teacher_is_student = true;
    LinearPair c(spec);
    const auto options = c.student().with_linear(distillation_options(kind));
    ASSERT_TRUE(runs("linear_distillation", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
    EXPECT_EQ(*static_cast<const float*>(c.args().loss.data), 0) << kind;
    for (const unsigned char byte : c.student().gradient_bytes()) ASSERT_EQ(byte & 0x7f, 0) << kind;  // -0 too
  }
}

TEST(LinearDistillationArguments, ThatCannotBeAreNamed) {
  const auto message = [&](auto&& change) -> std::string {
    LinearPair c({.student = {.row = {.rows = 4, .vocab = 100}, .hidden = 8}, .teacher_hidden = 12});
    tileloss_distillation_options options = distillation_options();
    change(c.args(), options);
    return tileloss_call("linear_distillation", TILELOSS_VALUE_AND_GRAD, &c.args(), &options, nullptr, nullptr) == TILELOSS_OK
               ? "accepted"
               : tileloss_last_error();
  };
  using Args = tileloss_args;
  using Options = tileloss_distillation_options;
  EXPECT_EQ(message([](Args& a, Options&) { a.teacher_hidden = {}; }),
            "teacher_hidden: expected a float32, bfloat16 or float16 matrix [N,G], got none");
  EXPECT_EQ(message([](Args& a, Options&) { a.teacher_head = {}; }),
            "teacher_head: expected a float32, bfloat16 or float16 matrix [V,G], got none");
  EXPECT_EQ(message([](Args& a, Options&) { a.teacher_hidden.rows = 3; }), "teacher_hidden.rows: expected hidden's, 4, got 3");
  EXPECT_EQ(message([](Args& a, Options&) { a.teacher_head.rows = 99; }), "teacher_head.rows: expected head's, 100, got 99");
  EXPECT_EQ(message([](Args& a, Options&) { a.teacher_head.cols = 11; }),
            "teacher_head.cols: expected teacher_hidden's, 12, got 11");
  EXPECT_EQ(message([](Args& a, Options&) { a.teacher_logits = a.hidden; }),
            "teacher_logits: expected none: linear_distillation does not take it, got a matrix");
  EXPECT_EQ(message([](Args&, Options& o) { o.logit.vocab_total = 200; }),
            "vocab_total: expected -1, and vocab_start 0: linear_distillation takes no shards of the vocabulary without "
            "pair_state, got 200 and 0");
  EXPECT_EQ(message([](Args& a, Options&) { a.dhead.data = const_cast<void*>(static_cast<const void*>(a.teacher_head.data)); }),
            "dhead.data: expected a buffer apart from teacher_head, got one that overlaps it");
}

}  // namespace
}  // namespace tileloss::test
