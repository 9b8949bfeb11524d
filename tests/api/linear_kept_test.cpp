// What schedule stash keeps of the LM head's logits in its workspace: all columns, some of them, or all columns of some rows at a
// time. The plan keeps to its budget, the results to the oracle's bound, and a bit never depends on how much was kept.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "tests/api/kept_calls.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;

// ------------------------------------------------------------------------------------------------------------ the choice

TEST(LinearPlan, ABfloat16DheadKeepsAsManyColumnsAsTheBudgetAllows) {
  const HeadShape shape{.dhead_layout = MatrixLayout::kGaps};
  const double of_recompute = plan_of(shape, 64 * kMiB, TILELOSS_SCHEDULE_RECOMPUTE).predicted_ms;
  std::int64_t before = 0;
  for (const std::int64_t budget : {64 * kMiB, 128 * kMiB, std::int64_t{0}, 512 * kMiB, 768 * kMiB, 1536 * kMiB}) {
    const tileloss_plan plan = plan_of(shape, budget);
    const std::int64_t cap = budget > 0 ? budget : shape.rows * shape.vocab;  // by default half of the logits
    EXPECT_EQ(plan.cpu.schedule, TILELOSS_SCHEDULE_STASH) << budget;
    EXPECT_GE(plan.cpu.row_block, shape.rows);
    EXPECT_GT(plan.cpu.kept_columns, before) << budget;
    EXPECT_LE(plan.workspace_bytes, cap);
    const bool keeps_all = plan.cpu.kept_columns == shape.vocab;
    if (!keeps_all) {
      EXPECT_EQ(plan.cpu.kept_columns % plan.cpu.vocab_block, 0);
      EXPECT_GT(plan.workspace_bytes, cap - 2 * plan.cpu.vocab_block * shape.rows * 4);  // one more tile would not have fitted
    }
    const double kept = static_cast<double>(plan.cpu.kept_columns) / static_cast<double>(shape.vocab);
    EXPECT_NEAR(plan.predicted_ms / of_recompute, (4 - kept) / 4, 1e-9);
    before = keeps_all ? before : plan.cpu.kept_columns;
  }
}

// Whatever the machine: the plans of every instruction set that it has. In tile registers a product costs less than reading and
// writing dhead once more does, elsewhere more.
TEST(LinearPlan, AFloat32DheadTakesRowsWhereColumnsWouldBeSlower) {
  for (tileloss_isa isa = TILELOSS_ISA_BASELINE; isa <= TILELOSS_ISA_NEON_BF16; ++isa) {
    if (tileloss_isa_supported(isa) == 0) continue;
    HeadShape shape{.dhead_dtype = TILELOSS_FLOAT32, .dhead_layout = MatrixLayout::kGaps, .isa = isa};
    const tileloss_plan by_default = plan_of(shape, 0), tight = plan_of(shape, 64 * kMiB), roomy = plan_of(shape, 1536 * kMiB);
    shape.dhead_dtype = TILELOSS_BFLOAT16;
    const tileloss_plan columns = plan_of(shape, 0);
    EXPECT_GE(columns.cpu.row_block, shape.rows);
    EXPECT_EQ(by_default.cpu.schedule, TILELOSS_SCHEDULE_STASH);
    if (isa == TILELOSS_ISA_AVX512_AMX) {
      EXPECT_GE(by_default.cpu.row_block, shape.rows);
      EXPECT_EQ(by_default.cpu.kept_columns, columns.cpu.kept_columns);
      EXPECT_EQ(by_default.predicted_ms, columns.predicted_ms);
    } else {
      EXPECT_LT(by_default.cpu.row_block, shape.rows) << tileloss_isa_name(isa);
      EXPECT_EQ(by_default.cpu.kept_columns, shape.vocab);
      EXPECT_LT(by_default.predicted_ms, columns.predicted_ms);
    }
    // Chunks of a few rows read and write dhead more often than a product is worth.
    EXPECT_GE(tight.cpu.row_block, shape.rows);
    EXPECT_LT(tight.cpu.kept_columns, shape.vocab);
    EXPECT_EQ(roomy.cpu.kept_columns, shape.vocab);
    EXPECT_GE(roomy.cpu.row_block, shape.rows);
  }
}

