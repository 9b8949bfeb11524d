// A vocabulary in column shards: each gives its row state, the states merge, outputs come from the merged state and each shard's
// gradient from it, as if one matrix had held all columns.
// On toy: Shards.
#include "tests/api/shards.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace tileloss::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::int64_t kRows = kShardRows, kVocab = kShardVocab;

class Shards : public testing::TestWithParam<oracle::NumberFormat> {
 protected:
  static LogitsCaseSpec spec() {
    return {.rows = kRows,
            .vocab = kVocab,
            .format = GetParam(),
            .ignore_prob = 0.2,
            .token_weights = true,
            .loss_grad = Upstream::kScalar,
            .extra_outputs = true};
  }
  static testing::AssertionResult agree(LogitsCase& c, const tileloss_cross_entropy_options& options = {},
                                        const std::vector<Shard>& shards = kUneven) {
    c.reset();
    run_sharded("cross_entropy", c.args(), options, shards, [&](const Shard& s) {
      if (c.class_weights().empty()) return weight_of_columns(s);
      const auto first = c.class_weights().begin() + s.start;
      return std::accumulate(first, first + s.columns, 0.0);
    });
    return agrees(check_cross_entropy(c, options));
  }
  // Columns [begin, end) of every row in use.
  static void fill(LogitsCase& c, std::int64_t begin, std::int64_t end, double value) {
    for (std::int64_t i = 0; i < kRows; ++i) {
      if (c.labels()[static_cast<std::size_t>(i)] == -100) continue;
      for (std::int64_t j = begin; j < end; ++j) c.set_logit(i, j, value);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, Shards, testing::ValuesIn(kFormats), format_name);

TEST_P(Shards, ThreeOfThemGiveWhatTheWholeGives) {
  std::vector<tileloss_cross_entropy_options> variants(5);
  variants[1].label_smoothing = 0.2;
  variants[2].logit.softcap = 10;
  variants[3].logit.temperature.value = 0.5;
  variants[4].z_loss = 1e-2;
  for (std::size_t variant = 0; variant < variants.size(); ++variant) {
    for (const std::string distribution : {"normal", "wide", "confident", "spike_first"}) {
      LogitsCaseSpec with = spec();
      with.distribution = distribution;
      LogitsCase c(with);
      ASSERT_TRUE(agree(c, variants[variant])) << variant << " " << distribution;
    }
  }
}

TEST_P(Shards, OrderDoesNotMatter) {
  std::vector<Shard> shards = kUneven;
  do {
    LogitsCase c(spec());
    ASSERT_TRUE(agree(c, {}, shards));
  } while (std::next_permutation(shards.begin(), shards.end(), [](const Shard& a, const Shard& b) { return a.start < b.start; }));
}

TEST_P(Shards, EightOfThem) {
  std::vector<Shard> shards;
  for (std::int64_t start = 0; start < kVocab; start += 125) shards.push_back({start, 125});
  LogitsCase c(spec());
  EXPECT_TRUE(agree(c, {.label_smoothing = 0.1}, shards));
}

TEST_P(Shards, ClassWeightsAreIndexedByClassNotByColumn) {
  LogitsCaseSpec with = spec();
  with.class_weights = true;
  LogitsCase c(with);
  EXPECT_TRUE(agree(c, {.label_smoothing = 0.3}));
}

// One shard that is all -inf (a masked range), and one that is the whole vocabulary.
TEST_P(Shards, AShardOfMinusInfinityAndASingleShard) {
  LogitsCase c(spec(), LogitsCase::Open{});
  fill(c, 300, 337, -kInf);
  c.seal();
  EXPECT_TRUE(agree(c));
  EXPECT_TRUE(agree(c, {}, {{0, kVocab}}));
}

// 0 * -inf is in the smoothing sum, whole or in shards.
TEST_P(Shards, AClassWeightOf0AtMinusInfinityIsNanInAShardOfThatAlone) {
  LogitsCaseSpec with = spec();
  with.ignore_prob = 0;
  with.per_row_loss = true;
  LogitsCase c(with, LogitsCase::Open{});
  fill(c, 300, 337, -kInf);
  c.seal();
  std::vector<float> weights(kVocab, 1);
  weights[310] = 0;
  c.args().class_weights = view(weights);
  c.args().mean_logit = {};
  const tileloss_cross_entropy_options options{.label_smoothing = 0.1, .reduction = TILELOSS_REDUCTION_NONE};
  run_sharded("cross_entropy", c.args(), options, kUneven);
  for (std::int64_t i = 0; i < kRows; ++i) EXPECT_TRUE(std::isnan(float_at(c.args().loss, i))) << i;
  c.args().dlogits = {};
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_FORWARD, c.args(), &options, plan_options()));
  for (std::int64_t i = 0; i < kRows; ++i) EXPECT_TRUE(std::isnan(float_at(c.args().loss, i))) << i;
}

