// Logits kept in 16 bits between the LM head's forward and its backward: where the plan does so, and that every kind of logits,
// transform and special value survives it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/api/kept_calls.h"
#include "tools/synthetic.h"

namespace tileloss::test {
namespace {

using reference::NumberFormat;

// Bytes of a kept logit.
double bytes_of_logit(const tileloss_plan& plan, std::int64_t rows) {
  const std::int64_t tiles = (plan.kept_columns + plan.vocab_block - 1) / plan.vocab_block;
  for (std::int64_t i = 0; i < plan.buffer_count; ++i) {
    if (std::string(plan.buffers[i].name) != "logits kept") continue;
    return static_cast<double>(plan.buffers[i].bytes) / static_cast<double>(tiles * plan.vocab_block * rows);
  }
  return 0;
}

TEST(LinearPlan, LogitsAreKeptIn16BitsWhereThatIsExactEnough) {
  constexpr std::int64_t kBudget = 400 * kMiB;
  constexpr double kWord = 2 + 4.0 / 256;  // and the tile's maximum
  const HeadShape shape{.dhead_layout = MatrixLayout::kGaps};
  tileloss_cross_entropy_options options = cross_entropy_options();
  const auto bytes = [&](const HeadShape& s) {
    return bytes_of_logit(plan_of(s, kBudget, TILELOSS_SCHEDULE_STASH, options), s.rows);
  };
  EXPECT_DOUBLE_EQ(bytes(shape), kWord);
  options.z_loss = 0.1;
  EXPECT_DOUBLE_EQ(bytes(shape), kWord);
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
    tileloss_cross_entropy_options options = cross_entropy_options();
    options.logit.temperature.value = family.temperature;
    options.logit.logit_scale = family.logit_scale;
    LinearCase c(family.spec);
    const KeptRun all = run_within(c, options, stash_of_columns());
    EXPECT_NEAR(bytes_of_logit(all.plan, family.spec.row.rows), 2 + 4.0 / 64, 0.05);
    EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options))) << family.name;
    if (family.spec.row.vocab < 700) continue;
    const KeptRun some = run_within(c, options, stash_of_columns(budget_for(all.plan, 0.5)));
    EXPECT_LT(some.plan.kept_columns, 700);
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

// A small head in float32, multiplied in bfloat16, whose bias and hidden states can hold anything. So few rows that the planner
// cannot take them in parts.
struct Special {
  static constexpr std::int64_t kRows = 4, kVocab = 300, kWidth = 8, kDheadStride = 9;
  std::vector<float> hidden, head, bias = std::vector<float>(kVocab), dhidden, dhead, dbias, logp = std::vector<float>(kRows);
  std::vector<std::int64_t> labels;
  std::int64_t dhead_stride = kDheadStride;  // kWidth: without gaps, so that it holds the logits first

  Special() : dhidden(kRows * kWidth), dhead(kVocab * kDheadStride), dbias(kVocab) {
    tools::Random random(5, tools::Stream::kLogits, -1);
    for (std::int64_t i = 0; i < kRows * kWidth; ++i) hidden.push_back(static_cast<float>(random.next_normal()));
    for (std::int64_t i = 0; i < kVocab * kWidth; ++i) head.push_back(static_cast<float>(random.next_normal()));
    for (std::int64_t i = 0; i < kRows; ++i) labels.push_back(70 * i);
  }
  float& hidden_at(std::int64_t row) { return hidden[static_cast<std::size_t>(row * kWidth)]; }
  float& bias_at(std::int64_t v) { return bias[static_cast<std::size_t>(v)]; }

  tileloss_plan run(const tileloss_plan_options& wishes, double logit_scale) {
    tileloss_args args;
    tileloss_args_init(&args);
    args.hidden = tileloss_make_matrix(hidden.data(), TILELOSS_FLOAT32, kRows, kWidth, kWidth);
    args.head = tileloss_make_matrix(head.data(), TILELOSS_FLOAT32, kVocab, kWidth, kWidth);
    args.bias = tileloss_make_vector(bias.data(), TILELOSS_FLOAT32, kVocab);
    args.compute_dtype = TILELOSS_BFLOAT16;
    args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, kRows);
    args.logp = tileloss_make_vector(logp.data(), TILELOSS_FLOAT32, kRows);
    args.dhidden = tileloss_make_matrix(dhidden.data(), TILELOSS_FLOAT32, kRows, kWidth, kWidth);
    args.dhead = tileloss_make_matrix(dhead.data(), TILELOSS_FLOAT32, kVocab, kWidth, dhead_stride);
    args.dbias = tileloss_make_vector(dbias.data(), TILELOSS_FLOAT32, kVocab);
    tileloss_cross_entropy_options options = cross_entropy_options();
    options.logit.logit_scale = logit_scale;
    tileloss_plan plan;
    EXPECT_TRUE(runs("linear_cross_entropy", kBoth, args, &options, wishes, nullptr, &plan));
    return plan;
  }
};

