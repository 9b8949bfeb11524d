// linear_distillation, two LM heads: where logits wait, the bits of any plan, equal heads, and what is refused. Against the
// oracle in every combination of options: linear_property_test.cpp.
// On cuda: LinearDistillationRows.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "tests/api/calls.h"
#include "tests/shared/linear_pair_case.h"

namespace tileloss::test {
namespace {

constexpr const char* kFunction = "linear_distillation";
constexpr tileloss_pass kBoth = TILELOSS_VALUE_AND_GRAD;

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
      ASSERT_TRUE(runs(kFunction, kBoth, c.args(), &options, plan_options(), nullptr, &plan));
      EXPECT_EQ(plan.cpu.kept_rows, w.rows);
      EXPECT_TRUE(agrees(c.check(options))) << static_cast<int>(w.layout) << w.float32_dhead << kind;
    }
  }
}

TEST(LinearDistillationBits, AreTheSameForAnyThreadsAndWorkspace) {
  for (const std::int64_t row_block : {0, 64}) {
    const auto bytes = [&](std::int32_t threads, bool is_tight) {
      LinearPair c(waiting_spec(MatrixLayout::kRows, false));
      const auto options = c.student().with_linear(distillation_options(TILELOSS_JSD));
      tileloss_plan_options hints = plan_options();
      hints.cpu.threads = threads;
      hints.cpu.row_block = row_block;
      hints.cpu.chunk_columns = 512;
      if (is_tight) {  // as little as the message says
        hints.workspace_bytes = 1;
        auto plan = init<tileloss_plan>();
        EXPECT_EQ(tileloss_make_plan(kFunction, kBoth, &c.args(), &options, &hints, nullptr, &plan),
                  TILELOSS_WORKSPACE_TOO_SMALL);
        hints.workspace_bytes =
            std::stoll(std::string(tileloss_last_error()).substr(std::strlen("workspace_bytes: expected at least ")));
      }
      EXPECT_TRUE(runs(kFunction, kBoth, c.args(), &options, hints));
      return outputs_of(c.args());
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
  ASSERT_TRUE(runs(kFunction, kBoth, both.args(), &options, plan_options()));
  spec.student.dhidden = spec.student.dhead = false;
  LinearPair forward(spec);
  ASSERT_TRUE(runs(kFunction, TILELOSS_FORWARD, forward.args(), &options, plan_options()));
  EXPECT_EQ(float_at(forward.args().loss, 0), float_at(both.args().loss, 0));
  EXPECT_TRUE(agrees(forward.check(options)));
}

// The same tensors on either side: exactly 0, gradient and all.
TEST(LinearDistillationRows, OfEqualHeadsAreZero) {
  for (int kind = 0; kind < kDivergences; ++kind) {
    LinearPairSpec spec = waiting_spec(MatrixLayout::kRows, false);
    spec.teacher_is_student = true;
    LinearPair c(spec);
    const auto options = c.student().with_linear(distillation_options(kind));
    ASSERT_TRUE(runs(kFunction, kBoth, c.args(), &options, plan_options()));
    EXPECT_EQ(float_at(c.args().loss, 0), 0) << kind;
    for (const unsigned char byte : c.student().gradient_bytes()) ASSERT_EQ(byte & 0x7f, 0) << kind;  // -0 too
  }
}

TEST(LinearDistillationArguments, ThatCannotBeAreNamed) {
  using Args = tileloss_args;
  using Options = tileloss_distillation_options;
  const struct {
    const char* message;
    std::function<void(Args&, Options&)> change;
  } cases[] = {{"teacher_hidden: expected a float32, bfloat16 or float16 matrix [N,G], got none",
                [](Args& a, Options&) { a.teacher_hidden = {}; }},
               {"teacher_head: expected a float32, bfloat16 or float16 matrix [V,G], got none",
                [](Args& a, Options&) { a.teacher_head = {}; }},
               {"teacher_hidden.rows: expected hidden's, 4, got 3", [](Args& a, Options&) { a.teacher_hidden.rows = 3; }},
               {"teacher_head.rows: expected head's, 100, got 99", [](Args& a, Options&) { a.teacher_head.rows = 99; }},
               {"teacher_head.cols: expected teacher_hidden's, 12, got 11", [](Args& a, Options&) { a.teacher_head.cols = 11; }},
               {"teacher_logits: expected none: linear_distillation does not take it, got a matrix",
                [](Args& a, Options&) { a.teacher_logits = a.hidden; }},
               {"vocab_total: expected -1, and vocab_start 0: linear_distillation takes no shards of the vocabulary without "
                "pair_state, got 200 "
                "and 0",
                [](Args&, Options& o) { o.logit.vocab_total = 200; }},
               {"dhead.data: expected a buffer apart from teacher_head, got one that overlaps it",
                [](Args& a, Options&) { a.dhead.data = a.teacher_head.data; }}};
  for (const auto& [message, change] : cases) {
    LinearPair c({.student = {.row = {.rows = 4, .vocab = 100}, .hidden = 8}, .teacher_hidden = 12});
    tileloss_distillation_options options;
    change(c.args(), options);
    EXPECT_EQ(answer(kFunction, c.args(), &options), message);
  }
}

}  // namespace
}  // namespace tileloss::test
