// What a row's results may not depend on: the rows beside it, and what else is asked for. On logits of every kind, and in
// bfloat16 products, where a processor with tiles does softmax and dz of many rows at once.
// On cuda: LinearRows.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "tests/api/kept_calls.h"
#include "tests/api/special_head.h"

namespace tileloss::test {
namespace {

// NaN, or the same bits.
testing::AssertionResult same_floats(const float* a, const float* b, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::memcmp(a + i, b + i, sizeof *a) != 0) return testing::AssertionFailure() << i << ": " << a[i] << " against " << b[i];
  }
  return testing::AssertionSuccess();
}

// How the logits are kept: in dhead, in the workspace, in float32 there, not at all.
struct Way {
  const char* name;
  tileloss_schedule schedule;
  std::int64_t dhead_stride;
  double label_smoothing = 0;
};
constexpr Way kWays[] = {{"words in dhead", TILELOSS_SCHEDULE_STASH, SpecialHead::kWidth},
                         {"words in the workspace", TILELOSS_SCHEDULE_STASH, SpecialHead::kDheadStride},
                         {"floats", TILELOSS_SCHEDULE_STASH, SpecialHead::kDheadStride, 0.1},
                         {"recompute", TILELOSS_SCHEDULE_RECOMPUTE, SpecialHead::kWidth},
                         {"sweeps", TILELOSS_SCHEDULE_SWEEPS, SpecialHead::kWidth}};

void run(SpecialHead& s, const Way& way, double logit_scale = 1) {
  tileloss_plan_options hints = stash_of_columns();
  hints.cpu.schedule = way.schedule;
  s.dhead_stride = way.dhead_stride;
  s.label_smoothing = way.label_smoothing;
  s.run(hints, logit_scale);
}

TEST(LinearRows, ARowsBitsDoNotDependOnTheRowsBesideIt) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr std::int64_t kOthers = SpecialHead::kRows - 1;
  struct Corruption {
    const char* name;
    std::function<void(SpecialHead&)> corrupt;
  };
  const Corruption corruptions[] = {{"NaN", [=](SpecialHead& s) { s.hidden_at(kOthers) = kNaN; }},
                                    {"infinity", [=](SpecialHead& s) { s.hidden_at(kOthers) = kInfinite; }},
                                    {"vast", [](SpecialHead& s) { s.hidden_at(kOthers) = 1e38F; }},
                                    {"far out", [](SpecialHead& s) { s.hidden_at(kOthers) = 1e9F; }},
                                    {"large", [](SpecialHead& s) { s.hidden_at(kOthers) = 1e3F; }},
                                    {"ignored", [](SpecialHead& s) { s.labels[kOthers] = -100; }}};
  // Two ways of making dz differ in one element of some thousand: hence the seeds.
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Way& way = kWays[seed % std::size(kWays)];
    const bool has_bias = seed / std::size(kWays) == 3;
    SpecialHead plain(seed);
    if (!has_bias) plain.fold_bias();
    run(plain, way);
    for (const Corruption& corruption : corruptions) {
      SpecialHead corrupted(seed);
      if (!has_bias) corrupted.fold_bias();
      corruption.corrupt(corrupted);
      run(corrupted, way);
      const std::string what = std::string(way.name) + ", beside " + corruption.name + (has_bias ? ", bias" : "");
      EXPECT_TRUE(same_floats(corrupted.logp.data(), plain.logp.data(), kOthers)) << what << ", logp";
      EXPECT_TRUE(same_floats(corrupted.dhidden.data(), plain.dhidden.data(), kOthers * SpecialHead::kWidth)) << what;
    }
  }
}

// Of all outputs or none, whatever is kept.
void expect_one_logp(const std::string& what, double logit_scale, const std::function<SpecialHead()>& make) {
  std::vector<float> expected;
  for (const Way& way : {kWays[0], kWays[2], kWays[4]}) {
    for (const bool wants_all : {false, true}) {
      SpecialHead s = make();
      s.wants_all = wants_all;
      run(s, way, logit_scale);
      if (expected.empty()) expected = s.logp;
      EXPECT_TRUE(same_floats(s.logp.data(), expected.data(), SpecialHead::kRows))
          << what << ", " << way.name << (wants_all ? ", all outputs" : "");
    }
  }
}

TEST(LinearRows, LogpHasTheSameBitsWhateverElseIsAskedFor) {
  for (const SpecialKind& kind : special_kinds()) {
    for (const bool has_bias : {false, true}) {
      expect_one_logp(kind.name + std::string(has_bias ? ", bias" : ""), kind.logit_scale, [&] {
        SpecialHead s;
        kind.corrupt(s);
        if (!has_bias) s.fold_bias();
        return s;
      });
    }
  }
}

// Three tiles in each of a forward's 16 slices of the vocabulary, on different levels; labels far above, so that logp has digits.
TEST(LinearRows, LogpHasTheSameBitsWhereTilesAreMerged) {
  constexpr std::int64_t kTile = 64, kVocab = 16 * 3 * kTile;
  const struct {
    const char* name;
    std::function<double(std::int64_t tile)> level;
  } kinds[] = {{"one level", [](std::int64_t) { return 0.0; }},
               {"rising", [](std::int64_t tile) { return 0.3 * static_cast<double>(tile); }},
               {"falling", [](std::int64_t tile) { return -0.3 * static_cast<double>(tile); }},
               {"up and down", [](std::int64_t tile) { return tile % 3 == 1 ? 5.0 : 0.0; }},
               {"first tiles masked", [](std::int64_t tile) { return tile % 3 == 0 ? -1e30 : 0.0; }},
               {"second tiles masked", [](std::int64_t tile) { return tile % 3 == 1 ? -1e30 : 0.0; }}};
  for (const auto& kind : kinds) {
    expect_one_logp(kind.name, 1, [&] {
      SpecialHead s(1, kVocab);
      for (std::int64_t v = 0; v < kVocab; ++v) s.bias_at(v) = static_cast<float>(kind.level(v / kTile));
      for (const std::int64_t label : s.labels) s.bias_at(label) = 16;
      s.fold_bias();
      return s;
    });
  }
}

}  // namespace
}  // namespace tileloss::test
