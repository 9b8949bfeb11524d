// logprobs with several labels a row, over shards of the vocabulary: any of them may hold some of a row's labels.
// On cuda: SeveralLabelsOfShards.
#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "tests/api/shards.h"
#include "tests/api/slots_case.h"

namespace tileloss::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class SeveralLabelsOfShards : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SeveralLabelsOfShards, testing::ValuesIn(kFormats), format_name);

// Labels' logits of -inf, one that is the row's largest, equal ones on two shards, rows whose labels are all on one shard.
TEST_P(SeveralLabelsOfShards, TheyAreAsTheOracleHasThem) {
  const std::vector<std::vector<Shard>> cuts = {kUneven, {kUneven[2], kUneven[0], kUneven[1]}, {{0, kShardVocab}}};
  for (std::size_t cut = 0; cut < cuts.size(); ++cut) {
    for (const std::int64_t count : {2, 5, 64}) {
      for (const tileloss_logprobs_options& options : options_of_logprobs()) {
        SCOPED_TRACE(testing::Message() << "cut " << cut << ", " << count << " labels, softcap " << options.logit.softcap);
        LogitsCaseSpec spec = {.rows = 11,
                               .vocab = kShardVocab,
                               .stride_extra = 5,
                               .format = GetParam(),
                               .distribution = count == 5 ? "confident" : "wide",
                               .lse_grad = Upstream::kPerRow,
                               .entropy_grad = Upstream::kPerRow,
                               .loss = false,
                               .row_outputs = false};
        SlotsCase c(spec, count, [](LogitsCase& logits, Slots& slots) {
          slots.leave_some_empty();
          for (std::int64_t k = 0; k < slots.count; ++k) {
            slots.at(4, k) = kIgnored;
            slots.at(5, k) = 300 + k % 37;
            slots.at(8, k) = k % 2 == 0 ? 3 : 999;
          }
          for (const auto& [row, z] : {std::pair<std::int64_t, double>{6, -kInfinity}, {7, 60}, {8, 5}, {9, -kInfinity}}) {
            for (std::int64_t k = row == 9 ? slots.count / 2 : 0; k < slots.count; ++k)
              logits.set_logit(row, slots.at(row, k), z);
          }
        });
        run_sharded("logprobs", c.slots.all_passes(c.c.args()), options, cuts[cut]);
        EXPECT_TRUE(c.check(options));
      }
    }
  }
}

TEST_P(SeveralLabelsOfShards, OfAHeadTheyAreAsTheOracleHasThem) {
  for (const tileloss_logprobs_options& options : options_of_logprobs()) {
    LinearCase c({.row = {.rows = kShardRows,
                          .vocab = kShardVocab,
                          .ignore_prob = 0.1,
                          .lse_grad = Upstream::kPerRow,
                          .entropy_grad = Upstream::kPerRow,
                          .loss = false,
                          .row_outputs = false},
                  .hidden = 40,
                  .format = GetParam(),
                  .head_format = GetParam(),
                  .float32_dhidden = true});
    Slots slots(c.row().labels(), kShardVocab, 7);
    slots.leave_some_empty();
    const auto given = c.with_linear(options);
    const tileloss_args all = slots.all_passes(c.args());
    RowStateArrays merged(kShardRows, slots.count);
    merge_states("linear_logprobs", all, given, kUneven, merged, kShardVocab, weight_of_columns, rows_of_head);
    tileloss_args args = slots.forward(without_outputs(all));
    args.hidden = args.head = {};
    args.row_state = &merged.get();
    auto own = of_shard(given, {});
    ASSERT_TRUE(runs("linear_logprobs", TILELOSS_FROM_ROW_STATE, args, &own, plan_options()));
    const tileloss_matrix dhidden = all.dhidden;
    std::vector<float> share(kShardRows * 40), sum(share.size());
    for (const Shard& s : kUneven) {
      args = rows_of_head(all, s);
      args.row_state = &merged.get();
      args.dhidden = view(share, kShardRows, 40);
      own = of_shard(given, s);
      ASSERT_TRUE(runs("linear_logprobs", TILELOSS_BACKWARD, args, &own, plan_options()));
      for (std::size_t n = 0; n < sum.size(); ++n) sum[n] += share[n];
    }
    for (std::int64_t n = 0; n < kShardRows * 40; ++n)
      static_cast<float*>(dhidden.data)[n / 40 * dhidden.row_stride + n % 40] = sum[static_cast<std::size_t>(n)];
    EXPECT_TRUE(check_slots(c, slots, options)) << "softcap " << options.logit.softcap;
  }
}