TEST(LinearPlan, RecomputeAndSweepsKeepNothing) {
  EXPECT_EQ(plan_of({}, 1536 * kMiB, TILELOSS_SCHEDULE_RECOMPUTE).cpu.kept_columns, 0);
  EXPECT_EQ(plan_of({}, 1536 * kMiB, TILELOSS_SCHEDULE_RECOMPUTE).cpu.schedule, TILELOSS_SCHEDULE_RECOMPUTE);
}

// Rows at a time and chunks decide in which order gradients are added up: neither may follow from the threads.
TEST(LinearPlan, ThreadsDoNotChangeTheOrderOfSums) {
  for (const std::int64_t vocab : {32000, 50257, 128256, 151936}) {
    for (const std::int64_t rows : {1024, 2048, 8192}) {
      for (const std::int64_t hidden : {64, 128, 896, 1536}) {
        for (const tileloss_dtype dhead : {TILELOSS_FLOAT32, TILELOSS_BFLOAT16}) {
          for (const bool accumulate : {false, true}) {
            for (const std::int64_t budget : {std::int64_t{0}, 256 * kMiB, 400 * kMiB}) {
              HeadShape shape{.rows = rows, .vocab = vocab, .hidden = hidden, .dhead_dtype = dhead, .accumulate = accumulate};
              const tileloss_plan two = plan_of(shape, budget);
              for (const int threads : {1, 4, 8, 16, 64, 128}) {
                shape.threads = threads;
                const tileloss_plan plan = plan_of(shape, budget);
                EXPECT_EQ(plan.cpu.row_block, two.cpu.row_block) << threads << " threads, " << rows << " rows, budget " << budget;
                EXPECT_EQ(plan.cpu.chunk_columns, two.cpu.chunk_columns)
                    << threads << " threads, " << rows << " rows, budget " << budget;
                EXPECT_EQ(plan.cpu.schedule, two.cpu.schedule);
                EXPECT_TRUE(budget == 0 || plan.workspace_bytes <= budget);
                EXPECT_TRUE(budget > 0 || plan.cpu.threads == threads);
              }
            }
          }
        }
      }
    }
  }
}

// ----------------------------------------------------------------------------------------------------------- the results

class LinearKept : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, LinearKept, testing::ValuesIn(kFormats), format_name);

TEST_P(LinearKept, AnyNumberOfColumnsAgreesAndGivesTheSameBits) {
  const tileloss_cross_entropy_options options = cross_entropy_options();
  LinearCase c(kept_spec(GetParam(), 31));
  const KeptRun all = run_within(c, options, stash_of_columns());
  EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options)));
  EXPECT_EQ(all.plan.cpu.kept_columns, 3001);
  std::int64_t before = 3001;
  for (const double share : {0.99, 0.75, 0.5, 0.1, 0.03}) {
    const KeptRun some = run_within(c, options, stash_of_columns(budget_for(all.plan, share)));
    EXPECT_LT(some.plan.cpu.kept_columns, before) << share;
    EXPECT_GT(some.plan.cpu.kept_columns, 0) << share;
    EXPECT_EQ(some.plan.cpu.kept_columns % 64, 0) << share;
    EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options))) << share;
    EXPECT_TRUE(same_bits(some.bytes, all.bytes)) << share;
    before = some.plan.cpu.kept_columns;
  }
  EXPECT_LE(before, 128);
}

// The least workspace: chunks of one tile, one of them kept.
TEST_P(LinearKept, TheLeastThatAStashTakesIsSaidAndIsEnough) {
  const tileloss_cross_entropy_options options = cross_entropy_options();
  LinearCase c(kept_spec(GetParam(), 32));
  auto plan = init<tileloss_plan>();
  const tileloss_plan_options hints = stash_of_columns(64);
  ASSERT_EQ(tileloss_make_plan("linear_cross_entropy", kBoth, &c.args(), &options, &hints, nullptr, &plan),
            TILELOSS_WORKSPACE_TOO_SMALL);
  const std::string message = tileloss_last_error(), start = "workspace_bytes: expected at least ";
  ASSERT_EQ(message.rfind(start, 0), 0U) << message;
  const std::int64_t least = std::stoll(message.substr(start.size()));
  EXPECT_EQ(message, start + std::to_string(least) + " for schedule stash, got a budget of 64");
  const KeptRun r = run_within(c, options, stash_of_columns(least));
  EXPECT_EQ(r.plan.workspace_bytes, least);
  EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options)));
  const tileloss_plan_options less = stash_of_columns(least - 1);
  EXPECT_EQ(tileloss_make_plan("linear_cross_entropy", kBoth, &c.args(), &options, &less, nullptr, &plan),
            TILELOSS_WORKSPACE_TOO_SMALL);
}

