// A vocabulary in column shards: each gives its row state, the states merge, outputs come from the merged state and each shard's
// gradient from it, as if one matrix had held all columns.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

constexpr std::int64_t kRows = 12, kVocab = 1000;

class Shards : public testing::TestWithParam<reference::NumberFormat> {
 protected:
  struct Shard {
    std::int64_t start, columns;
  };
  static std::vector<Shard> uneven() { return {{0, 300}, {300, 37}, {337, 663}}; }

  static LogitsCaseSpec spec() {
    return {.rows = kRows,
            .vocab = kVocab,
            .format = GetParam(),
            .ignore_prob = 0.2,
            .token_weights = true,
            .loss_grad = Upstream::kScalar,
            .extra_outputs = true};
  }

  static std::int64_t element_bytes() { return static_cast<std::int64_t>(reference::format_info(GetParam()).bytes); }
  // The shard's columns of a matrix.
  static tileloss_matrix columns_of(const tileloss_matrix& m, const Shard& s) {
    tileloss_matrix part = m;
    part.data = static_cast<unsigned char*>(m.data) + s.start * element_bytes();
    part.cols = s.columns;
    return part;
  }
  static tileloss_cross_entropy_options shard_options(tileloss_cross_entropy_options options, const Shard& s) {
    options.logit.vocab_start = s.start;
    options.logit.vocab_total = kVocab;
    return options;
  }
  // The caller sets it: the sum of the class weights of the shard's columns.
  static double weight_of(const LogitsCase& c, const Shard& s) {
    if (c.class_weights().empty()) return static_cast<double>(s.columns);
    const auto first = c.class_weights().begin() + s.start;
    return std::accumulate(first, first + s.columns, 0.0);
  }

  // Row states of the shards, merged in the order given; then the outputs and each shard's gradient.
  static void run_sharded(LogitsCase& c, const tileloss_cross_entropy_options& options, const std::vector<Shard>& shards) {
    const tileloss_args all = c.args();
    RowStateArrays merged(kRows);
    ASSERT_TRUE(succeeds(tileloss_row_state_set_identity(&merged.get())));
    for (const Shard& s : shards) {
      RowStateArrays part(kRows);
      tileloss_args args;
      tileloss_args_init(&args);
      args.logits = columns_of(all.logits, s);
      args.labels = all.labels;
      args.token_weights = all.token_weights;
      args.class_weights = all.class_weights;
      args.row_state = &part.get();
      const tileloss_cross_entropy_options own = shard_options(options, s);
      ASSERT_TRUE(runs("cross_entropy", TILELOSS_FORWARD, args, &own, plan_options()));
      part.get().smoothing_weight = weight_of(c, s);
      ASSERT_TRUE(succeeds(tileloss_row_state_merge(&merged.get(), &part.get())));
    }
    tileloss_args args = all;
    args.logits = args.dlogits = {};
    args.row_state = &merged.get();
    const tileloss_cross_entropy_options total = shard_options(options, {0, 0});
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_FROM_ROW_STATE, args, &total, plan_options()));
    for (const Shard& s : shards) {
      args = all;
      args.logits = columns_of(all.logits, s);
      args.dlogits = columns_of(all.dlogits, s);
      args.row_state = &merged.get();
      const tileloss_cross_entropy_options own = shard_options(options, s);
      ASSERT_TRUE(runs("cross_entropy", TILELOSS_BACKWARD, args, &own, plan_options()));
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, Shards, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(reference::format_info(param.param).name); });

TEST_P(Shards, ThreeOfThemGiveWhatTheWholeGives) {
  for (const int variant : {0, 1, 2, 3, 4}) {
    tileloss_cross_entropy_options options = cross_entropy_options();
    if (variant == 1) options.label_smoothing = 0.2;
    if (variant == 2) options.logit.softcap = 10;
    if (variant == 3) options.logit.temperature.value = 0.5;
    if (variant == 4) options.z_loss = 1e-2;
    for (const std::string distribution : {"normal", "wide", "confident", "spike_first"}) {
      LogitsCaseSpec with = spec();
      with.distribution = distribution;
      LogitsCase c(with);
      run_sharded(c, options, uneven());
      ASSERT_TRUE(agrees(check_cross_entropy(c, options))) << variant << " " << distribution;
    }
  }
}

