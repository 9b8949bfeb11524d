// gradcheck of a teacher of which some columns are known: the shipped kernels pass on every instruction set, and every wrong one
// is rejected.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/judge/strict_support.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

const std::string kConfig = "gradcheck_sparse_distillation.yaml";
const Sets kSmall = {"vocab_size=255", "seq_len=21"};

const std::vector<std::string> kTails = {"lump", "ignore", "renormalise"};

class GradcheckSparse : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Of, GradcheckSparse, testing::Values("fp32", "bf16", "fp16"),
                         [](const auto& param) { return param.param; });

TEST_P(GradcheckSparse, TheKernelsPassOnEveryInstructionSet) {
  const std::vector<std::vector<std::string>> variants = {
      {"source.special_rows=[no_columns, gaps]"},
      {"reduction=none", "upstream=per_row", "label_weight=0", "kernel.in_place=true", "mask_prob=0.5",
       "source.special_rows=[no_columns, gaps, doubled, teacher_zero, student_zero, teacher_nan, student_inf]"},
      {"num_items=12.5", "source.teacher_columns=1", "source.special_rows=[]", "kernel.row_groups=false", "valid_vocab=200",
       "softcap=20", "token_weights=none", "expect_mostly_zero=true"}};
  for (const std::string& isa : supported_isas()) {
    for (const std::string& tail : kTails) {
      for (const std::string& divergence : kDivergences) {
        for (const std::vector<std::string>& variant : variants) {
          Sets sets = joined({"dtype=" + GetParam(), "kernel.isa=" + isa, "tail=" + tail}, of_divergence(divergence));
          sets.insert(sets.end(), variant.begin(), variant.end());
          if (tail == "renormalise") sets.emplace_back("expect_mostly_zero=true");  // the other columns have no gradient
          const GradcheckCall check(kConfig, joined(kSmall, sets));
          EXPECT_EQ(check.failures(), std::vector<std::string>()) << testing::PrintToString(sets);
          EXPECT_GT(check.verdict.checks.rows, 10);
        }
      }
    }
  }
}

// In values, seen in the loss of a row alone.
bool is_of_rows(const std::string& mutant) {
  return mutant == "square_forgotten" || mutant == "label_term_dropped" || mutant == "label_temperature_ignored";
}

// The mutants that the options leave room for.
std::set<std::string> mutants_of(const std::string& divergence) {
  std::set<std::string> names = {"square_forgotten",         "base_2", "label_term_dropped", "other_tail", "neighbours_logprobs",
                                 "label_temperature_ignored"};
  if (divergence.ends_with("_kl")) names.insert("direction_swapped");
  if (divergence == "jsd" || divergence.starts_with("skew")) names.insert("beta_swapped");
  return names;
}

TEST_P(GradcheckSparse, EveryMutantIsCaughtByAGateOfWhatItAlters) {
  for (const std::string& divergence : kDivergences) {
    for (const bool per_row : {false, true}) {
      Sets sets = joined({"dtype=" + GetParam(), "source.special_rows=[no_columns, gaps]"}, of_divergence(divergence));
      if (per_row) sets.insert(sets.end(), {"reduction=none", "upstream=per_row"});
      std::set<std::string> of_gradient = mutants_of(divergence), of_values = {"agreement_flipped"};
      of_gradient.insert(per_row ? "first_row_upstream" : "ignored_rows_counted");
      for (const std::string& name : mutants_of(divergence)) {
        if (per_row || !is_of_rows(name)) of_values.insert(name + "_in_value");
      }
      SCOPED_TRACE(divergence);
      expect_mutants(GradcheckCall(kConfig, joined(kSmall, sets)), of_gradient, of_values);
    }
  }
}

// The shipped kernels, called with something else than the config says.
TEST(GradcheckSparseKernels, ThatComputeSomethingElseAreRejected) {
  expect_rejected(kConfig, kSmall,
                  {
                      {"tail", [](Function& f, tileloss_args&) { f.set_choice("tail", "renormalise"); }},
                      {"divergence", [](Function& f, tileloss_args&) { f.set_choice("divergence", "skew_forward_kl"); }},
                      {"temperature", [](Function& f, tileloss_args&) { f.reset("temperature"); }},
                      {"the last column",
                       [](Function&, tileloss_args& args) {
                         args.teacher_ids.cols = args.teacher_logprobs.cols = args.teacher_ids.cols - 1;
                       }},
                      {"weights", [](Function&, tileloss_args& args) { args.token_weights = {}; }},
                  },
                  {"/dlogits/"});
}

TEST(GradcheckSparseKernels, TheConfigPassesAndItsInputsAreHandedOver) {
  const GradcheckCall check(kConfig);
  EXPECT_FALSE(check.mutants().empty());
  EXPECT_EQ(check.metrics()["fwd/agreement_mismatches"], 0);
  for (const char* name : {"teacher_ids", "teacher_logprobs"}) {
    EXPECT_EQ(drawn_shape(kConfig, {"vocab_size=255"}, name), (std::vector<int64_t>{96, 20}));
  }
}

TEST(GradcheckSparseKernels, ConfigErrorsNameTheKey) {
  expect_config_errors(kConfig, {{{"tail=half"}, "tail: 'half' is none of lump, "},
                                 {{"source.teacher_columns=0"}, "source.teacher_columns: 0 is out of range"},
                                 {{"source.special_rows=[same]"}, "source.special_rows: 'same' is none of no_columns, "},
                                 {{"teacher_temperature=2"}, "teacher_temperature: unknown key"},
                                 {{"source.teacher=near"}, "source.teacher: unknown key"}});
}

// ----------------------------------------------------------------------------------------------------------------- strict

constexpr const char* kStrict =
    "loss=sparse_distillation divergence=jsd label_weight=0.3 divergence_weight=0.7 batch_size=2 seq_len=4 vocab_size=1000 "
    "dtype=bf16 seed=3 source.std=2 source.teacher_columns=5 source.special_rows=[gaps] outputs=[logp, lse, entropy, "
    "argmax, correct, divergence, teacher_entropy, agreement]";

TEST(StrictSparse, KernelsTouchNothingButTheirTensors) {
  for (const std::string& isa : supported_isas()) {
    for (const char* dtype : {"fp32", "bf16", "fp16"}) {
      for (const char* columns : {"1", "17", "1000"}) {
        const std::vector<std::string> sets = {"kernel.isa=" + isa, std::string("dtype=") + dtype, "mask_prob=0.3",
                                               std::string("vocab_size=") + columns};
        const StrictReport report = strict_report(sets, call, kStrict);
        EXPECT_TRUE(report.findings.empty()) << testing::PrintToString(sets) << "\n" << report.text();
        EXPECT_GE(report.calls, 3);
        EXPECT_EQ(report.layouts, 7);
      }
    }
  }
}

TEST(StrictSparse, AccessesBesideTheTeachersColumnsAreCaught) {
  const auto ids = [](const tileloss_args& args, const tileloss_run&) {
    read_at<int64_t>(args.teacher_ids.data, 7 * args.teacher_ids.row_stride + 5);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, ids), kStrict),
                    "teacher_ids overrun: row 7, 1 element past the end (read), flush right, sparse_distillation forward"));
  const auto logprobs = [](const tileloss_args& args, const tileloss_run&) {
    read_at<float>(args.teacher_logprobs.data, 3 * args.teacher_logprobs.row_stride - 1);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_BACKWARD, logprobs), kStrict),
                    "teacher_logprobs overrun: row 3, 1 element before the start (read), flush left, rows apart"));
}

}  // namespace
}  // namespace tileloss::tools
