// gradcheck of class probabilities: the shipped kernels pass on every instruction set, and every wrong one is rejected.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/judge/strict_support.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

const std::string kConfig = "gradcheck_soft_cross_entropy.yaml";
const Sets kSmall = {"vocab_size=255", "seq_len=21"};

class GradcheckSoftLabels : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Of, GradcheckSoftLabels, testing::Values("fp32", "bf16", "fp16"),
                         [](const auto& param) { return param.param; });

TEST_P(GradcheckSoftLabels, TheKernelsPassOnEveryInstructionSet) {
  const std::vector<std::vector<std::string>> variants = {
      {},
      {"reduction=none", "upstream=per_row", "kernel.in_place=true", "label_smoothing=0", "class_weights=none",
       "source.special_rows=[no_class, one_class, doubled, negative, excluded, impossible, probs_nan, probs_inf, logits_inf]"},
      {"reduction=sum", "source.probs_dtype=bf16", "source.special_rows=[]", "kernel.row_groups=false", "valid_vocab=200",
       "mask_prob=0", "temperature=1"},
      {"num_items=12.5", "source.probs_dtype=fp16", "source.probs_zeros=0.99", "softcap=20", "token_weights=none",
       "upstream=ones"}};
  for (const std::string& isa : supported_isas()) {
    for (const std::vector<std::string>& variant : variants) {
      std::vector<std::string> sets = {"dtype=" + GetParam(), "kernel.isa=" + isa};
      sets.insert(sets.end(), variant.begin(), variant.end());
      const GradcheckCall check(kConfig, joined(kSmall, sets));
      EXPECT_EQ(check.failures(), std::vector<std::string>()) << testing::PrintToString(sets);
      EXPECT_GT(check.verdict.checks.rows, 20);
    }
  }
}

TEST_P(GradcheckSoftLabels, EveryMutantIsCaughtByAGateOfWhatItAlters) {
  for (const bool per_row : {false, true}) {
    std::vector<std::string> sets = {"dtype=" + GetParam(), "temperature=1"};
    if (per_row) sets.insert(sets.end(), {"reduction=none", "upstream=per_row"});
    std::set<std::string> of_gradient = {"gradient_halved",  "row_group_off_by_one",    "smoothing_forgotten",
                                         "sum_taken_as_one", "class_weights_forgotten", "label_for_probabilities"};
    std::set<std::string> of_values;
    if (!per_row) of_gradient.insert("ignored_rows_counted");
    if (per_row) {
      of_values = {"smoothing_forgotten_in_value", "class_weights_forgotten_in_value", "label_for_probabilities_in_value"};
    }
    expect_mutants(GradcheckCall(kConfig, joined(kSmall, sets)), of_gradient, of_values);
  }
}

// The shipped kernels, called with something else than the config says.
TEST(GradcheckSoftLabelsKernels, ThatComputeSomethingElseAreRejected) {
  expect_rejected(
      kConfig, kSmall,
      {
          {"smoothing", [](Function& f, tileloss_args&) { f.reset("label_smoothing"); }},
          {"temperature", [](Function& f, tileloss_args&) { f.reset("temperature"); }},
          {"class weights", [](Function&, tileloss_args& args) { args.class_weights = {}; }},
          {"the groups", [](Function&, tileloss_args& args) { args.row_groups.teacher_logits_stride -= args.logits.cols; }},
      },
      {"/dlogits/"});
}

TEST(GradcheckSoftLabelsKernels, TheConfigPassesAndItsInputsAreHandedOver) {
  EXPECT_FALSE(GradcheckCall(kConfig).mutants().empty());
  EXPECT_EQ(drawn_shape(kConfig, {"vocab_size=255"}, "target_probs"), (std::vector<int64_t>{96, 255}));
}

TEST(GradcheckSoftLabelsKernels, ConfigErrorsNameTheKey) {
  expect_config_errors(kConfig, {{{"label_smoothing=2"}, "label_smoothing: "},
                                 {{"source.probs_zeros=2"}, "source.probs_zeros: 2 is out of range"},
                                 {{"source.probs_dtype=int8"}, "source.probs_dtype: 'int8' is none of "},
                                 {{"source.special_rows=[same]"}, "source.special_rows: 'same' is none of no_class, "},
                                 {{"outputs=[divergence]"}, "outputs: 'divergence' is none of"},
                                 {{"temperature_on=logprob"}, "temperature_on: expected logits, got logprob"},
                                 {{"source.teacher=near"}, "source.teacher: unknown key"}});
}

// ----------------------------------------------------------------------------------------------------------------- strict

constexpr const char* kStrict =
    "loss=soft_cross_entropy label_smoothing=0.1 batch_size=2 seq_len=4 vocab_size=1000 dtype=bf16 seed=3 source.std=2 "
    "source.probs_dtype=bf16 outputs=[logp, lse, entropy, argmax, correct]";

TEST(StrictSoftLabels, KernelsTouchNothingButTheirTensors) {
  for (const std::string& isa : supported_isas()) {
    for (const char* dtype : {"fp32", "bf16", "fp16"}) {
      for (const char* columns : {"1", "17", "1000"}) {
        const std::vector<std::string> sets = {"kernel.isa=" + isa, std::string("dtype=") + dtype, "mask_prob=0.3",
                                               std::string("source.probs_dtype=") + dtype, std::string("vocab_size=") + columns};
        const StrictReport report = strict_report(sets, call, kStrict);
        EXPECT_TRUE(report.findings.empty()) << testing::PrintToString(sets) << "\n" << report.text();
        EXPECT_GE(report.calls, 3);
        EXPECT_EQ(report.layouts, 7);
      }
    }
  }
}

TEST(StrictSoftLabels, AccessesBesideTheProbabilitiesAreCaught) {
  const auto past = [](const tileloss_args& args, const tileloss_run&) {
    read_at<uint16_t>(args.target_probs.data, 7 * args.target_probs.row_stride + 1000);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, past), kStrict),
                    "target_probs overrun: row 7, 1 element past the end (read), flush right, soft_cross_entropy forward"));
  const auto groups = [](const tileloss_args& args, const tileloss_run&) {
    if (args.row_groups.rows > 0) read_at<uint16_t>(args.target_probs.data, args.row_groups.teacher_logits_stride - 1);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, groups), kStrict),
                    "target_probs overrun: row 4, 1 element before the start (read), flush left, groups of rows"));
}

}  // namespace
}  // namespace tileloss::tools
