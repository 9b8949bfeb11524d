// The row state is a monoid: identity, merges in any grouping and order, NaN and infinities.
#include "core/row_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/synthetic.h"

namespace tileloss::test {
namespace {

using impl::kInfinity;
using impl::merge;
using impl::RowState;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct WeightedState {
  RowState state;
  double weight = 0;
};

// A state straight from its definition. `weights` empty: 1.
WeightedState state_of(const std::vector<float>& z, std::int64_t first_index, std::int64_t label,
                       const std::vector<double>& weights = {}) {
  WeightedState r;
  double sum = 0, entropy = 0, collision = 0, smoothing = 0;
  for (const float x : z) {
    if (std::isnan(x)) {
      r.state.max = r.state.sum = r.state.label_logit = r.state.entropy_sum = r.state.collision_sum = r.state.smoothing_sum =
          kNan;
      r.weight = static_cast<double>(z.size());
      return r;
    }
    r.state.max = std::max(r.state.max, x);
  }
  for (std::size_t j = 0; j < z.size(); ++j) {
    const double c = weights.empty() ? 1.0 : weights[j];
    const double d = z[j] == -kInfinity ? z[j] : static_cast<double>(z[j]) - r.state.max;  // -inf - -inf is -inf here
    const double e = std::exp(d);
    const bool is_label = first_index + static_cast<std::int64_t>(j) == label;
    if (is_label) r.state.label_logit = z[j];
    if (!is_label) sum += e;
    entropy += e == 0 ? 0 : d * e;
    collision += e * e;
    smoothing += c * d;
    r.weight += c;
    if (r.state.argmax < 0 && z[j] == r.state.max) r.state.argmax = first_index + static_cast<std::int64_t>(j);
  }
  r.state.sum = static_cast<float>(sum);
  r.state.entropy_sum = static_cast<float>(entropy);
  r.state.collision_sum = static_cast<float>(collision);
  r.state.smoothing_sum = static_cast<float>(smoothing);
  return r;
}

WeightedState join(const WeightedState& a, const WeightedState& b) {
  return {merge(a.state, a.weight, b.state, b.weight), a.weight + b.weight};
}

// All numbers but the maximum and the index.
constexpr std::array kSums = {&RowState::sum, &RowState::entropy_sum, &RowState::collision_sum, &RowState::smoothing_sum};

// Within so many units in the last place: each merge rounds its sums once to float32. 0: the same bits.
testing::AssertionResult nearly(const RowState& a, const RowState& b, double ulps = 4) {
  const auto near = [](float x, float y, double units) {
    if (x == y || (std::isnan(x) && std::isnan(y))) return true;
    if (!std::isfinite(x) || !std::isfinite(y)) return false;
    return std::fabs(static_cast<double>(x) - y) <= units * 0x1p-23 * std::max(std::fabs(x), std::fabs(y));
  };
  auto failure = testing::AssertionFailure();
  failure << "argmax " << a.argmax << " " << b.argmax;
  bool is_near = a.argmax == b.argmax;
  const auto expect = [&](float RowState::*member, double units) {
    is_near = near(a.*member, b.*member, units) && is_near;
    failure << ", " << a.*member << " " << b.*member;
  };
  for (const auto member : {&RowState::max, &RowState::label_logit}) expect(member, 0);
  for (const auto member : kSums) expect(member, ulps);
  return is_near ? testing::AssertionSuccess() : failure;
}
testing::AssertionResult same_bits(const RowState& a, const RowState& b) { return nearly(a, b, 0); }

std::vector<float> draw(std::uint64_t seed, std::int64_t count, double std_dev) {
  tools::Random random(seed, tools::Stream::kLogits, 0);
  std::vector<float> z;
  for (std::int64_t j = 0; j < count; ++j) z.push_back(static_cast<float>(std_dev * random.next_normal()));
  return z;
}

std::vector<WeightedState> interesting_states() {
  return {state_of(draw(1, 10, 1), 0, 3),
          state_of(draw(2, 10, 30), 10, 3),
          state_of({5, 5, 5}, 20, 21),
          state_of({-kInfinity, 2, -kInfinity}, 30, 99),
          state_of({-kInfinity, -kInfinity}, 40, 99),
          state_of({-kInfinity, -kInfinity}, 45, 46),
          state_of({kInfinity, 1}, 50, 99),
          state_of({kNan, 1}, 60, 99),
          state_of({-1e4F, -1e4F + 1}, 70, 70),
          WeightedState{}};
}

TEST(RowStateMerge, EmptyIsTheIdentityOnBothSides) {
  const WeightedState empty;
  for (const WeightedState& s : interesting_states()) {
    EXPECT_TRUE(same_bits(join(s, empty).state, s.state));
    EXPECT_TRUE(same_bits(join(empty, s).state, s.state));
  }
}

TEST(RowStateMerge, TwoEmptyStatesMakeTheEmptyState) {
  const RowState r = merge({}, 0, {}, 0);
  EXPECT_TRUE(same_bits(r, RowState{}));
  EXPECT_FALSE(std::isnan(r.sum));
}

TEST(RowStateMerge, OrderOfTheArgumentsDoesNotMatter) {
  for (const WeightedState& a : interesting_states()) {
    for (const WeightedState& b : interesting_states()) EXPECT_TRUE(same_bits(join(a, b).state, join(b, a).state));
  }
}

TEST(RowStateMerge, GroupingDoesNotMatterButForRounding) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    const double std_dev = seed % 3 == 0 ? 30 : 1;
    const std::vector<float> z = draw(seed, 90, std_dev);
    const auto part = [&](std::size_t i) {
      return state_of({z.begin() + i * 30, z.begin() + (i + 1) * 30}, static_cast<int>(i) * 30, 40);
    };
    const WeightedState a = part(0), b = part(1), c = part(2);
    EXPECT_TRUE(nearly(join(join(a, b), c).state, join(a, join(b, c)).state)) << "seed " << seed;
  }
}

