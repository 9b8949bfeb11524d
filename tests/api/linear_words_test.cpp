// Logits kept in 16 bits between the LM head's forward and its backward: where the plan does so, and that every kind of logits,
// transform and special value survives it.
// On cuda: LinearKeptWords.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/api/kept_calls.h"
#include "tests/api/special_head.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;

// Bytes of a kept logit.
double bytes_of_logit(const tileloss_plan& plan, std::int64_t rows) {
  const std::int64_t tiles = (plan.cpu.kept_columns + plan.cpu.vocab_block - 1) / plan.cpu.vocab_block;
  for (std::int64_t i = 0; i < plan.buffer_count; ++i) {
    if (std::string(plan.buffers[i].name) != "logits kept") continue;
    return static_cast<double>(plan.buffers[i].bytes) / static_cast<double>(tiles * plan.cpu.vocab_block * rows);
  }
  return 0;
}

TEST(LinearPlan, LogitsAreKeptIn16BitsWhereThatIsExactEnough) {
  constexpr std::int64_t kBudget = 400 * kMiB;
  const double word = 2 + 4.0 / static_cast<double>(plan_of({}, kBudget).cpu.vocab_block);  // and the tile's maximum
  const HeadShape shape{.dhead_layout = MatrixLayout::kGaps};
  tileloss_cross_entropy_options options = cross_entropy_options();
  const auto bytes = [&](const HeadShape& s) {
    return bytes_of_logit(plan_of(s, kBudget, TILELOSS_SCHEDULE_STASH, options), s.rows);
  };
  EXPECT_DOUBLE_EQ(bytes(shape), word);
  options.z_loss = 0.1;
  EXPECT_DOUBLE_EQ(bytes(shape), word);
  const HeadShape in_float32{
      .dtype = TILELOSS_FLOAT16, .dhead_dtype = TILELOSS_FLOAT16, .dhead_layout = MatrixLayout::kGaps};  // the products
  EXPECT_DOUBLE_EQ(bytes(in_float32), 4);
  options.label_smoothing = 0.1;
  EXPECT_DOUBLE_EQ(bytes(shape), 4);
  options.label_smoothing = 0;
  options.logit.softcap = 30;
  EXPECT_DOUBLE_EQ(bytes(shape), 4);
}

// Logits, labels and transforms that 16 bits could lose: every gradient within the bound with all, some and few columns kept.
TEST(LinearKeptWords, AgreeForEveryKindOfLogits) {
  const auto spike_at = [](std::int64_t spike) { return [=](std::int64_t v) { return v == spike ? 80.0 : 0.1 * (v % 7); }; };
  struct Family {
    const char* name;
    LinearCaseSpec spec;
    double temperature = 1, logit_scale = 1;
  };
  LinearCaseSpec base = kept_spec(NumberFormat::kBfloat16, 36);
  base.row.vocab = 700;
  std::vector<Family> families = {{"normal", base}, {"cold", base, 0.1}, {"hot", base, 20}, {"scaled", base, 0.7, 6}};
  const auto add = [&](const char* name, auto change, double temperature = 1) {
    LinearCaseSpec with = base;
    change(with);
    families.push_back({name, with, temperature});
  };
  for (const double std : {0.01, 30.0}) add("std", [&](LinearCaseSpec& s) { s.logit_std = std; });
  for (const double offset : {1e4, -1e4}) {
    add("offset", [&](LinearCaseSpec& s) { s.bias_of = [=](std::int64_t v) { return offset + 0.01 * (v % 5); }; });
  }
  for (const std::int64_t spike : {0, 63, 64, 699}) {
    add("spike", [&](LinearCaseSpec& s) { s.bias_of = spike_at(spike); });
  }
  // 1 - p of some 1e-6, 1e-17 and 1e-36: the gradient is in the classes that lie so far below the label.
  for (const double lead : {20.0, 45.0, 85.0}) add("confident", [&](LinearCaseSpec& s) { s.label_logit = lead; });
  add("confident, one tile", [](LinearCaseSpec& s) {
    s.label_logit = 45;
    s.row.vocab = 40;
  });
  for (const Family& family : families) {
    const tileloss_cross_entropy_options options{.logit = {.logit_scale = family.logit_scale, .temperature = family.temperature}};
    LinearCase c(family.spec);
    const KeptRun all = run_within(c, options, stash_of_columns());
    EXPECT_NEAR(bytes_of_logit(all.plan, family.spec.row.rows), 2 + 4.0 / 64, 0.05);
    EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options))) << family.name;
    if (family.spec.row.vocab < 700) continue;
    const KeptRun some = run_within(c, options, stash_of_columns(budget_for(all.plan, 0.5)));
    EXPECT_LT(some.plan.cpu.kept_columns, 700);
    EXPECT_TRUE(same_bits(some.bytes, all.bytes)) << family.name;
  }
}