TEST_P(Shards, OrderDoesNotMatter) {
  std::vector<Shard> shards = uneven();
  do {
    LogitsCase c(spec());
    run_sharded(c, cross_entropy_options(), shards);
    ASSERT_TRUE(agrees(check_cross_entropy(c, cross_entropy_options())));
  } while (std::next_permutation(shards.begin(), shards.end(), [](const Shard& a, const Shard& b) { return a.start < b.start; }));
}

TEST_P(Shards, EightOfThem) {
  std::vector<Shard> shards;
  for (std::int64_t start = 0; start < kVocab; start += 125) shards.push_back({start, 125});
  LogitsCase c(spec());
  tileloss_cross_entropy_options options = cross_entropy_options();
  options.label_smoothing = 0.1;
  run_sharded(c, options, shards);
  EXPECT_TRUE(agrees(check_cross_entropy(c, options)));
}

TEST_P(Shards, ClassWeightsAreIndexedByClassNotByColumn) {
  LogitsCaseSpec with = spec();
  with.class_weights = true;
  LogitsCase c(with);
  tileloss_cross_entropy_options options = cross_entropy_options();
  options.label_smoothing = 0.3;
  run_sharded(c, options, uneven());
  EXPECT_TRUE(agrees(check_cross_entropy(c, options)));
}

// One shard that is all -inf (a masked range), and one that is the whole vocabulary.
TEST_P(Shards, AShardOfMinusInfinityAndASingleShard) {
  LogitsCase c(spec(), LogitsCase::Open{});
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t j = 300; j < 337; ++j) {
      if (c.labels()[static_cast<std::size_t>(i)] != -100) c.set_logit(i, j, -std::numeric_limits<double>::infinity());
    }
  }
  c.seal();
  run_sharded(c, cross_entropy_options(), uneven());
  EXPECT_TRUE(agrees(check_cross_entropy(c, cross_entropy_options())));
  c.reset();
  run_sharded(c, cross_entropy_options(), {{0, kVocab}});
  EXPECT_TRUE(agrees(check_cross_entropy(c, cross_entropy_options())));
}

// 0 * -inf is in the smoothing sum, whole or in shards.
TEST_P(Shards, AClassWeightOf0AtMinusInfinityIsNanInAShardOfThatAlone) {
  LogitsCaseSpec with = spec();
  with.ignore_prob = 0;
  with.per_row_loss = true;
  LogitsCase c(with, LogitsCase::Open{});
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t j = 300; j < 337; ++j) c.set_logit(i, j, -std::numeric_limits<double>::infinity());
  }
  c.seal();
  std::vector<float> weights(kVocab, 1);
  weights[310] = 0;
  c.args().class_weights = tileloss_make_vector(weights.data(), TILELOSS_FLOAT32, kVocab);
  c.args().mean_logit = {};
  tileloss_cross_entropy_options options = cross_entropy_options();
  options.reduction = TILELOSS_REDUCTION_NONE;
  options.label_smoothing = 0.1;
  run_sharded(c, options, uneven());
  for (std::int64_t i = 0; i < kRows; ++i) EXPECT_TRUE(std::isnan(float_at(c.args().loss, i))) << i;
  c.args().dlogits = {};
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_FORWARD, c.args(), &options, plan_options()));
  for (std::int64_t i = 0; i < kRows; ++i) EXPECT_TRUE(std::isnan(float_at(c.args().loss, i))) << i;
}

// Logits far from 0, a shard's maximum far below the row's, or all -inf.
TEST_P(Shards, FarFromZeroAndFarApart) {
  if (GetParam() == reference::NumberFormat::kFloat16) return;  // ends at 65504
  for (const double first : {-2e9, -1e9, -std::numeric_limits<double>::infinity()}) {
    LogitsCase c(spec(), LogitsCase::Open{});
    for (std::int64_t i = 0; i < kRows; ++i) {
      for (std::int64_t j = 0; j < kVocab; ++j) {
        if (c.labels()[static_cast<std::size_t>(i)] != -100) c.set_logit(i, j, j < 300 ? first : -1e9);
      }
    }
    c.seal();
    tileloss_cross_entropy_options options = cross_entropy_options();
    options.reduction = TILELOSS_REDUCTION_SUM;
    run_sharded(c, options, uneven());
    EXPECT_TRUE(agrees(check_cross_entropy(c, options))) << first;
  }
}

