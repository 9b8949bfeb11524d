// gradcheck --row: one row at every stage, kernel beside oracle, and the stage that is wrong is the one that is marked.
#include "judge/row_trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

constexpr const char* kCrossEntropy =
    "loss=cross_entropy batch_size=2 seq_len=9 vocab_size=3001 valid_vocab=2990 dtype=bf16 seed=3 ignore_prob=0.2 "
    "label_smoothing=0.1 z_loss=1e-3 class_weights=random token_weights=random upstream=random softcap=30 source.std=2 "
    "outputs=[logp, lse, entropy, argmax, correct, log_sum_sq_probs]";
constexpr const char* kLogprobs =
    "loss=logprobs batch_size=2 seq_len=9 vocab_size=300 dtype=fp32 upstream=per_row outputs=[logp, lse, entropy] "
    "temperature=0.7 temperature_on=logprob";
constexpr const char* kPolicy =
    "loss=policy_loss preset=grpo batch_size=3 seq_len=11 vocab_size=300 dtype=bf16 mask_prob=0.2 beta=0.1 "
    "entropy_coef=0.01 old_logp_noise_scale=0.1 ref_logp_noise_scale=0.1 source.std=2";
constexpr const char* kLinear =
    "level=linear loss=cross_entropy batch_size=2 seq_len=20 vocab_size=500 hidden_size=48 dtype=bf16 bias=random "
    "ignore_prob=0.2 source.std=2 gradients=[dhidden, dhead] outputs=[logp, lse, entropy, argmax, correct, "
    "log_sum_sq_probs, mean_logit]";

constexpr const char* kLinearLogprobs =
    "level=linear loss=logprobs batch_size=2 seq_len=9 vocab_size=500 hidden_size=48 dtype=fp32 upstream=per_row "
    "ignore_prob=0.2 softcap=20 source.std=2 outputs=[logp, lse, entropy]";
constexpr const char* kLinearPolicy =
    "level=linear loss=policy_loss preset=gspo batch_size=3 seq_len=7 vocab_size=500 hidden_size=48 dtype=bf16 "
    "mask_prob=0.2 entropy_coef=0.01 old_logp_noise_scale=0.1 source.std=2";

struct TracedRun {
  explicit TracedRun(const std::string& text, const Sets& sets = {}, const KernelCall& kernel = call)
      : TracedRun(config_of(text, sets), kernel) {}
  explicit TracedRun(GradcheckConfig given, const KernelCall& kernel = call)
      : config(std::move(given)), inputs(make_inputs(config, team)), results(run_kernels(config, inputs, kernel)) {}

  RowTrace trace(int64_t row, std::optional<int64_t> column = std::nullopt) const {
    return trace_row(config, inputs, results, row, column);
  }
  int64_t used_row() const {
    int64_t row = 0;
    while (inputs.is_ignored(row)) ++row;
    return row;
  }
  int64_t ignored_row() const {
    int64_t row = 0;
    while (!inputs.is_ignored(row)) ++row;
    return row;
  }
  char* dlogits(size_t gradient, int64_t row) const {
    return results.gradients[gradient].dlogits.data() + inputs.row_offset(row);
  }

  ThreadTeam team{1};
  GradcheckConfig config;
  CheckInputs inputs;
  KernelResults results;
};

const Stage& stage(const RowTrace& trace, const std::string& name) {
  const auto found = std::find_if(trace.stages.begin(), trace.stages.end(), [&](const Stage& s) { return s.name == name; });
  if (found != trace.stages.end()) return *found;
  ADD_FAILURE() << "no stage " << name;
  static const Stage none;
  return none;
}

using Names = std::vector<std::string>;

class RowTraces : public testing::TestWithParam<const char*> {};

TEST_P(RowTraces, EveryRowOfAGoodRunAgreesAtEveryStage) {
  const TracedRun run(GetParam());
  for (int64_t row = 0; row < run.inputs.rows; ++row) {
    const RowTrace trace = run.trace(row);
    EXPECT_EQ(trace.failures(), Names()) << "row " << row << "\n" << trace.to_json().dump(1);
    EXPECT_EQ(trace.ignored.empty(), !run.inputs.is_ignored(row));
  }
}