// Logits far from 0, a shard's maximum far below the row's, or all -inf.
TEST_P(Shards, FarFromZeroAndFarApart) {
  if (GetParam() == oracle::NumberFormat::kFloat16) return;  // ends at 65504
  for (const double first : {-2e9, -1e9, -kInf}) {
    LogitsCase c(spec(), LogitsCase::Open{});
    fill(c, 0, 300, first);
    fill(c, 300, kVocab, -1e9);
    c.seal();
    EXPECT_TRUE(agree(c, {.reduction = TILELOSS_REDUCTION_SUM})) << first;
  }
}

TEST_P(Shards, ANanInOneShardMakesTheRowNanInAll) {
  LogitsCase c(spec(), LogitsCase::Open{});
  std::int64_t row = 0;
  while (c.labels()[static_cast<std::size_t>(row)] == -100) ++row;
  c.set_logit(row, 310, std::numeric_limits<double>::quiet_NaN());
  c.seal();
  EXPECT_TRUE(agree(c));
  for (std::int64_t j = 0; j < kVocab; ++j) ASSERT_TRUE(std::isnan(c.dlogit(row, j)));
}

TEST(ShardStates, EmptyOnesMergeToTheEmptyState) {
  RowStateArrays a(3), b(3);
  ASSERT_TRUE(succeeds(tileloss_row_state_set_identity(&a.get())));
  ASSERT_TRUE(succeeds(tileloss_row_state_set_identity(&b.get())));
  const auto before = a.floats();
  ASSERT_TRUE(succeeds(tileloss_row_state_merge(&a.get(), &b.get())));
  EXPECT_EQ(a.floats(), before);
  EXPECT_EQ(a.argmax(), std::vector<std::int64_t>(3, -1));
  EXPECT_EQ(a.get().smoothing_weight, 0);
}

// Arrays that one side does not have are left alone.
TEST(ShardStates, OnlyArraysThatBothHaveAreMerged) {
  RowStateArrays a(1), b(1);
  ASSERT_TRUE(succeeds(tileloss_row_state_set_identity(&a.get())));
  for (float* array : {b.get().max, b.get().sum, b.get().label_logit}) *array = 2;
  b.get().argmax = nullptr;
  b.get().entropy_sum = nullptr;
  b.get().smoothing_weight = 4;
  *a.get().entropy_sum = 123;
  *a.get().argmax = 55;
  ASSERT_TRUE(succeeds(tileloss_row_state_merge(&a.get(), &b.get())));
  for (const float* array : {a.get().max, a.get().sum, a.get().label_logit}) EXPECT_EQ(*array, 2);
  EXPECT_EQ(*a.get().entropy_sum, 123);
  EXPECT_EQ(*a.get().argmax, 55);
  EXPECT_EQ(a.get().smoothing_weight, 4);
}

TEST_P(Shards, LogprobsToo) {
  LogitsCase c({.rows = kRows,
                .vocab = kVocab,
                .format = GetParam(),
                .ignore_prob = 0.2,
                .logp_grad = Upstream::kPerRow,
                .lse_grad = Upstream::kPerRow,
                .entropy_grad = Upstream::kPerRow,
                .mean_logit_grad = Upstream::kPerRow,
                .loss = false,
                .extra_outputs = true});
  run_sharded("logprobs", c.args(), logprobs_options(), kUneven);
  EXPECT_TRUE(agrees(check_logprobs(c, {})));
}

TEST_P(Shards, ALabelIsCheckedAgainstTheWholeVocabulary) {
  LogitsCase c(spec());
  for (const std::int64_t bad : {std::int64_t{-1}, kVocab}) {
    std::vector<std::int64_t> labels(kRows, 5);
    labels[2] = bad;
    RowStateArrays part(kRows);
    auto args = init<tileloss_args>();
    args.logits = columns_of(c.args().logits, kUneven[1]);
    args.labels = view(labels);
    args.row_state = &part.get();
    const tileloss_cross_entropy_options own = of_shard(cross_entropy_options(), kUneven[1]);
    EXPECT_EQ(tileloss_cross_entropy(&args, &own, nullptr, nullptr), TILELOSS_LABEL_OUT_OF_RANGE);
  }
}

}  // namespace
}  // namespace tileloss::test
