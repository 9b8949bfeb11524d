// value_and_grad of shards of a vocabulary, whose states are merged between forward and gradient (tileloss_run.merge). The
// shards' calls lie inside one another, as a rank's do that has several.
// On toy and cuda: MergedShards.
#include <gtest/gtest.h>

#include <deque>
#include <functional>

#include "tests/api/shards.h"
#include "tests/shared/linear_case.h"

namespace tileloss::test {
namespace {

constexpr std::int64_t kRows = kShardRows, kVocab = kShardVocab;

// The calls of all shards, each from the merge of the one before it, and the merge of all their states in the last one's.
class Calls {
 public:
  using ArgsOf = std::function<tileloss_args(const Shard&)>;

  Calls(const char* function, const tileloss_cross_entropy_options& options, std::vector<Shard> shards, ArgsOf args_of)
      : function_(function), options_(options), shards_(std::move(shards)), args_of_(std::move(args_of)) {
    for (std::size_t i = 0; i < shards_.size(); ++i) states_.emplace_back(kRows);
  }

  tileloss_status run(std::size_t number = 0) {
    if (number == shards_.size()) return merge_all();
    tileloss_args args = args_of_(shards_[number]);
    args.row_state = &states_[number].get();
    const tileloss_cross_entropy_options options = of_shard(options_, shards_[number]);
    Next next = {this, number + 1};
    auto run = init<tileloss_run>();
    run.merge = [](void* context) -> tileloss_status {
      auto& n = *static_cast<Next*>(context);
      return n.calls->followed_by(n.number);
    };
    run.merge_context = &next;
    return tileloss_call(function_, TILELOSS_VALUE_AND_GRAD, &args, &options, nullptr, &run);
  }
  void fail_with(tileloss_status status) { failure_ = status; }
  // After a shard's call, so that the next one may write where this one wrote.
  std::function<void()> after_call = [] {};

 private:
  struct Next {
    Calls* calls;
    std::size_t number;
  };

  tileloss_status followed_by(std::size_t number) {
    if (const tileloss_status status = run(number); status != TILELOSS_OK) return status;
    if (number < shards_.size()) after_call();
    return copy_into(states_[number - 1].get());
  }
  tileloss_status copy_into(tileloss_row_state& state) {
    EXPECT_TRUE(succeeds(tileloss_row_state_set_identity(&state)));
    return tileloss_row_state_merge(&state, &merged_.get());
  }
  tileloss_status merge_all() {
    EXPECT_TRUE(succeeds(tileloss_row_state_set_identity(&merged_.get())));
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      states_[i].get().smoothing_weight = static_cast<double>(shards_[i].columns);
      EXPECT_TRUE(succeeds(tileloss_row_state_merge(&merged_.get(), &states_[i].get())));
    }
    return failure_;
  }

  const char* function_;
  tileloss_cross_entropy_options options_;
  std::vector<Shard> shards_;
  ArgsOf args_of_;
  std::deque<RowStateArrays> states_;  // which cannot be moved
  RowStateArrays merged_{kRows};
  tileloss_status failure_ = TILELOSS_OK;
};

TEST(MergedShards, OfLogitsGiveWhatTheWholeGives) {
  for (const oracle::NumberFormat format : kFormats) {
    for (const tileloss_cross_entropy_options& options : option_sets()) {
      LogitsCase c({.rows = kRows,
                    .vocab = kVocab,
                    .format = format,
                    .ignore_prob = 0.2,
                    .token_weights = true,
                    .loss_grad = Upstream::kScalar,
                    .extra_outputs = true});
      Calls calls("cross_entropy", options, kUneven, [&](const Shard& s) { return columns_alone(c.args(), s); });
      ASSERT_TRUE(succeeds(calls.run()));
      EXPECT_TRUE(agrees(check_cross_entropy(c, options)));
    }
  }
}

// In float32 and bfloat16, where logits wait in 16 bits, in dhead and beside it.
TEST(MergedShards, OfAHeadGiveWhatTheWholeGives) {
  for (const auto format : {oracle::NumberFormat::kFloat32, oracle::NumberFormat::kBfloat16}) {
    for (const tileloss_cross_entropy_options& options : option_sets()) {
      LinearCase c({.row = {.rows = kRows, .vocab = kVocab, .ignore_prob = 0.2},
                    .hidden = 7,
                    .format = format,
                    .head_format = format,
                    .float32_dhidden = true,
                    .float32_dhead = false});
      const tileloss_matrix dhidden = c.args().dhidden;
      std::vector<float> part(kRows * 7), sum(kRows * 7);
      Calls calls("linear_cross_entropy", c.with_linear(options), kUneven, [&](const Shard& s) {
        tileloss_args args = rows_of_head(c.args(), s);
        args.dhidden = view(part, kRows, 7);
        return args;
      });
      const auto add = [&] {
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
      };
      calls.after_call = add;
      ASSERT_TRUE(succeeds(calls.run()));
      add();
      for (std::int64_t i = 0; i < kRows; ++i) {
        for (std::int64_t h = 0; h < 7; ++h)
          static_cast<float*>(dhidden.data)[i * dhidden.row_stride + h] = sum[static_cast<std::size_t>(i * 7 + h)];
      }
      EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options)));
    }
  }
}