TEST_P(RowTraces, BothSidesAreThereAndCloseBeforeTheyAreJudged) {
  const TracedRun run(GetParam());
  const RowTrace trace = run.trace(run.used_row());
  Names names = {"state/max", "state/sum", "state/label_logit", "logp", "lse"};
  if (run.config.function.is_loss()) names.emplace_back("loss");
  for (const std::string& name : names) {
    const Stage& s = stage(trace, name);
    ASSERT_TRUE(s.kernel && s.oracle && s.difference && s.allowed) << name;
    EXPECT_NEAR(*s.kernel, *s.oracle, 1e-4 * (1 + std::fabs(*s.oracle))) << name;
    EXPECT_LE(*s.difference, *s.allowed) << name;
    EXPECT_LT(*s.allowed, 2e-3 * (1 + std::fabs(*s.oracle))) << name;
  }
  const Stage& p = stage(trace, "p");
  EXPECT_NEAR(*p.oracle + *stage(trace, "one_minus_p").oracle, 1, 1e-12);
  EXPECT_NEAR(*stage(trace, "one_minus_p").kernel, 1 - *p.kernel, 1e-5);
  for (const char* name : {"coefficient/target", "coefficient/prob", "coefficient/prob_logp", "coefficient/uniform"}) {
    EXPECT_TRUE(stage(trace, name).oracle.has_value() && !stage(trace, name).kernel) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, RowTraces,
                         testing::Values(kCrossEntropy, kLogprobs, kPolicy, kLinear, kLinearLogprobs, kLinearPolicy),
                         [](const auto& loss) {
                           return std::string(std::vector{"cross_entropy", "logprobs", "policy_loss", "linear_cross_entropy",
                                                          "linear_logprobs", "linear_policy_loss"}[loss.index]);
                         });

TEST(RowTrace, TheTermsMakeUpTheLoss) {
  const TracedRun ce(kCrossEntropy);
  const RowTrace terms = ce.trace(ce.used_row());
  const auto term = [](const RowTrace& trace, const char* name) { return *stage(trace, std::string("term/") + name).oracle; };
  EXPECT_NEAR(term(terms, "nll") + term(terms, "smoothing") + term(terms, "z_loss"), *stage(terms, "loss").oracle, 1e-12);
  EXPECT_GT(term(terms, "smoothing"), 0);
  const TracedRun policy(kPolicy);
  const int64_t row = policy.used_row();
  const RowTrace token = policy.trace(row);
  EXPECT_NEAR(term(token, "surrogate_factor") * term(token, "surrogate") + 0.1 * term(token, "kl"), *stage(token, "loss").oracle,
              1e-12);
  EXPECT_LT(term(token, "entropy_bonus"), 0);
  EXPECT_EQ(term(token, "advantage"), static_cast<double>(policy.inputs.policy.advantages[static_cast<size_t>(row / 11)]));
  EXPECT_NEAR(
      term(token, "ratio"),
      std::exp(*stage(token, "logp").oracle - static_cast<double>(policy.inputs.policy.old_logp[static_cast<size_t>(row)])),
      1e-9);
}

// The column's own budget is the one that gradcheck's gates are made of.
TEST(RowTrace, WhatIsAllowedIsTheGates) {
  for (const std::string dtype : {"bf16", "fp16", "fp32"}) {
    const TracedRun run(kCrossEntropy, {"dtype=" + dtype});
    const RowTrace trace = run.trace(run.used_row());
    for (const std::string pass : {"value_and_grad/", "backward_from_row_state/"}) {
      const Stage &label = stage(trace, pass + "dlogits/label"), &worst = stage(trace, pass + "dlogits/worst");
      EXPECT_DOUBLE_EQ(*label.difference / *label.allowed, *stage(trace, pass + "dlogits/ulp_target").difference);
      EXPECT_DOUBLE_EQ(*worst.difference / *worst.allowed, *stage(trace, pass + "dlogits/ulp_off_target").difference);
      EXPECT_EQ(label.column, trace.label);
      EXPECT_NE(worst.column, trace.label);
    }
  }
}

// Each is wrong in one place, by no more than a hundredth; the trace of the row names that place, and that of another row none.
TEST(RowTrace, TheStageThatIsWrongIsMarked) {
  const auto scaled = [](auto KernelResults::*values) {
    return [values](TracedRun& run, int64_t row) { (run.results.*values)[static_cast<size_t>(row)] *= 1.01F; };
  };
  const auto output = [](RowOutputIndex which, double (*change)(double)) {
    return [which, change](TracedRun& run, int64_t row) {
      double& value = run.results.outputs[which][static_cast<size_t>(row)];
      value = change(value);
    };
  };
  const auto scale = [](double value) { return static_cast<double>(static_cast<float>(1.01 * value)); };
  const std::vector<std::pair<std::function<void(TracedRun&, int64_t)>, Names>> wrongs = {
      {scaled(&KernelResults::state_max), {"state/max"}},
      {scaled(&KernelResults::state_sum), {"state/sum"}},
      {scaled(&KernelResults::state_label_logit), {"state/label_logit"}},
      {scaled(&KernelResults::state_entropy_sum), {"state/entropy_sum"}},
      {output(kLogp, scale), {"logp", "value_and_grad/logp_same_bits", "p"}},
      {scaled(&KernelResults::fused_logp), {"value_and_grad/logp", "value_and_grad/logp_same_bits"}},
      {output(kLse, scale), {"lse"}},
      {output(kEntropy, scale), {"entropy"}},
      {output(kLogSumSqProbs, scale), {"log_sum_sq_probs"}},
      {output(kArgmax, [](double value) { return value + 1; }), {"argmax"}},
      {output(kCorrect, [](double value) { return 1 - value; }), {"correct"}},
      {scaled(&KernelResults::per_loss), {"loss"}}};
  for (const auto& [wrong, names] : wrongs) {
    TracedRun run(kCrossEntropy);
    const int64_t row = run.used_row();
    wrong(run, row);
    EXPECT_EQ(run.trace(row).failures(), names);
    EXPECT_EQ(run.trace(row + 1).failures(), Names());
  }
}

TEST(RowTrace, TheGradientIsMarkedWhereItIsWrong) {
  constexpr int64_t kColumn = 1234;
  for (const size_t which : {0, 1}) {
    const std::string pass = which == 0 ? "value_and_grad/" : "backward_from_row_state/";
    for (const bool at_label : {true, false}) {
      TracedRun run(kCrossEntropy);
      const int64_t row = run.used_row();
      const int64_t column = at_label ? run.inputs.labels[static_cast<size_t>(row)] : kColumn;
      char* data = run.dlogits(which, row);
      const double value = oracle::decode_at(run.inputs.format, data, column);
      oracle::encode_at(run.inputs.format, data, column, 1.5 * value);
      const RowTrace trace = run.trace(row);
      ASSERT_FALSE(trace.failures().empty());
      EXPECT_EQ(trace.failures().front(), pass + (at_label ? "dlogits/label" : "dlogits/worst"));
      const Stage& marked = stage(trace, trace.failures().front());
      EXPECT_EQ(marked.column, column);
      EXPECT_NEAR(*marked.kernel, 1.5 * *marked.oracle, 0.02 * std::fabs(*marked.oracle));
      for (const std::string& name : trace.failures()) EXPECT_TRUE(name.starts_with(pass)) << name;
      EXPECT_EQ(run.trace(row + 1).failures(), Names());
    }
  }
}

// The kernel itself, told to be wrong: a row's losses and gradients beside a forward that is right.
TEST(RowTrace, AWrongKernelIsMarkedFromWhereItIsWrong) {
  const KernelCall negates = [](const Function& function, tileloss_pass pass, const tileloss_args& args,
                                const tileloss_plan& plan, const tileloss_run* run) {
    call(function, pass, args, plan, run);
    if (pass != TILELOSS_BACKWARD) return;
    for (int64_t i = 0; i < args.dlogits.rows * args.dlogits.row_stride; ++i)
      static_cast<uint16_t*>(args.dlogits.data)[i] ^= 0x8000;
  };
  const TracedRun run(kCrossEntropy, {}, negates);
  const Names failed = run.trace(run.used_row()).failures();
  ASSERT_FALSE(failed.empty());
  EXPECT_EQ(failed.front(), "backward_from_row_state/dlogits/label");
}

TEST(RowTrace, WithTheLmHeadTheRowOfDhiddenIsJudged) {
  TracedRun run(kLinear);
  const int64_t row = run.used_row();
  constexpr int64_t kWidth = 48;
  char* dhidden = run.results.gradients[0].linear[0].data.data();
  for (int64_t h = 0; h < kWidth; ++h) {
    const double value = oracle::decode_at(run.inputs.format, dhidden, row * kWidth + h);
    oracle::encode_at(run.inputs.format, dhidden, row * kWidth + h, 0.5 * value);
  }
  const RowTrace trace = run.trace(row, 7);
  EXPECT_EQ(trace.failures(), (Names{"value_and_grad/dhidden/frobenius", "value_and_grad/dhidden/cap"}));
  const Stage& norm = stage(trace, "value_and_grad/dhidden/norm");
  EXPECT_NEAR(*norm.kernel, 0.5 * *norm.oracle, 0.01 * *norm.oracle);
  EXPECT_EQ(stage(trace, "dlogits/column").column, 7);
  EXPECT_FALSE(stage(trace, "dlogits/label").kernel.has_value());
  EXPECT_EQ(run.trace(row + 1).failures(), Names());
}

TEST(RowTrace, AColumnIsShownInPlaceOfTheWorst) {
  const TracedRun run(kCrossEntropy);
  const int64_t row = run.used_row();
  const RowTrace trace = run.trace(row, 17);
  const Stage& column = stage(trace, "value_and_grad/dlogits/column");
  EXPECT_EQ(column.column, 17);
  EXPECT_EQ(*column.kernel, oracle::decode_at(run.inputs.format, run.dlogits(0, row), 17));
  EXPECT_TRUE(std::none_of(trace.stages.begin(), trace.stages.end(), [](const Stage& s) { return s.name.ends_with("/worst"); }));
  // Padding: nothing but 0 is right.
  EXPECT_EQ(run.trace(row, 2995).failures(), Names());
  oracle::encode_at(run.inputs.format, run.dlogits(0, row), 2995, 1e-9);
  EXPECT_EQ(run.trace(row, 2995).failures(),
            (Names{"value_and_grad/dlogits/column", "value_and_grad/dlogits/nonzero_where_ignored"}));
}

TEST(RowTrace, AnIgnoredRowSaysSoAndMustHoldZeros) {
  TracedRun run(kCrossEntropy), masked(kPolicy);
  EXPECT_EQ(masked.trace(masked.ignored_row()).ignored, "the mask leaves it out");
  const int64_t row = run.ignored_row();
  EXPECT_EQ(run.trace(row).ignored, "its label is ignore_index");
  oracle::encode_at(run.inputs.format, run.dlogits(1, row), 5, 1);
  run.results.outputs[kLse][static_cast<size_t>(row)] = 2;
  const RowTrace trace = run.trace(row);
  EXPECT_EQ(trace.failures(),
            (Names{"lse", "backward_from_row_state/dlogits/worst", "backward_from_row_state/dlogits/nonzero_where_ignored"}));
  EXPECT_EQ(stage(trace, "backward_from_row_state/dlogits/worst").column, 5);
}

// What a row is compared with has its terms, too.
TEST(RowTrace, TargetsHaveTheirTerms) {
  for (const auto& [config, term] : {std::pair("gradcheck_distillation.yaml", "divergence"),
                                     {"gradcheck_soft_cross_entropy.yaml", "soft_nll"},
                                     {"gradcheck_sparse_distillation.yaml", "known_columns"},
                                     {"gradcheck_linear_distillation.yaml", "divergence"},
                                     {"gradcheck_linear_soft_cross_entropy.yaml", "soft_nll"},
                                     {"gradcheck_linear_sparse_distillation.yaml", "known_columns"}}) {
    const RowTrace trace = TracedRun(config, {"vocab_size=255"}).trace(5);
    EXPECT_EQ(trace.failures(), Names()) << config;
    EXPECT_TRUE(stage(trace, std::string("term/") + term).oracle.has_value()) << config;
  }
}

TEST(RowTrace, IsToldAsJson) {
  const TracedRun run(kCrossEntropy);
  const Json json = run.trace(3, 7).to_json();
  EXPECT_EQ(json["row"], 3);
  EXPECT_EQ(json["ignored"], nullptr);
  EXPECT_EQ(json["stages"][0]["stage"], "state/max");
  EXPECT_TRUE(json["stages"][0]["kernel"].is_number());
  const Names failed = TracedRun(kCrossEntropy, {"tolerances.ulp=0"}).trace(3).failures();
  ASSERT_GE(failed.size(), 2U);
  EXPECT_EQ(failed[0], "value_and_grad/dlogits/label");
  EXPECT_EQ(failed[1], "value_and_grad/dlogits/worst");
}

TEST(RowTrace, WhatIsNotThereIsRefusedWithTheRange) {
  const TracedRun run(kCrossEntropy);
  const auto refused = [&](int64_t row, std::optional<int64_t> column) {
    return refusal_of({}, [&] { check_trace_range(run.inputs, row, column); });
  };
  EXPECT_TRUE(is_refused(refused(18, {}), "--row: expected 0 to 17, of 18 rows, got 18"));
  EXPECT_TRUE(is_refused(refused(-1, {}), "-1"));
  EXPECT_TRUE(is_refused(refused(0, 3001), "--column: expected 0 to 3000, of 3001 columns, got 3001"));
  EXPECT_EQ(refused(17, 3000), "");
}

// NaN and infinities on both sides agree.
TEST(RowTrace, RowsOfSpecialValuesAreShown) {
  constexpr int64_t kColumns = 40;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> logits(4 * kColumns, 0.5F);
  logits[3] = kNan;
  logits[kColumns + 3] = kInfinity;
  logits[2 * kColumns + 3] = -kInfinity;
  std::fill_n(logits.begin() + 3 * kColumns, kColumns, -kInfinity);
  const std::vector<int64_t> labels = {1, 2, 3, 4};
  const TensorFile file("/x", {stored("logits", "F32", {4, kColumns}, logits), stored("labels", "I64", {4}, labels)});
  for (const char* set : {"reduction=none", "loss=logprobs"}) {
    const TracedRun run(config_of("loss=cross_entropy source.kind=safetensors source.path=/x", {set}, {file}));
    for (int64_t row = 0; row < 4; ++row) EXPECT_EQ(run.trace(row).failures(), Names()) << set << row;
  }
}

}  // namespace
}  // namespace tileloss::tools