TEST(RowStateMerge, PartsGiveTheWhole) {
  std::vector<double> weights;
  for (int j = 0; j < 97; ++j) weights.push_back(0.5 + 0.01 * j);
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    const std::vector<float> z = draw(seed, 97, seed % 2 == 0 ? 10 : 0.01);
    const WeightedState whole = state_of(z, 0, 50, weights);
    for (const std::size_t cut : {1U, 13U, 50U, 51U, 96U}) {
      const WeightedState left = state_of({z.begin(), z.begin() + cut}, 0, 50, {weights.begin(), weights.begin() + cut});
      const WeightedState right =
          state_of({z.begin() + cut, z.end()}, static_cast<std::int64_t>(cut), 50, {weights.begin() + cut, weights.end()});
      EXPECT_TRUE(nearly(join(left, right).state, whole.state, 8)) << "seed " << seed << " cut " << cut;
    }
  }
}

TEST(RowStateMerge, TheTargetMayComeFromEitherSide) {
  const WeightedState with = state_of({1, 2, 3}, 0, 1), without = state_of({4, 0}, 3, 1);
  EXPECT_EQ(join(with, without).state.label_logit, 2.0F);
  EXPECT_EQ(join(without, with).state.label_logit, 2.0F);
  // Its own term stays out of the sum also when it is the maximum of all.
  const WeightedState top = state_of({9}, 5, 5);
  EXPECT_EQ(join(top, without).state.sum, static_cast<float>(std::exp(-5.0) * without.state.sum));
}

// The likeliest stays out of the sum, the others are in it as all columns are.
TEST(RowStateMerge, OfSeveralLabelsOneIsLeftOut) {
  const std::vector<float> z = {1, 3, 2, 0.5F, 2.5F, 3};
  const auto parts = [&](std::int64_t first, std::int64_t second) {
    return std::pair{state_of({z.begin(), z.begin() + 3}, 0, first), state_of({z.begin() + 3, z.end()}, 3, second)};
  };
  for (const auto& [first, second, likeliest] : {std::array{1, 3, 1}, {0, 4, 4}, {1, 5, 5}, {2, 99, 2}, {99, 4, 4}}) {
    const auto [left, right] = parts(first, second);
    const RowState whole = state_of(z, 0, likeliest).state;
    EXPECT_TRUE(nearly(join(left, right).state, whole)) << first << " " << second;
    EXPECT_TRUE(nearly(join(right, left).state, whole)) << first << " " << second;
  }
}

