// gradcheck of rows whose softmax runs over a set of columns: the shipped kernels pass, and every wrong one is rejected.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/judge/strict_support.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

const std::string kBase =
    "batch_size=3 seq_len=11 vocab_size=703 valid_vocab=690 seed=3 ignore_prob=0.2 source.std=2 dtype=bf16 "
    "outputs=[logp, lse, entropy, argmax, correct, log_sum_sq_probs, mean_logit] ";

struct Checked {
  std::string name, settings;
};

const std::vector<Checked> kChecked{
    {"cross_entropy", "loss=cross_entropy label_smoothing=0.1 z_loss=0.01 reduction=none upstream=per_row"},
    {"logprobs", "loss=logprobs softcap=20 temperature=0.9 upstream=per_row"},
    {"policy_loss",
     "loss=policy_loss preset=grpo aggregation=none upstream=per_row mask_prob=0.2 old_logp_noise_scale=0.2 "
     "entropy_coef=0.01 entropy_reduction=as_loss"},
    {"distillation",
     "loss=distillation divergence=jsd beta=0.3 label_weight=0.3 divergence_weight=0.7 reduction=none "
     "upstream=per_row mask_prob=0.2"},
    {"soft_cross_entropy", "loss=soft_cross_entropy label_smoothing=0.1 reduction=none upstream=per_row"},
    {"sparse_distillation", "loss=sparse_distillation tail=lump source.teacher_columns=40 reduction=none upstream=per_row"},
};

class GradcheckAllowed : public testing::TestWithParam<Checked> {};

INSTANTIATE_TEST_SUITE_P(Of, GradcheckAllowed, testing::ValuesIn(kChecked), [](const auto& param) { return param.param.name; });

TEST_P(GradcheckAllowed, TheKernelsPassWithEveryKindOfSet) {
  const bool is_policy = GetParam().name == "policy_loss";
  for (const std::string& isa : supported_isas()) {
    for (const Sets& variant : std::vector<Sets>{{"allowed=all", "kernel.in_place=true"},
                                                 {"allowed=sparse", "dtype=fp32"},
                                                 {"allowed=half", "kernel.row_groups=true"},
                                                 {"allowed=runs", "dtype=fp16"},
                                                 {"allowed=shared"},
                                                 {"allowed=half", "allowed_rows=[all, one]"},
                                                 {"allowed=runs", "allowed_rows=[label_outside, empty]"}}) {
      if (is_policy && variant.back().find("empty") != std::string::npos) continue;  // its old logp would be NaN
      Sets sets = joined({"kernel.isa=" + isa}, variant);
      const GradcheckCall check(kBase + GetParam().settings, sets);
      EXPECT_EQ(check.failures(), Sets()) << isa << " " << testing::PrintToString(variant);
    }
  }
}

TEST_P(GradcheckAllowed, EveryMutantIsCaught) {
  for (const std::string kind : {"half", "runs", "sparse"}) {
    const GradcheckCall check(kBase + GetParam().settings, {"allowed=" + kind});
    expect_mutants(check, {"allowed_ignored", "allowed_shifted", "allowed_of_neighbour"},
                   {"allowed_ignored_in_value", "allowed_of_neighbour_in_value", "classes_of_vocabulary_in_value"});
  }
}

TEST(GradcheckAllowedMutants, TheVocabularysNumberOfClassesIsCaughtInTheGradient) {
  for (const std::string& settings : {kChecked[0].settings, kChecked[1].settings, kChecked[4].settings}) {
    expect_mutants(GradcheckCall(kBase + settings, {"allowed=half", "dtype=fp32"}), {"classes_of_vocabulary"}, {});
  }
}

TEST(GradcheckAllowedKernels, ThatComputeSomethingElseAreRejected) {
  expect_rejected(kBase + kChecked[0].settings, {"allowed=half"},
                  {
                      {"no sets", [](Function&, tileloss_args& args) { args.allowed = {}; }},
                      {"the first row's set", [](Function&, tileloss_args& args) { args.allowed.row_stride = 0; }},
                  },
                  {"/dlogits/nonzero_where_ignored", "per_loss", "lse", "mean_logit"});
}