TEST_P(Shards, ANanInOneShardMakesTheRowNanInAll) {
  LogitsCase c(spec(), LogitsCase::Open{});
  std::int64_t row = 0;
  while (c.labels()[static_cast<std::size_t>(row)] == -100) ++row;
  c.set_logit(row, 310, std::numeric_limits<double>::quiet_NaN());
  c.seal();
  run_sharded(c, cross_entropy_options(), uneven());
  EXPECT_TRUE(agrees(check_cross_entropy(c, cross_entropy_options())));
  for (std::int64_t j = 0; j < kVocab; ++j) ASSERT_TRUE(std::isnan(c.dlogit(row, j)));
}

TEST_P(Shards, EmptyStatesMergeToTheEmptyState) {
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
TEST_P(Shards, OnlyArraysThatBothHaveAreMerged) {
  RowStateArrays a(1), b(1);
  ASSERT_TRUE(succeeds(tileloss_row_state_set_identity(&a.get())));
  for (float* array : {b.get().max, b.get().sum, b.get().target}) *array = 2;
  b.get().argmax = nullptr;
  b.get().entropy_sum = nullptr;
  b.get().smoothing_weight = 4;
  *a.get().entropy_sum = 123;
  *a.get().argmax = 55;
  ASSERT_TRUE(succeeds(tileloss_row_state_merge(&a.get(), &b.get())));
  EXPECT_EQ(*a.get().max, 2);
  EXPECT_EQ(*a.get().sum, 2);
  EXPECT_EQ(*a.get().target, 2);
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
  const tileloss_args all = c.args();
  RowStateArrays merged(kRows);
  ASSERT_TRUE(succeeds(tileloss_row_state_set_identity(&merged.get())));
  const auto options_of = [](const Shard& s) {
    tileloss_logprobs_options o = logprobs_options();
    o.logit.vocab_start = s.start;
    o.logit.vocab_total = kVocab;
    return o;
  };
  for (const Shard& s : uneven()) {
    RowStateArrays part(kRows);
    tileloss_args args;
    tileloss_args_init(&args);
    args.logits = columns_of(all.logits, s);
    args.labels = all.labels;
    args.row_state = &part.get();
    const tileloss_logprobs_options own = options_of(s);
    ASSERT_TRUE(runs("logprobs", TILELOSS_FORWARD, args, &own, plan_options()));
    part.get().smoothing_weight = weight_of(c, s);
    ASSERT_TRUE(succeeds(tileloss_row_state_merge(&merged.get(), &part.get())));
  }
  tileloss_args args = all;
  args.logits = args.dlogits = {};
  args.logp_grad = args.lse_grad = args.entropy_grad = args.mean_logit_grad = {};
  args.row_state = &merged.get();
  const tileloss_logprobs_options total = options_of({0, 0});
  ASSERT_TRUE(runs("logprobs", TILELOSS_FROM_ROW_STATE, args, &total, plan_options()));
  for (const Shard& s : uneven()) {
    args = all;
    args.logits = columns_of(all.logits, s);
    args.dlogits = columns_of(all.dlogits, s);
    args.row_state = &merged.get();
    const tileloss_logprobs_options own = options_of(s);
    ASSERT_TRUE(runs("logprobs", TILELOSS_BACKWARD, args, &own, plan_options()));
  }
  EXPECT_TRUE(agrees(check_logprobs(c, logprobs_options())));
}

TEST_P(Shards, ALabelIsCheckedAgainstTheWholeVocabulary) {
  LogitsCase c(spec());
  for (const std::int64_t bad : {std::int64_t{-1}, kVocab}) {
    std::vector<std::int64_t> labels(kRows, 5);
    labels[2] = bad;
    RowStateArrays part(kRows);
    tileloss_args args;
    tileloss_args_init(&args);
    args.logits = columns_of(c.args().logits, {300, 37});
    args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, kRows);
    args.row_state = &part.get();
    const tileloss_cross_entropy_options own = shard_options(cross_entropy_options(), {300, 37});
    EXPECT_EQ(tileloss_cross_entropy(&args, &own, nullptr, nullptr), TILELOSS_LABEL_OUT_OF_RANGE);
  }
}

}  // namespace
}  // namespace tileloss::test