TEST(RowStateMerge, NanInEitherArgumentSurvives) {
  const RowState nan = state_of({kNan, 1}, 0, 9).state;
  for (const WeightedState& other : interesting_states()) {
    for (const RowState& r : {merge(nan, 2, other.state, other.weight), merge(other.state, other.weight, nan, 2)}) {
      EXPECT_TRUE(std::isnan(r.max) && std::isnan(r.label_logit));
      for (const auto sum : kSums) EXPECT_TRUE(std::isnan(r.*sum));
      EXPECT_EQ(r.argmax, -1);
    }
  }
}

// A state that someone else made may hold its NaN in one member only.
TEST(RowStateMerge, NanInOneMemberSurvives) {
  const WeightedState other = state_of({1, 2, 3}, 0, 1);
  WeightedState odd = state_of({4, 5}, 3, 9);
  for (const auto sum : kSums) odd.state.*sum = kNan;
  for (const RowState& r : {join(odd, other).state, join(other, odd).state}) {
    for (const auto sum : kSums) EXPECT_TRUE(std::isnan(r.*sum));
  }
  odd = state_of({4, 5}, 3, 3);
  odd.state.label_logit = kNan;
  WeightedState no_label = state_of({1, 2, 3}, 0, 99);
  EXPECT_TRUE(std::isnan(join(odd, no_label).state.label_logit));
  EXPECT_TRUE(std::isnan(join(no_label, odd).state.label_logit));
}

TEST(RowStateMerge, ShardsOfMinusInfinityAddNothing) {
  const WeightedState dead = state_of({-kInfinity, -kInfinity}, 0, 99), live = state_of({1, 3}, 2, 3);
  for (const RowState& r : {join(dead, live).state, join(live, dead).state}) {
    EXPECT_EQ(r.max, 3.0F);
    EXPECT_EQ(r.sum, live.state.sum);
    EXPECT_EQ(r.entropy_sum, live.state.entropy_sum);
    EXPECT_EQ(r.collision_sum, live.state.collision_sum);
    EXPECT_EQ(r.smoothing_sum, -kInfinity);  // its columns' logits count, as with label smoothing
    EXPECT_EQ(r.argmax, live.state.argmax);
  }
  const RowState both = join(dead, state_of({-kInfinity}, 2, 99)).state;
  EXPECT_EQ(both.max, -kInfinity);
  EXPECT_EQ(both.argmax, 0);
}

TEST(RowStateMerge, PlusInfinityStaysTheMaximum) {
  const WeightedState top = state_of({kInfinity, 1}, 0, 99), live = state_of({1, 3}, 2, 3);
  EXPECT_EQ(join(top, live).state.max, kInfinity);
  EXPECT_EQ(join(live, top).state.max, kInfinity);
  EXPECT_EQ(join(live, top).state.argmax, 0);
}

TEST(RowStateMerge, TiesGiveTheLowestIndex) {
  const WeightedState low = state_of({1, 7}, 0, 99), high = state_of({7, 2}, 10, 99);
  EXPECT_EQ(join(low, high).state.argmax, 1);
  EXPECT_EQ(join(high, low).state.argmax, 1);
}

TEST(RowStateMerge, SumsSurviveMaximaFarApart) {
  const WeightedState low = state_of({-1000, -1001}, 0, 99), high = state_of({1000, 999}, 2, 99);
  const RowState r = join(low, high).state;
  EXPECT_TRUE(nearly(r, {.max = 1000,
                         .sum = high.state.sum,
                         .label_logit = -kInfinity,
                         .entropy_sum = high.state.entropy_sum,
                         .collision_sum = high.state.collision_sum,
                         .smoothing_sum = high.state.smoothing_sum - 4001.0F,
                         .argmax = 2}));
}

}  // namespace
}  // namespace tileloss::test