TEST(GradcheckAllowedLinear, TheKernelsPassAndEveryMutantIsCaught) {
  const std::string linear = "level=linear hidden_size=48 ";
  for (const Checked& checked : kChecked) {
    for (const std::string dtype : {"bf16", "fp32"}) {
      for (const std::string kind : {"half", "runs", "shared"}) {
        const GradcheckCall check(linear + kBase + checked.settings,
                                  {"allowed=" + kind, "dtype=" + dtype, "gradients=[dhidden, dhead, dbias]", "bias=random"});
        EXPECT_EQ(check.failures(), Sets()) << checked.name << " " << dtype << " " << kind;
        const std::vector<MutantVerdict> mutants = check.mutants();
        EXPECT_TRUE(is_caught(mutants, "dhidden_allowed_ignored")) << checked.name;
        EXPECT_TRUE(is_caught(mutants, "dhead_allowed_shifted")) << checked.name;
      }
    }
  }
}

TEST(GradcheckAllowedStrict, NothingIsFoundAndWordsAreGuarded) {
  const std::string text = kBase + kChecked[0].settings;
  for (const Sets& sets : std::vector<Sets>{
           {"allowed=half"}, {"allowed=half", "ignore_prob=1"}, {"allowed=shared"}, {"allowed=runs", "valid_vocab=703"}}) {
    EXPECT_EQ(strict_report(sets, call, text).findings, Sets()) << testing::PrintToString(sets);
  }
  const auto past = [](const tileloss_args& args, const tileloss_run&) {
    read_at<int32_t>(args.allowed.data, args.allowed.row_stride + 22);
  };
  EXPECT_TRUE(finds(strict_report({"allowed=half"}, planted(TILELOSS_FORWARD, past), text),
                    "allowed overrun: row 1, 1 element past the end (read), flush right, rows apart"));
  // The words of a row that is not in use.
  const auto unused = [](const tileloss_args& args, const tileloss_run&) {
    const auto* labels = static_cast<const int64_t*>(args.labels.data);
    const int64_t row = std::find(labels, labels + args.labels.size, -100) - labels;
    read_at<int32_t>(args.allowed.data, row * args.allowed.row_stride + 3);
  };
  const StrictReport report = strict_report({"allowed=half"}, planted(TILELOSS_VALUE_AND_GRAD, unused), text);
  EXPECT_FALSE(report.findings.empty());
  for (const std::string& finding : report.findings) {
    EXPECT_TRUE(finding.starts_with("allowed: row ") && finding.find(", column 3 (read)") != std::string::npos) << finding;
    EXPECT_NE(finding.find("rows apart"), std::string::npos) << finding;
  }
}

TEST(GradcheckAllowedFile, TheSetsOfAFileAreThoseOfTheCall) {
  const GradcheckConfig config = config_of(kBase + kChecked[0].settings, {"allowed=half", "allowed_rows=[one]"});
  ThreadTeam team(1);
  const CheckInputs drawn = make_inputs(config, team);
  const std::vector<StoredTensor> tensors = input_tensors(config, drawn);
  const auto found = std::ranges::find(tensors, "allowed", &StoredTensor::name);
  ASSERT_NE(found, tensors.end());
  EXPECT_EQ(found->dtype, "I32");
  EXPECT_EQ(found->shape, (std::vector<int64_t>{33, 22}));

  const std::string of_file =
      "loss=cross_entropy label_smoothing=0.1 valid_vocab=690 source.kind=safetensors source.path=/x.safetensors "
      "source.allowed=allowed";
  const GradcheckConfig read = config_of(of_file, {}, {TensorFile("/x.safetensors", tensors)});
  const CheckInputs inputs = make_inputs(read, team);
  EXPECT_EQ(inputs.allowed.words, drawn.allowed.words);
  EXPECT_EQ(GradcheckCall(read).failures(), Sets());
  // One row of words is a set for all rows.
  std::vector<StoredTensor> shared = tensors;
  auto& words = *std::ranges::find(shared, "allowed", &StoredTensor::name);
  words.shape = {22};
  words.bytes = 22 * 4;
  EXPECT_TRUE(make_inputs(config_of(of_file, {}, {TensorFile("/x.safetensors", shared)}), team).allowed.is_shared);
  words.shape = {2, 22};
  words.bytes = 2 * 22 * 4;
  EXPECT_TRUE(is_refused(refusal(of_file, {}, {TensorFile("/x.safetensors", shared)}),
                         "allowed: expected 22 words a row, 32 columns in each, and one row or at least 33, got [2, 22]"));
}

TEST(GradcheckAllowedConfig, WhatDoesNotGoTogetherIsRefused) {
  expect_config_errors(kBase + kChecked[0].settings,
                       {{{"allowed=some"}, "allowed"},
                        {{"allowed_rows=[one]"}, "allowed_rows: expected allowed beside it, with a set for each row, got none"},
                        {{"allowed=shared", "allowed_rows=[one]"}, "allowed_rows: expected allowed beside it"}});
}

}  // namespace
}  // namespace tileloss::tools