// Each thread's scratch leaves less room for logits; what is kept changes, the results do not.
TEST_P(LinearKept, ThreadsChangeWhatIsKeptButNoBit) {
  const tileloss_cross_entropy_options options = cross_entropy_options();
  LinearCaseSpec with = kept_spec(GetParam(), 33);
  with.row.rows = 120;
  with.row.vocab = 12001;
  with.head_layout = MatrixLayout::kGaps;  // a dhead that is not added to in place: no rows at a time
  LinearCase c(with);
  tileloss_plan_options hints = stash_of_columns();
  hints.workspace_bytes = budget_for(run_within(c, options, hints).plan, 0.1);
  const KeptRun planned = run_within(c, options, hints);
  std::int64_t before = planned.plan.cpu.kept_columns;
  EXPECT_EQ(planned.plan.cpu.threads, kPlannedThreads);
  for (const int threads : {4, 2, 1}) {
    hints.cpu.threads = threads;
    const KeptRun fewer = run_within(c, options, hints);
    EXPECT_EQ(fewer.plan.cpu.threads, threads);
    EXPECT_GE(fewer.plan.cpu.kept_columns, before);
    EXPECT_TRUE(same_bits(fewer.bytes, planned.bytes)) << threads;
    before = fewer.plan.cpu.kept_columns;
  }
  EXPECT_GT(before, planned.plan.cpu.kept_columns);
  hints.cpu.threads = 200;  // as many as the budget holds the scratch of
  const KeptRun more = run_within(c, options, hints);
  EXPECT_GE(more.plan.cpu.threads, kPlannedThreads);
  EXPECT_LT(more.plan.cpu.threads, 200);
  EXPECT_TRUE(same_bits(more.bytes, planned.bytes));
}

// Rows at a time, or all of them: every gradient within the bound, logp to the bit.
TEST_P(LinearKept, RowsAtATimeAgree) {
  const tileloss_cross_entropy_options options = cross_entropy_options();
  for (const bool float32_dhead : {true, false}) {
    LinearCaseSpec with = kept_spec(GetParam(), 34);
    with.float32_dhead = float32_dhead;
    LinearCase c(with);
    tileloss_plan_options hints = stash_of_columns();
    hints.cpu.row_block = 16;
    const KeptRun r = run_within(c, options, hints);
    EXPECT_LE(r.plan.cpu.row_block, 32);  // whole panels
    EXPECT_EQ(r.plan.cpu.kept_columns, 3001);
    EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options)));
  }
}

// A caller built against a header without kept_columns: the plan says all that the call has to know without it.
TEST_P(LinearKept, AShorterPlanKeepsTheSame) {
  const tileloss_cross_entropy_options options = cross_entropy_options();
  LinearCase c(kept_spec(GetParam(), 35));
  const tileloss_plan_options hints = stash_of_columns(budget_for(run_within(c, options, stash_of_columns()).plan, 0.4));
  const KeptRun whole = run_within(c, options, hints);
  for (const std::size_t size : {offsetof(tileloss_plan, cpu.isa_note), offsetof(tileloss_plan, cpu.kept_columns)}) {
    const KeptRun shorter = run_within(c, options, hints, size);
    EXPECT_EQ(shorter.plan.workspace_bytes, whole.plan.workspace_bytes);
    EXPECT_EQ(shorter.plan.cpu.kept_columns, size > offsetof(tileloss_plan, cpu.kept_columns) ? whole.plan.cpu.kept_columns : 0);
    EXPECT_TRUE(same_bits(shorter.bytes, whole.bytes));
  }
}

}  // namespace
}  // namespace tileloss::test