TEST(MergedShards, OfNoRowInUseStillMeet) {
  for (const char* function : {"cross_entropy", "linear_cross_entropy"}) {
    LinearCase c({.row = {.rows = kRows, .vocab = kVocab, .ignore_prob = 1}, .hidden = 7});
    LogitsCase logits({.rows = kRows, .vocab = kVocab, .ignore_prob = 1});
    const bool is_linear = std::string(function) != "cross_entropy";
    int merges = 0;
    Calls calls(function, is_linear ? c.with_linear(cross_entropy_options()) : cross_entropy_options(), {{0, kVocab / 2}},
                [&](const Shard& s) {
                  ++merges;
                  return is_linear ? rows_of_head(c.args(), s) : columns_alone(logits.args(), s);
                });
    calls.fail_with(TILELOSS_INTERNAL);
    EXPECT_EQ(calls.run(), TILELOSS_INTERNAL) << function;  // so it was asked
    EXPECT_EQ(merges, 1);
  }
}

TEST(MergedShards, AStatusOfTheMergeEndsTheCall) {
  LogitsCase c({.rows = kRows, .vocab = kVocab});
  Calls calls("cross_entropy", {}, {{0, 300}}, [&](const Shard& s) { return columns_alone(c.args(), s); });
  calls.fail_with(TILELOSS_OUT_OF_MEMORY);
  EXPECT_TRUE(refused(calls.run(), TILELOSS_OUT_OF_MEMORY, "run.merge: expected TILELOSS_OK, got 3"));
}

// What the merge is made of is read, and so has to be there.
TEST(MergedShards, StatesWithoutAnArrayThatIsMergedAreRefused) {
  LogitsCase c({.rows = kRows, .vocab = kVocab, .extra_outputs = true});
  const struct {
    float* tileloss_row_state::*array;
    const char* message;
  } cases[] = {
      {&tileloss_row_state::max, "row_state: expected max, sum and label_logit, of all shards, got a null array"},
      {&tileloss_row_state::sum, "row_state: expected max, sum and label_logit, of all shards, got a null array"},
      {&tileloss_row_state::label_logit, "row_state: expected max, sum and label_logit, of all shards, got a null array"},
      {&tileloss_row_state::entropy_sum, "row_state: expected entropy_sum for entropy, got a null array"}};
  for (const auto& k : cases) {
    RowStateArrays state(kRows);
    state.get().*k.array = nullptr;
    tileloss_args args = columns_alone(c.args(), {0, 300});
    args.row_state = &state.get();
    const tileloss_cross_entropy_options options = of_shard(cross_entropy_options(), {0, 300});
    auto run = init<tileloss_run>();
    run.merge = [](void* /*context*/) -> tileloss_status { return TILELOSS_OK; };
    EXPECT_TRUE(
        refused(tileloss_cross_entropy_value_and_grad(&args, &options, nullptr, &run), TILELOSS_INVALID_ARGUMENT, k.message));
  }
}

// A plan may be changed by hand: rows cannot be cut where the second sweep is one over all of them.
TEST(MergedShards, APlanOfFewerRowsAtATimeGivesTheSameBits) {
  std::vector<std::vector<unsigned char>> gradients;
  for (const std::int64_t row_block : {std::int64_t{0}, std::int64_t{16}}) {
    LinearCase c({.row = {.rows = 40, .vocab = kVocab}, .hidden = 7});
    tileloss_args args = rows_of_head(c.args(), {0, 300});
    RowStateArrays state(40);
    args.row_state = &state.get();
    const tileloss_cross_entropy_options options = of_shard(c.with_linear(cross_entropy_options()), {0, 300});
    tileloss_plan plan =
        plan_for("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, args, &options, with_schedule(TILELOSS_SCHEDULE_STASH));
    ASSERT_EQ(plan.cpu.schedule, TILELOSS_SCHEDULE_STASH);
    if (row_block > 0) plan.cpu.row_block = row_block;
    auto run = init<tileloss_run>();
    run.merge = [](void* /*context*/) -> tileloss_status { return TILELOSS_OK; };
    ASSERT_TRUE(succeeds(tileloss_call("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, &args, &options, &plan, &run)));
    gradients.push_back(bytes_of(args.dhidden));
  }
  EXPECT_TRUE(same_bits(gradients[0], gradients[1]));
}

TEST(MergedShards, AMergeIsForThemAlone) {
  LogitsCase c({.rows = kRows, .vocab = kVocab});
  auto run = init<tileloss_run>();
  run.merge = [](void* /*context*/) -> tileloss_status { return TILELOSS_OK; };
  const tileloss_cross_entropy_options whole = cross_entropy_options();
  EXPECT_TRUE(refused(tileloss_cross_entropy_value_and_grad(&c.args(), &whole, nullptr, &run), TILELOSS_INVALID_ARGUMENT,
                      "run.merge: expected null: it is for value_and_grad of a shard of the vocabulary, got a function"));
  RowStateArrays state(kRows);
  tileloss_args args = columns_alone(c.args(), {0, 300});
  args.row_state = &state.get();
  const tileloss_cross_entropy_options options = of_shard(whole, {0, 300});
  EXPECT_TRUE(refused(tileloss_cross_entropy_value_and_grad(&args, &options, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "run.merge: expected a function, as the logits are a shard, got null"));
}

}  // namespace
}  // namespace tileloss::test
