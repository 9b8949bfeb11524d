// Inputs of policy losses as drawn near the oracle, and the errors that the oracle allows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "judge/oracles/policy.h"
#include "support/exit_codes.h"
#include "support/synthetic.h"

namespace tileloss::tools {
namespace {

constexpr int64_t kRows = 400;
constexpr int64_t kColumns = 12;

struct Sample {
  PolicyDraw draw;
  oracle::PolicyOptions options;
  PolicyTensors tensors;
  std::vector<uint8_t> used;
  std::vector<RowSummary> rows;

  Sample() {
    draw.rows = kRows;
    draw.sequences = 20;
  }

  // The oracle's rows, then everything that depends on them.
  void make() {
    options.advantage_level = draw.token_advantages ? oracle::Level::kToken : oracle::Level::kSequence;
    tensors = draw_policy_layout(draw);
    oracle::SoftmaxRow softmax;
    std::vector<double> logits(kColumns);
    for (int64_t i = 0; i < kRows; ++i) {
      Random random(draw.seed, Stream::kLogits, i);
      for (double& x : logits) x = 2 * random.next_normal();
      softmax.compute({}, logits, i % kColumns);
      used.push_back(tensors.in_use(i) ? 1 : 0);
      rows.push_back(summarize(softmax));
    }
    draw_policy_logps(draw, options, used, rows, tensors);
  }

  PolicyOracle oracle_of(const std::vector<RowSummary>& summaries) const {
    OracleTensors all;
    all.policy = tensors;
    all.used = used;
    all.summaries = summaries;
    return {options, {}, all};
  }
};

TEST(PolicyInputs, IsTheSameForTheSameSeedAndAnotherForAnother) {
  Sample first, again, other;
  for (Sample* sample : {&first, &again, &other}) {
    sample->draw.old_scale = 0.2;
    sample->draw.use_offsets = true;
    sample->draw.seed = sample == &other ? 2 : 1;
    sample->make();
  }
  EXPECT_EQ(first.tensors.old_logp, again.tensors.old_logp);
  EXPECT_EQ(first.tensors.offsets, again.tensors.offsets);
  EXPECT_NE(first.tensors.old_logp, other.tensors.old_logp);
  EXPECT_NE(first.tensors.offsets, other.tensors.offsets);
}

TEST(PolicyInputs, HasEmptySequencesZeroAdvantagesAndNanWhereNothingIsRead) {
  Sample sample;
  sample.draw.use_offsets = sample.draw.token_advantages = true;
  sample.draw.mask_prob = 0.3;
  sample.draw.old_scale = 0.2;
  sample.make();
  const PolicyTensors& t = sample.tensors;
  EXPECT_TRUE(std::is_sorted(t.offsets.begin(), t.offsets.end()));
  EXPECT_NE(std::adjacent_find(t.offsets.begin(), t.offsets.end()), t.offsets.end());
  EXPECT_EQ(t.offsets.back(), kRows);
  EXPECT_GT(std::count(t.advantages.begin(), t.advantages.end(), 0.0F), kRows / 40);
  int64_t unread = 0;
  for (size_t i = 0; i < kRows; ++i) {
    EXPECT_EQ(std::isnan(t.advantages[i]), t.mask[i] == 0);
    EXPECT_EQ(std::isnan(t.old_logp[i]), t.mask[i] == 0);
    unread += t.mask[i] == 0 ? 1 : 0;
  }
  EXPECT_GT(unread, kRows / 5);
  EXPECT_TRUE(t.ref_logp.empty() && t.sampler_logp.empty());
}

// With noise of 0.2 and four bounds one row in 5000 lies within the margin: of 30 draws some would.
TEST(PolicyInputs, IsClearOfEveryDecision) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Sample sample;
    sample.draw.seed = seed;
    sample.draw.old_scale = sample.draw.sampler_scale = 0.2;
    sample.options.delta = 1.1;
    sample.options.log_ratio_clamp = 0.15;
    sample.options.sampler_correction = oracle::SamplerCorrection::kMask;
    sample.options.sampler_max = 1.05;
    sample.make();
    const PolicyOracle oracle = sample.oracle_of(sample.rows);
    EXPECT_GE(oracle.margin(), kClearMargin);
    EXPECT_LT(oracle.margin(), 1e-2);
  }
}

TEST(PolicyInputs, AThresholdOnAnEntropyIsRefused) {
  Sample sample;
  sample.draw.old_scale = 0.2;
  sample.make();
  sample.options.entropy_threshold = sample.rows[7].entropy;
  EXPECT_THROW(draw_policy_logps(sample.draw, sample.options, sample.used, sample.rows, sample.tensors), ToolError);
}

// A kernel whose logp are off by their errors, with random signs, passes; one with a hundred times the errors does not.
TEST(PolicyOracle, AllowsWhatTheErrorsOfLogpBringAndNoMore) {
  for (const auto kind : {oracle::PolicyKind::kClip, oracle::PolicyKind::kSapo, oracle::PolicyKind::kVespo}) {
    for (const auto level : {oracle::Level::kToken, oracle::Level::kSequence}) {
      Sample sample;
      sample.draw.old_scale = sample.draw.ref_scale = 0.1;
      sample.options.kind = kind;
      sample.options.ratio_level = level;
      sample.options.beta = 0.1;
      sample.make();
      const PolicyOracle oracle = sample.oracle_of(sample.rows);
      const auto worst = [&](double size) {
        std::vector<RowSummary> moved = sample.rows;
        Random random(5, Stream::kPolicyLogp, 0);
        for (RowSummary& row : moved) row.logp += (random.next_below(2) == 0 ? size : -size) * row.logp_error;
        const PolicyOracle other = sample.oracle_of(moved);
        double largest = std::fabs(other.result().loss - oracle.result().loss) / oracle.reduce_magnitudes({});
        for (int64_t i = 0; i < kRows; ++i) {
          const auto row = static_cast<size_t>(i);
          const double difference = std::fabs(other.result().token_loss[row] - oracle.result().token_loss[row]);
          largest = std::max(largest, difference / oracle.token_loss_magnitude(i));
        }
        return largest * 0x1p22;  // OutputMetric allows 2^-22 of a magnitude
      };
      EXPECT_LE(worst(1), 1);
      EXPECT_GT(worst(100), 1);
    }
  }
}

}  // namespace
}  // namespace tileloss::tools