// Row 0 has no allowed column, row 3 none in the first shard, row 5 all. Of other rows' labels some are not among them.
TEST(SeveralLabelsOfShards, AmongAllowedColumnsAreAsTheOracleHasThem) {
  constexpr std::size_t kWords = (kShardVocab + 31) / 32;
  std::vector<std::int32_t> words(kShardRows * kWords);
  for (std::size_t n = 0; n < words.size(); ++n) {
    const std::size_t i = n / kWords, w = n % kWords;
    words[n] = i == 0 || (i == 3 && w < 10) ? 0 : i == 5 ? -1 : static_cast<std::int32_t>(n * 2654435761U);
  }
  for (const tileloss_logprobs_options& options : options_of_logprobs()) {
    SlotsCase c({.rows = kShardRows, .vocab = kShardVocab, .lse_grad = Upstream::kPerRow, .loss = false, .row_outputs = false},
                9);
    c.slots.leave_some_empty();
    c.c.set_allowed(words);
    run_sharded("logprobs", c.slots.all_passes(c.c.args()), options, {{0, 320}, {320, 32}, {352, 648}});
    EXPECT_TRUE(c.check(options)) << "softcap " << options.logit.softcap;
  }
}

TEST(SeveralLabelsOfShards, ThreadsChangeNoBit) {
  std::vector<std::vector<unsigned char>> bits;
  for (const std::int32_t threads : {1, 2, 5}) {
    SlotsCase c({.rows = 40, .vocab = kShardVocab, .format = NumberFormat::kBfloat16, .loss = false, .row_outputs = false}, 6);
    tileloss_plan_options hints = plan_options();
    hints.cpu.threads = threads;
    run_sharded("logprobs", c.slots.all_passes(c.c.args()), logprobs_options(), kUneven, weight_of_columns, hints);
    bits.push_back(outputs_of(c.slots.all_passes(c.c.args())));
  }
  EXPECT_TRUE(same_bits(bits[1], bits[0]));
  EXPECT_TRUE(same_bits(bits[2], bits[0]));
}

TEST(SeveralLabelsRefused, OfAShardAsTheStateHasThem) {
  LogitsCase c({.rows = 2, .vocab = 10, .loss = false, .row_outputs = false, .dlogits = false});
  const std::int64_t labels[] = {1, 2, 3, 19};
  RowStateArrays state(2, 2), one(2);
  tileloss_args& args = c.args();
  args.labels = tileloss_make_vector(labels, TILELOSS_INT64, 4);
  args.labels_per_row = 2;
  args.row_state = &one.get();
  const tileloss_logprobs_options options = of_shard(logprobs_options(), {10, 10}, 20);
  const auto is_refused = [&](const std::string& message) {
    return refused(tileloss_logprobs(&args, &options, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT, message);
  };
  EXPECT_TRUE(is_refused("row_state.label_logits: expected an array, for several labels a row of a shard, got null"));
  args.row_state = &state.get();
  EXPECT_TRUE(succeeds(tileloss_logprobs(&args, &options, nullptr, nullptr)));
  state.get().labels_per_row = 3;
  EXPECT_TRUE(is_refused("row_state.labels_per_row: expected 2, got 3"));
  state.get().labels_per_row = 2;
  args.labels = tileloss_make_vector(labels, TILELOSS_INT64, 2);
  args.labels_per_row = 1;
  EXPECT_TRUE(is_refused("row_state.label_logits: expected null with one label a row, got an array"));

  const auto is_not_merged = [&](const tileloss_row_state& from, const std::string& message) {
    return refused(tileloss_row_state_merge(&state.get(), &from), TILELOSS_INVALID_ARGUMENT, message);
  };
  EXPECT_TRUE(is_not_merged(one.get(), "from.label_logits: expected an array, as into has one, got none"));
  RowStateArrays three(2, 3);
  EXPECT_TRUE(is_not_merged(three.get(), "from.labels_per_row: expected 2, got 3"));
  three.get().labels_per_row = 1025;
  EXPECT_TRUE(is_not_merged(three.get(), "from.labels_per_row: expected 2 to 1024 with label_logits, got 1025"));
}

TEST(SeveralLabelsRefused, WhereTheirLogitsOverlapAnother) {
  LogitsCase c({.rows = 2, .vocab = 10, .loss = false, .row_outputs = false, .dlogits = false});
  const std::int64_t labels[] = {1, 2, 3, 4};
  std::vector<float> numbers(5);
  RowStateArrays state(2, 2);
  state.get().label_logits = numbers.data();
  state.get().sum = numbers.data() + 3;
  c.args().labels = tileloss_make_vector(labels, TILELOSS_INT64, 4);
  c.args().labels_per_row = 2;
  c.args().row_state = &state.get();
  EXPECT_TRUE(refused(tileloss_logprobs(&c.args(), nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "row_state.label_logits: expected a buffer apart from row_state.sum, got one that overlaps it"));
}

}  // namespace
}  // namespace tileloss::test
