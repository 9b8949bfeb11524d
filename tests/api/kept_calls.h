// For the tests of what schedule stash keeps of the LM head's logits: plans at a model's shape, and calls within a budget.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tests/api/calls.h"
#include "tests/shared/linear_case.h"

namespace tileloss::test {

inline constexpr tileloss_pass kBoth = TILELOSS_VALUE_AND_GRAD;

// Qwen2.5-1.5B's head; no data.
struct HeadShape {
  std::int64_t rows = 2048, vocab = 151936, hidden = 1536;
  tileloss_dtype dtype = TILELOSS_BFLOAT16, dhead_dtype = TILELOSS_BFLOAT16;
  MatrixLayout dhead_layout = MatrixLayout::kRows;  // with gaps: one that cannot hold logits
  bool dhead = true, accumulate = false;
  std::int32_t threads = 2;
  tileloss_isa isa = TILELOSS_ISA_AUTO;
};

inline std::string name_of(const LinearCaseSpec& s, const tileloss_plan_options& hints = plan_options()) {
  return "N " + std::to_string(s.row.rows) + " V " + std::to_string(s.row.vocab) + " H " + std::to_string(s.hidden) + " hidden " +
         format_info(s.format).name + " head " + format_info(s.head_format).name + " layout " +
         std::to_string(static_cast<int>(s.head_layout)) + " float32 dhead " + std::to_string(s.float32_dhead) + " accumulate " +
         std::to_string(s.accumulate) + " schedule " + std::to_string(hints.cpu.schedule) + " row_block " +
         std::to_string(hints.cpu.row_block);
}

inline testing::AssertionResult value_and_grad_agrees(LinearCase& c, const tileloss_cross_entropy_options& options,
                                                      const tileloss_plan_options& hints = plan_options()) {
  const auto given = c.with_linear(options);
  const auto ran = runs("linear_cross_entropy", kBoth, c.args(), &given, hints);
  return ran ? agrees(check_linear_cross_entropy(c, options)) : ran;
}
inline testing::AssertionResult value_and_grad_agrees(const LinearCaseSpec& spec, const tileloss_cross_entropy_options& options,
                                                      const tileloss_plan_options& hints) {
  LinearCase c(spec);
  return value_and_grad_agrees(c, options, hints) << name_of(spec, hints);
}

inline tileloss_plan plan_of(const HeadShape& shape, std::int64_t budget, tileloss_schedule schedule = TILELOSS_SCHEDULE_AUTO,
                             tileloss_cross_entropy_options options = cross_entropy_options()) {
  options.linear.accumulate = shape.accumulate ? 1 : 0;
  auto args = init<tileloss_args>();
  args.hidden = tileloss_make_matrix(nullptr, shape.dtype, shape.rows, shape.hidden, shape.hidden);
  args.head = tileloss_make_matrix(nullptr, shape.dtype, shape.vocab, shape.hidden, shape.hidden);
  args.dhidden = args.hidden;
  if (shape.dhead) {
    const std::int64_t stride = shape.hidden + (shape.dhead_layout == MatrixLayout::kGaps ? 1 : 0);
    args.dhead = tileloss_make_matrix(nullptr, shape.dhead_dtype, shape.vocab, shape.hidden, stride);
  }
  if (shape.dhead_layout == MatrixLayout::kTransposed) {
    args.dhead.row_stride = 1;
    args.dhead.col_stride = shape.vocab;
  }
  args.labels = tileloss_make_vector(nullptr, TILELOSS_INT64, shape.rows);
  args.loss = tileloss_make_vector(nullptr, TILELOSS_FLOAT32, 1);
  tileloss_plan_options hints = with_schedule(schedule);
  hints.workspace_bytes = budget;
  hints.cpu.threads = shape.threads;
  hints.cpu.isa = shape.isa;
  return plan_for("linear_cross_entropy", kBoth, args, &options, hints);
}

inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;

// 47 tiles, a last one of 57 columns; two chunks of the vocabulary, or more where the budget is small.
inline LinearCaseSpec kept_spec(oracle::NumberFormat format, std::uint64_t seed) {
  return {
      .row = {.rows = 45, .vocab = 3001, .flush = seed % 2 == 0 ? Flush::kRight : Flush::kLeft, .seed = seed, .ignore_prob = 0.2},
      .hidden = 24,
      .format = format,
      .head_format = format,
      .bias = true,
      .dbias = true,
      .float32_dhead = false};
}

struct KeptRun {
  tileloss_plan plan;
  std::vector<unsigned char> bytes;
};

// In a workspace of as many bytes as were planned, a page without access behind them.
inline KeptRun run_within(LinearCase& c, const tileloss_cross_entropy_options& options, const tileloss_plan_options& hints,
                          std::size_t plan_size = sizeof(tileloss_plan)) {
  KeptRun r;
  const auto given = c.with_linear(options);
  tileloss_plan_init(&r.plan);
  r.plan.struct_size = plan_size;
  const tileloss_status planned = tileloss_make_plan("linear_cross_entropy", kBoth, &c.args(), &given, &hints, nullptr, &r.plan);
  EXPECT_TRUE(succeeds(planned));
  if (planned != TILELOSS_OK) return r;
  const tools::GuardBuffer workspace(static_cast<std::size_t>(r.plan.workspace_bytes), tools::Flush::kRight);
  auto run = init<tileloss_run>();
  run.workspace = workspace.data();
  run.workspace_bytes = workspace.bytes();
  c.reset();
  EXPECT_TRUE(succeeds(tileloss_call("linear_cross_entropy", kBoth, &c.args(), &given, &r.plan, &run)));
  EXPECT_TRUE(workspace.canary_intact());
  r.bytes = outputs_of(c.args());
  return r;
}

// The planner cuts the work as for eight threads: with as many, a budget is used up.
inline constexpr std::int32_t kPlannedThreads = 8;

inline tileloss_plan_options stash_of_columns(std::int64_t budget = 0) {
  tileloss_plan_options hints = with_schedule(TILELOSS_SCHEDULE_STASH);
  hints.cpu.threads = kPlannedThreads;
  hints.cpu.vocab_block = 64;
  hints.workspace_bytes = budget;
  return hints;
}

// The workspace that keeps this share of the columns with chunks of 2048, of those rows that dhead does not hold.
inline std::int64_t budget_for(const tileloss_plan& keeping_all, double share) {
  std::int64_t logits = 0;
  for (std::int64_t i = 0; i < keeping_all.buffer_count; ++i) {
    if (std::string(keeping_all.buffers[i].name) == "logits kept") logits = keeping_all.buffers[i].bytes;
  }
  EXPECT_TRUE(logits > 0 || keeping_all.cpu.kept_rows > 0);
  return keeping_all.workspace_bytes - static_cast<std::int64_t>((1 - share) * static_cast<double>(logits));
}

}  // namespace tileloss::test