TEST(LinearKeptWords, PoliciesAgreeWithAndWithoutAnEntropyBonus) {
  for (const double entropy_coef : {0.0, 0.01}) {
    tileloss_policy_loss_options options;
    tileloss_options_preset("policy_loss", "grpo", &options, sizeof options);
    options.entropy_coef.value = entropy_coef;
    options.beta.value = 0.04;
    LinearCaseSpec with = kept_spec(NumberFormat::kBfloat16, 37);
    with.logit_std = 0.01;  // where rounding p by 2^-12 would be most of an entropy's gradient
    with.row.loss_grad = Upstream::kScalar;
    LinearCase c(with);
    tools::PolicyDraw draw;
    draw.rows = with.row.rows;
    draw.sequences = 3;
    draw.use_offsets = true;
    draw.old_scale = draw.ref_scale = 0.3;
    const LinearPolicy policy(c, draw, options);
    tileloss_plan plan;
    ASSERT_TRUE(runs("linear_policy_loss", kBoth, c.args(), &options, stash_of_columns(), nullptr, &plan));
    EXPECT_TRUE(agrees(policy.check())) << entropy_coef;
    EXPECT_EQ(bytes_of_logit(plan, with.row.rows) > 3, entropy_coef > 0);
  }
}

// ---------------------------------------------------------------------------------------------------------- special values

TEST(LinearKeptWords, SpecialValuesAreThoseOfRecompute) {
  tileloss_plan_options all = stash_of_columns();
  tileloss_plan_options recompute = all;
  recompute.cpu.schedule = TILELOSS_SCHEDULE_RECOMPUTE;
  struct Where {
    double share;
    std::int64_t dhead_stride;
  };
  for (const SpecialKind& kind : special_kinds()) {
    for (const Where& where : {Where{1, SpecialHead::kDheadStride},
                               {0.6, SpecialHead::kDheadStride},
                               {0.25, SpecialHead::kDheadStride},
                               Where{1, SpecialHead::kWidth}}) {
      SpecialHead exact, kept;
      for (SpecialHead* s : {&exact, &kept}) {
        kind.corrupt(*s);
        s->dhead_stride = where.dhead_stride;
      }
      exact.run(recompute, kind.logit_scale);
      tileloss_plan_options hints = all;
      if (where.share < 1) hints.workspace_bytes = budget_for(kept.run(all, kind.logit_scale), where.share);
      const tileloss_plan plan = kept.run(hints, kind.logit_scale);
      EXPECT_EQ(plan.cpu.kept_columns < SpecialHead::kVocab, where.share < 1);
      EXPECT_EQ(plan.cpu.kept_rows, where.dhead_stride == SpecialHead::kWidth ? SpecialHead::kRows : 0);
      const std::string what = std::string(kind.name) + ", " + std::to_string(plan.cpu.kept_columns) + " columns and " +
                               std::to_string(plan.cpu.kept_rows) + " rows kept";
      expect_alike(kept.dhidden, exact.dhidden, what + ", dhidden");
      expect_alike(kept.dhead, exact.dhead, what + ", dhead");
      expect_alike(kept.dbias, exact.dbias, what + ", dbias");
      EXPECT_EQ(std::memcmp(kept.logp.data(), exact.logp.data(), kept.logp.size() * sizeof(float)), 0) << what;
    }
  }
}

// Without a bias, a processor with tiles does softmax and dz beside the products.
TEST(LinearKeptWords, SpecialValuesAreThoseOfTheBaseline) {
  tileloss_plan_options baseline = stash_of_columns();
  baseline.cpu.schedule = TILELOSS_SCHEDULE_RECOMPUTE;
  baseline.cpu.isa = TILELOSS_ISA_BASELINE;
  for (const SpecialKind& kind : special_kinds()) {
    for (const tileloss_schedule schedule : kSchedules) {
      SpecialHead expected, got;
      for (SpecialHead* s : {&expected, &got}) {
        kind.corrupt(*s);
        s->fold_bias();
        s->dhead_stride = SpecialHead::kWidth;
      }
      expected.run(baseline, kind.logit_scale);
      tileloss_plan_options hints = stash_of_columns();
      hints.cpu.schedule = schedule;
      got.run(hints, kind.logit_scale);
      const std::string what = std::string(kind.name) + ", schedule " + std::to_string(schedule);
      expect_alike(got.logp, expected.logp, what + ", logp");
      expect_alike(got.dhidden, expected.dhidden, what + ", dhidden");
      expect_alike(got.dhead, expected.dhead, what + ", dhead");
    }
  }
}

}  // namespace
}  // namespace tileloss::test
