// Bits, compared: a row's outputs and gradient do not depend on how many rows there are, their order, the threads or the row
// block, in any schedule.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

constexpr tileloss_schedule kSchedules[] = {TILELOSS_SCHEDULE_AUTO, TILELOSS_SCHEDULE_STASH, TILELOSS_SCHEDULE_RECOMPUTE,
                                            TILELOSS_SCHEDULE_SWEEPS};

class Determinism : public testing::TestWithParam<oracle::NumberFormat> {
 protected:
  static LogitsCaseSpec spec(std::int64_t rows, std::int64_t vocab) {
    return {.rows = rows, .vocab = vocab, .format = GetParam(), .per_row_loss = true, .extra_outputs = true};
  }
  static tileloss_cross_entropy_options options() { return {.z_loss = 1e-3, .reduction = TILELOSS_REDUCTION_NONE}; }
  // What a call has written for one row.
  static std::vector<unsigned char> row_of(const tileloss_args& a, std::int64_t row) {
    std::vector<unsigned char> all;
    for (tileloss_vector v : {a.loss, a.logp, a.lse, a.entropy, a.argmax, a.correct, a.log_sum_sq_probs, a.mean_logit}) {
      v.data = static_cast<unsigned char*>(v.data) + row * impl::element_bytes(v.dtype);
      v.size = 1;
      const auto part = bytes_of(v);
      all.insert(all.end(), part.begin(), part.end());
    }
    tileloss_matrix m = a.dlogits;
    m.data = static_cast<unsigned char*>(m.data) +
             static_cast<std::size_t>(row * m.row_stride) * oracle::format_info(GetParam()).bytes;
    m.rows = 1;
    const auto part = bytes_of(m);
    all.insert(all.end(), part.begin(), part.end());
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, Determinism, testing::ValuesIn(kFormats), format_name);

// 2048 rows are generated with the logits of row i depending on i alone: the first 33 of them, and the first, are the same rows.
TEST_P(Determinism, ARowDoesNotDependOnHowManyThereAre) {
  constexpr std::int64_t kVocab = 1003;
  LogitsCase many(spec(2048, kVocab)), some(spec(33, kVocab)), one(spec(1, kVocab));
  for (const tileloss_schedule schedule : kSchedules) {
    for (LogitsCase* c : {&many, &some, &one}) {
      c->reset();
      ASSERT_TRUE(runs_value_and_grad(*c, options(), with_schedule(schedule)));
    }
    for (std::int64_t i = 0; i < 33; ++i) ASSERT_TRUE(same_bits(row_of(many.args(), i), row_of(some.args(), i))) << i;
    ASSERT_TRUE(same_bits(row_of(many.args(), 0), row_of(one.args(), 0)));
  }
}

TEST_P(Determinism, ARowDoesNotDependOnTheOthersOrOnItsPlace) {
  constexpr std::int64_t kRows = 200, kVocab = 4999;
  LogitsCase c(spec(kRows, kVocab));
  ASSERT_TRUE(runs_value_and_grad(c, options()));
  // Row i of the shuffled matrix is row (67 i + 5) mod 200; 67 and 200 have no common divisor.
  const std::size_t row_bytes = kVocab * oracle::format_info(GetParam()).bytes;
  std::vector<unsigned char> shuffled(kRows * row_bytes), gradient(kRows * row_bytes);
  std::vector<std::int64_t> labels;
  for (std::int64_t i = 0; i < kRows; ++i) {
    const std::int64_t from = (67 * i + 5) % kRows;
    std::memcpy(&shuffled[static_cast<std::size_t>(i) * row_bytes],
                static_cast<const unsigned char*>(c.args().logits.data) + static_cast<std::size_t>(from) * row_bytes, row_bytes);
    labels.push_back(c.labels()[static_cast<std::size_t>(from)]);
  }
  for (const tileloss_schedule schedule : kSchedules) {
    LogitsCase target(spec(kRows, kVocab));
    c.reset();
    ASSERT_TRUE(runs_value_and_grad(c, options(), with_schedule(schedule)));
    tileloss_args args = target.args();
    args.logits.data = shuffled.data();
    args.dlogits.data = gradient.data();
    args.labels.data = labels.data();
    const tileloss_cross_entropy_options o = options();
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, args, &o, with_schedule(schedule)));
    for (std::int64_t i = 0; i < kRows; ++i) ASSERT_TRUE(same_bits(row_of(args, i), row_of(c.args(), (67 * i + 5) % kRows))) << i;
  }
}

TEST_P(Determinism, ThreadsAndRowBlocksChangeNoBit) {
  LogitsCaseSpec with = spec(67, 2500);
  with.ignore_prob = 0.3;
  LogitsCase c(with);
  for (const tileloss_schedule schedule : kSchedules) {
    std::vector<unsigned char> expected;
    for (const int threads : {1, 2, 3, 5, 8, 16}) {
      for (const std::int64_t row_block : {0, 1, 3, 8, 64, 1000}) {
        tileloss_plan_options hints = with_schedule(schedule);
        hints.cpu.threads = threads;
        hints.cpu.row_block = row_block;
        c.reset();
        ASSERT_TRUE(runs_value_and_grad(c, options(), hints));
        const auto outputs = outputs_of(c.args());
        if (expected.empty()) expected = outputs;
        ASSERT_TRUE(same_bits(outputs, expected)) << threads << " threads, row_block " << row_block;
      }
    }
  }
}