// NaN where it is NaN, infinite where it is infinite, 0 where it is 0, elsewhere as near as two roundings to bfloat16 are.
void expect_alike(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) {
      ASSERT_TRUE((std::isnan(a[i]) && std::isnan(b[i])) || a[i] == b[i]) << what << " " << i << ": " << a[i] << " " << b[i];
      continue;
    }
    if (b[i] == 0) {
      ASSERT_EQ(a[i], 0) << what << " " << i;
    }
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  EXPECT_LE(difference, size * 0x1p-14) << what;
}

TEST(LinearKeptWords, SpecialValuesAreThoseOfRecompute) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
  struct Kind {
    const char* name;
    std::function<void(Special&)> spoil;
    double logit_scale = 1;
  };
  const Kind kinds[] = {
      {"nothing", [](Special&) {}},
      {"some classes at -inf", [&](Special& s) { s.bias_at(2) = s.bias_at(63) = s.bias_at(64) = s.bias_at(299) = -kInfinite; }},
      {"a whole tile at -inf, a label among them",
       [&](Special& s) {
         for (std::int64_t v = 64; v < 128; ++v) s.bias_at(v) = -kInfinite;
       }},
      {"a tile at -inf but for the label",
       [&](Special& s) {
         for (std::int64_t v = 64; v < 128; ++v) s.bias_at(v) = v == 70 ? 0 : -kInfinite;
       }},
      {"all at -inf", [&](Special& s) { s.bias.assign(s.bias.size(), -kInfinite); }},
      {"a class at +inf", [&](Special& s) { s.bias_at(200) = kInfinite; }},
      {"a label at +inf", [&](Special& s) { s.bias_at(70) = kInfinite; }},
      {"a class at NaN", [&](Special& s) { s.bias_at(130) = kNaN; }},
      {"a row of NaN", [&](Special& s) { s.hidden_at(3) = kNaN; }},
      {"a row of infinities", [&](Special& s) { s.hidden_at(3) = kInfinite; }},
      {"the largest numbers", [](Special& s) { s.bias_at(5) = s.bias_at(100) = 3e38F; }},
      {"the lowest numbers", [](Special& s) { s.bias_at(5) = s.bias_at(100) = -3e38F; }},
      {"a vast scale", [](Special&) {}, 1e30},
      {"a tiny scale", [](Special&) {}, 1e-30},
      {"a scale of 2^63", [](Special&) {}, 0x1p63},
      {"a scale whose steps leave float's range", [](Special&) {}, 1e37},
      {"a scale below float's normal numbers", [](Special&) {}, 1e-42},
  };
  tileloss_plan_options all = stash_of_columns();
  tileloss_plan_options recompute = all;
  recompute.schedule = TILELOSS_SCHEDULE_RECOMPUTE;
  struct Where {
    double share;
    std::int64_t dhead_stride;
  };
  for (const Kind& kind : kinds) {
    for (const Where& where : {Where{1, Special::kDheadStride},
                               {0.6, Special::kDheadStride},
                               {0.25, Special::kDheadStride},
                               Where{1, Special::kWidth}}) {
      Special exact, kept;
      for (Special* s : {&exact, &kept}) {
        kind.spoil(*s);
        s->dhead_stride = where.dhead_stride;
      }
      exact.run(recompute, kind.logit_scale);
      tileloss_plan_options wishes = all;
      if (where.share < 1) wishes.workspace_bytes = budget_for(kept.run(all, kind.logit_scale), where.share);
      const tileloss_plan plan = kept.run(wishes, kind.logit_scale);
      EXPECT_EQ(plan.kept_columns < Special::kVocab, where.share < 1);
      EXPECT_EQ(plan.kept_rows, where.dhead_stride == Special::kWidth ? Special::kRows : 0);
      const std::string what = std::string(kind.name) + ", " + std::to_string(plan.kept_columns) + " columns and " +
                               std::to_string(plan.kept_rows) + " rows kept";
      expect_alike(kept.dhidden, exact.dhidden, what + ", dhidden");
      expect_alike(kept.dhead, exact.dhead, what + ", dhead");
      expect_alike(kept.dbias, exact.dbias, what + ", dbias");
      EXPECT_EQ(std::memcmp(kept.logp.data(), exact.logp.data(), kept.logp.size() * sizeof(float)), 0) << what;
    }
  }
}

}  // namespace
}  // namespace tileloss::test
