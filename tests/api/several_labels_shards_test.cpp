// logprobs with several labels a row, over shards of the vocabulary: any of them may hold some of a row's labels.
// On cuda: SeveralLabelsOfShards.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
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
    EXPECT_TRUE(SlotsOracle(c, slots, make_transform(options.logit)).check()) << "softcap " << options.logit.softcap;
  }
}

// Sets of allowed columns: row 0 has none, row 3 none in the first shard, row 5 all. Of other rows' labels some are not among
// them.
struct Allowed {
  static constexpr std::int64_t kWords = (kShardVocab + 31) / 32, kCount = 9;
  static inline const std::vector<Shard> kShards = {{0, 320}, {320, 32}, {352, 648}};
  std::vector<std::uint32_t> words = std::vector<std::uint32_t>(kShardRows * kWords);

  Allowed() {
    for (std::size_t n = 0; n < words.size(); ++n) {
      const std::size_t i = n / kWords, w = n % kWords;
      words[n] = i == 0 || (i == 3 && w < 10) ? 0 : i == 5 ? ~0U : static_cast<std::uint32_t>(n * 2654435761U);
    }
  }
  bool has(std::int64_t i, std::int64_t j) const {
    return (words[static_cast<std::size_t>(i * kWords + j / 32)] >> j % 32 & 1) != 0;
  }
  tileloss_args with(tileloss_args args, const Shard& s = {0, kShardVocab}) const {
    args.allowed = tileloss_make_matrix(words.data() + s.start / 32, TILELOSS_INT32, kShardRows, (s.columns + 31) / 32, kWords);
    return args;
  }
  // `masks`: the other columns are of -inf.
  SlotsCase make(bool masks = false) const {
    return {{.rows = kShardRows, .vocab = kShardVocab, .lse_grad = Upstream::kPerRow, .loss = false, .row_outputs = false},
            kCount,
            [&](LogitsCase& logits, Slots& slots) {
              slots.leave_some_empty();
              for (std::int64_t n = 0; masks && n < kShardRows * kShardVocab; ++n) {
                const std::int64_t i = n / kShardVocab, j = n % kShardVocab;
                if (!has(i, j)) logits.set_logit(i, j, -kInfinity);
              }
            }};
  }
  void run_whole(SlotsCase& c, const tileloss_logprobs_options& options) const {
    for (const auto& [pass, args] :
         {std::pair{TILELOSS_FORWARD, c.slots.forward(c.c.args())}, {TILELOSS_BACKWARD, c.slots.backward(c.c.args())}})
      ASSERT_TRUE(runs("logprobs", pass, with(args), &options, plan_options()));
  }
};

void expect_near(const SlotsCase& got, const SlotsCase& wanted, const std::function<bool(std::int64_t, std::int64_t)>& has_dz) {
  const auto is_near = [](double a, double b) {
    return a == b || std::fabs(a - b) <= 1e-5 * std::max(1.0, std::fabs(b)) || (std::isnan(a) && std::isnan(b));
  };
  for (std::size_t n = 0; n < got.slots.logp.size(); ++n)
    EXPECT_TRUE(is_near(got.slots.logp[n], wanted.slots.logp[n]))
        << n << ": " << got.slots.logp[n] << " " << wanted.slots.logp[n];
  for (std::int64_t i = 0; i < kShardRows; ++i) {
    for (std::int64_t j = 0; j < kShardVocab; ++j) {
      const double g = got.c.dlogit(i, j), w = has_dz(i, j) ? wanted.c.dlogit(i, j) : 0;
      ASSERT_TRUE(is_near(g, w) && (g == 0) == (w == 0)) << i << "," << j << ": " << g << " " << w;
    }
  }
}

// As with -inf in place of the others, but that a label there has no gradient of its own.
TEST(SeveralLabelsOfShards, AmongAllowedColumnsOfTheWhole) {
  const Allowed allowed;
  for (const tileloss_logprobs_options& options : options_of_logprobs()) {
    if (options.logit.softcap > 0) continue;  // to which -inf is a logit like another
    SlotsCase some = allowed.make(), masked = allowed.make(true);
    allowed.run_whole(some, options);
    masked.forward(options);
    masked.backward(options);
    expect_near(some, masked, [&](std::int64_t i, std::int64_t j) { return i == 0 || allowed.has(i, j); });
  }
}

TEST(SeveralLabelsOfShards, AmongAllowedColumnsGiveWhatTheWholeGives) {
  const Allowed allowed;
  for (const tileloss_logprobs_options& options : options_of_logprobs()) {
    SlotsCase whole = allowed.make(), cut = allowed.make();
    allowed.run_whole(whole, options);
    const tileloss_args all = cut.slots.all_passes(cut.c.args());
    std::vector<float> counts(kShardRows), part_counts(kShardRows);
    RowStateArrays merged(kShardRows, Allowed::kCount);
    merged.get().allowed_count = counts.data();
    ASSERT_TRUE(succeeds(tileloss_row_state_set_identity(&merged.get())));
    const auto call = [&](tileloss_pass pass, tileloss_args args, const Shard& s, tileloss_row_state& state) {
      const tileloss_logprobs_options own = of_shard(options, s);
      args.row_state = &state;
      ASSERT_TRUE(runs("logprobs", pass, args, &own, plan_options()));
    };
    for (const Shard& s : Allowed::kShards) {
      RowStateArrays part(kShardRows, Allowed::kCount);
      part.get().allowed_count = part_counts.data();
      call(TILELOSS_FORWARD, columns_alone(allowed.with(without_outputs(all), s), s), s, part.get());
      ASSERT_TRUE(succeeds(tileloss_row_state_merge(&merged.get(), &part.get())));
    }
    tileloss_args args = cut.slots.forward(without_outputs(all));
    args.logits = {};
    call(TILELOSS_FROM_ROW_STATE, args, {}, merged.get());
    for (const Shard& s : Allowed::kShards) call(TILELOSS_BACKWARD, columns_alone(allowed.with(all, s), s), s, merged.get());
    expect_near(cut, whole, [](std::int64_t, std::int64_t) { return true; });
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