// A scalar loss is summed in the order of the rows whatever the threads do.
TEST_P(Determinism, TheScalarLossHasTheSameBitsForAnyNumberOfThreads) {
  for (const tileloss_reduction reduction : {TILELOSS_REDUCTION_SUM, TILELOSS_REDUCTION_MEAN}) {
    LogitsCase c({.rows = 500, .vocab = 300, .format = GetParam(), .ignore_prob = 0.1, .token_weights = true});
    const tileloss_cross_entropy_options o{.reduction = reduction};
    std::vector<unsigned char> expected;
    for (int threads = 1; threads <= 16; ++threads) {
      tileloss_plan_options hints = plan_options();
      hints.cpu.threads = threads;
      c.reset();
      ASSERT_TRUE(runs_value_and_grad(c, o, hints));
      if (expected.empty()) expected = outputs_of(c.args());
      ASSERT_TRUE(same_bits(outputs_of(c.args()), expected)) << threads;
    }
  }
}

// Neither do a row's log-probabilities depend on which outputs are asked for besides: without entropies the kernels need not do a
// block again whose logits lie far above all before them. Rows that rise by little, much and too much from block to block, to
// the end or half-way, some of whose blocks hold a mask and have to be done the general way; lse is near 0, where it has most
// digits.
TEST_P(Determinism, LogProbabilitiesDoNotDependOnTheOtherOutputs) {
  constexpr double kSteps[] = {0.5, 3, 5, 9, 9, 17, 17, 30, 30, 60, -20, 5};
  constexpr std::int64_t kBlock = 128, kVocab = 7 * kBlock + 50;
  constexpr auto kLevels = static_cast<std::int64_t>(std::size(kSteps));
  constexpr std::int64_t kRows = 8 * kLevels;
  for (const double mask : {0.0, -1e30, -std::numeric_limits<double>::infinity()}) {
    if (GetParam() == oracle::NumberFormat::kFloat16 && mask == -1e30) continue;  // has no such number
    LogitsCase c(spec(kRows, kVocab), [&](std::int64_t i, std::int64_t j) {
      const auto block = static_cast<double>(std::min(j / kBlock - 3, i % 2 == 0 ? kVocab : std::int64_t{0}));
      const bool is_masked = mask != 0 && (j / kBlock + i) % 3 != 1 && j % 5 == 1;
      const double step = static_cast<double>((13 * i + (7 + i) * j) % (29 + i % 5)) / 8;
      return is_masked ? mask : kSteps[i % kLevels] * block + step - 8.5;
    });
    for (const double softcap : {0.0, 30.0, 200.0}) {
      tileloss_cross_entropy_options o = options();
      o.logit.softcap = softcap;
      tileloss_plan_options hints = plan_options();
      hints.cpu.vocab_block = kBlock;
      c.reset();
      ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &o, hints));
      ASSERT_TRUE(agrees(check_cross_entropy(c, o))) << mask << ", softcap " << softcap;
      const auto loss = bytes_of(c.args().loss), logp = bytes_of(c.args().logp), lse = bytes_of(c.args().lse);
      c.reset();
      c.args().entropy = c.args().log_sum_sq_probs = tileloss_vector{};
      ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &o, hints));
      ASSERT_TRUE(agrees(check_cross_entropy(c, o))) << mask << ", softcap " << softcap;
      EXPECT_TRUE(same_bits(bytes_of(c.args().loss), loss)) << mask << ", softcap " << softcap;
      EXPECT_TRUE(same_bits(bytes_of(c.args().logp), logp)) << mask << ", softcap " << softcap;
      EXPECT_TRUE(same_bits(bytes_of(c.args().lse), lse)) << mask << ", softcap " << softcap;
    }
  }
}

TEST_P(Determinism, TheAutomaticScheduleDoesNotDependOnTheLabels) {
  LogitsCase used({.rows = 8, .vocab = 500, .format = GetParam()}),
      ignored({.rows = 8, .vocab = 500, .format = GetParam(), .ignore_prob = 1});
  tileloss_plan a, b;
  const tileloss_cross_entropy_options o = cross_entropy_options();
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, used.args(), &o, plan_options(), nullptr, &a));
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, ignored.args(), &o, plan_options(), nullptr, &b));
  EXPECT_EQ(a.cpu.schedule, b.cpu.schedule);
  EXPECT_EQ(a.cpu.isa, b.cpu.isa);
  EXPECT_EQ(a.cpu.threads, b.cpu.threads);
  EXPECT_EQ(a.workspace_bytes, b.workspace_bytes);
  EXPECT_EQ(a.fingerprint, b.fingerprint);
}

TEST_P(Determinism, SmallNDoesNotSwitchTheInstructionSet) {
  tileloss_isa isa = TILELOSS_ISA_AUTO;
  for (const std::int64_t rows : {1, 2, 33, 2048}) {
    LogitsCase c({.rows = rows, .vocab = 20, .format = GetParam()});
    tileloss_plan plan;
    const tileloss_cross_entropy_options o = cross_entropy_options();
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &o, plan_options(), nullptr, &plan));
    if (isa == TILELOSS_ISA_AUTO) isa = plan.cpu.isa;
    EXPECT_EQ(plan.cpu.isa, isa);
  }
}

}  // namespace
}  // namespace tileloss::test
