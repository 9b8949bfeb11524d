// gradcheck of what a row is compared with besides its label - a teacher, some of its columns, class probabilities: the shipped
// kernels pass on every instruction set, and every wrong one is rejected.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/judge/strict_support.h"
#include "tests/judge/teacher_mutants.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

const std::string kDistillation = "gradcheck_distillation.yaml";
const std::string kSparse = "gradcheck_sparse_distillation.yaml";
const std::string kSoft = "gradcheck_soft_cross_entropy.yaml";
const Sets kSmall = {"vocab_size=255", "seq_len=21"};

void expect_pass(const std::string& config, const Sets& sets, const std::vector<Sets>& variants, int64_t rows) {
  for (const std::string& isa : supported_isas()) {
    for (const Sets& variant : variants) {
      const GradcheckCall check(config, joined(joined(joined(kSmall, {"kernel.isa=" + isa}), sets), variant));
      EXPECT_EQ(check.failures(), Sets()) << isa << " " << testing::PrintToString(joined(sets, variant));
      EXPECT_GT(check.verdict.checks.rows, rows);
    }
  }
}

// Of a teacher, by divergence and dtype.
class GradcheckTeacher : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

INSTANTIATE_TEST_SUITE_P(Of, GradcheckTeacher,
                         testing::Combine(testing::ValuesIn(kDivergences), testing::Values("fp32", "bf16", "fp16")),
                         [](const auto& param) { return std::get<0>(param.param) + "_" + std::get<1>(param.param); });

TEST_P(GradcheckTeacher, TheKernelsPassOnEveryInstructionSet) {
  const auto& [divergence, dtype] = GetParam();
  expect_pass(kDistillation, joined(of_divergence(divergence), {"dtype=" + dtype}),
              {{},
               {"reduction=none", "upstream=per_row", "label_weight=0", "divergence_weight=1", "kernel.in_place=true",
                "source.special_rows=[same,confident,opposite,teacher_zeros,student_zeros,both_zeros,teacher_nan,student_inf]"},
               {"reduction=sum", "source.teacher=wide", "source.special_rows=[]", "kernel.row_groups=true", "valid_vocab=200",
                "teacher_softcap=20", "teacher_logit_scale=0.5", "mask_prob=0"},
               {"num_items=12.5", "source.teacher_noise=0.01", "softcap=20", "label_weight=1", "divergence_weight=0",
                "token_weights=none", "upstream=ones", "source.special_rows=[same,confident,teacher_zeros]"}},
              20);
}

TEST_P(GradcheckTeacher, OfSomeColumnsTheKernelsPassOnEveryInstructionSet) {
  const auto& [divergence, dtype] = GetParam();
  for (const std::string tail : {"lump", "ignore", "renormalise"}) {
    Sets sets = joined(of_divergence(divergence), {"dtype=" + dtype, "tail=" + tail});
    if (tail == "renormalise") sets.emplace_back("expect_mostly_zero=true");  // the other columns have no gradient
    expect_pass(kSparse, sets,
                {{"source.special_rows=[no_columns, gaps]"},
                 {"reduction=none", "upstream=per_row", "label_weight=0", "kernel.in_place=true", "mask_prob=0.5",
                  "source.special_rows=[no_columns, gaps, doubled, teacher_zero, student_zero, teacher_nan, student_inf]"},
                 {"num_items=12.5", "source.teacher_columns=1", "source.special_rows=[]", "kernel.row_groups=false",
                  "valid_vocab=200", "softcap=20", "token_weights=none", "expect_mostly_zero=true"}},
                10);
  }
}

// In values, the term of the label and the square are seen in the loss of a row alone.
TEST_P(GradcheckTeacher, EveryMutantIsCaughtByAGateOfWhatItAlters) {
  const auto& [divergence, dtype] = GetParam();
  const std::set<std::string> of_rows = {"square_forgotten", "label_term_dropped", "label_temperature_ignored"};
  const bool is_infinite = divergence == "reverse_kl" || divergence == "jeffreys";
  for (const auto& [config, special_rows] :
       {std::pair(kDistillation, is_infinite ? "same,confident" : "same,confident,teacher_zeros"),
        std::pair(kSparse, "no_columns,gaps")}) {
    const std::set<std::string> names = teacher_mutants(divergence, config == kSparse);
    for (const bool per_row : {false, true}) {
      Sets sets =
          joined(of_divergence(divergence), {"dtype=" + dtype, std::string("source.special_rows=[") + special_rows + "]"});
      if (per_row) sets.insert(sets.end(), {"reduction=none", "upstream=per_row"});
      std::set<std::string> of_gradient = names, of_values = {"agreement_flipped"};
      of_gradient.insert(per_row ? "first_row_upstream" : "ignored_rows_counted");
      for (const std::string& name : names) {
        if (name == "mean_dropped" || name == "mixture_forgotten") continue;
        if (per_row || !of_rows.contains(name)) of_values.insert(name + "_in_value");
      }
      expect_mutants(GradcheckCall(config, joined(kSmall, sets)), of_gradient, of_values);
    }
  }
}

class GradcheckSoftLabels : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Of, GradcheckSoftLabels, testing::Values("fp32", "bf16", "fp16"),
                         [](const auto& param) { return param.param; });

TEST_P(GradcheckSoftLabels, TheKernelsPassOnEveryInstructionSet) {
  expect_pass(
      kSoft, {"dtype=" + GetParam()},
      {{},
       {"reduction=none", "upstream=per_row", "kernel.in_place=true", "label_smoothing=0", "class_weights=none",
        "source.special_rows=[no_class, one_class, doubled, negative, excluded, impossible, probs_nan, probs_inf, logits_inf]"},
       {"reduction=sum", "source.probs_dtype=bf16", "source.special_rows=[]", "kernel.row_groups=false", "valid_vocab=200",
        "mask_prob=0", "temperature=1"},
       {"num_items=12.5", "source.probs_dtype=fp16", "source.probs_zeros=0.99", "softcap=20", "token_weights=none",
        "upstream=ones"}},
      20);
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
    expect_mutants(GradcheckCall(kSoft, joined(kSmall, sets)), of_gradient, of_values);
  }
}

// A mask that is left out leaves labels that are no class.
tileloss_vector label_column(const tileloss_args& args) {
  static std::vector<int64_t> labels;
  labels.assign(static_cast<const int64_t*>(args.labels.data), static_cast<const int64_t*>(args.labels.data) + args.labels.size);
  for (int64_t& label : labels) label = label >= args.logits.cols || label == -1 ? 0 : label;
  return tileloss_make_vector(labels.data(), TILELOSS_INT64, args.labels.size);
}

// The shipped kernels, called with something else than the config says.
TEST(GradcheckTargetsKernels, ThatComputeSomethingElseAreRejected) {
  expect_rejected(
      kDistillation, joined(kSmall, {"kernel.row_groups=true"}),
      {
          {"divergence", [](Function& f, tileloss_args&) { f.set_choice("divergence", "skew_forward_kl"); }},
          {"beta", [](Function& f, tileloss_args&) { f.reset("beta"); }},
          {"label_weight", [](Function& f, tileloss_args&) { f.reset("label_weight"); }},
          {"divergence_weight", [](Function& f, tileloss_args&) { f.reset("divergence_weight"); }},
          {"label_temperature", [](Function& f, tileloss_args&) { f.reset("label_temperature"); }},
          {"teacher_temperature", [](Function& f, tileloss_args&) { f.reset("teacher_temperature"); }},
          {"square", [](Function& f, tileloss_args&) { f.reset("scale_by_temperature_squared"); }},
          {"the sides", [](Function&, tileloss_args& args) { std::swap(args.logits.data, args.teacher_logits.data); }},
          {"the teacher", [](Function&, tileloss_args& args) { args.teacher_logits.data = args.logits.data; }},
          {"the teacher's groups",
           [](Function&, tileloss_args& args) { args.row_groups.teacher_logits_stride -= args.logits.cols; }},
          {"the mask",
           [](Function&, tileloss_args& args) {
             args.mask = {};
             args.labels = label_column(args);
           }},
      },
      {"/dlogits/"});
  expect_rejected(kSparse, kSmall,
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
  expect_rejected(
      kSoft, kSmall,
      {
          {"smoothing", [](Function& f, tileloss_args&) { f.reset("label_smoothing"); }},
          {"temperature", [](Function& f, tileloss_args&) { f.reset("temperature"); }},
          {"class weights", [](Function&, tileloss_args& args) { args.class_weights = {}; }},
          {"the groups", [](Function&, tileloss_args& args) { args.row_groups.teacher_logits_stride -= args.logits.cols; }},
      },
      {"/dlogits/"});
}

TEST(GradcheckTargetsKernels, TheConfigsPassWithTheirMetrics) {
  for (const std::string& config : {kDistillation, kSparse, kSoft}) {
    const GradcheckCall check(config);
    EXPECT_FALSE(check.mutants().empty()) << config;
    if (config == kSoft) continue;
    const Json metrics = check.metrics();
    EXPECT_EQ(metrics["fwd/agreement_mismatches"], 0) << config;
    if (config == kDistillation) {
      EXPECT_LT(metrics["fwd/divergence_max_abs"], 1e-5);
    }
  }
  EXPECT_TRUE(
      has_part(GradcheckCall(kDistillation, {"tolerances.dlogits_max_abs=1e-12"}).failures(), "backward/dlogits_max_abs"));
}

TEST(GradcheckTargetsKernels, ARowsTargetsAreHandedOver) {
  for (const char* name : {"teacher_ids", "teacher_logprobs"}) {
    EXPECT_EQ(drawn_shape(kSparse, {"vocab_size=255"}, name), (std::vector<int64_t>{96, 20}));
  }
  EXPECT_EQ(drawn_shape(kSoft, {"vocab_size=255"}, "target_probs"), (std::vector<int64_t>{96, 255}));
}

TEST(GradcheckTargetsKernels, ConfigErrorsNameTheKey) {
  expect_config_errors(kDistillation, {{{"divergence=kl"}, "divergence: 'kl' is none of forward_kl, "},
                                       {{"beta=1"}, "beta: expected a number > 0 and < 1"},
                                       {{"label_weight=-1"}, "label_weight: "},
                                       {{"source.teacher=far"}, "source.teacher: 'far' is none of near, same, normal, "},
                                       {{"source.special_rows=[sure]"}, "source.special_rows: 'sure' is none of same, "},
                                       {{"outputs=[divergences]"}, "outputs: 'divergences' is none of"},
                                       {{"mask_prob=2"}, "mask_prob: 2 is out of range"},
                                       {{"class_weights=random"}, "class_weights: "},
                                       {{"loss=linear_distillation"}, "loss: 'linear_distillation' is none of cross_entropy, "}});
  expect_config_errors(kSparse, {{{"tail=half"}, "tail: 'half' is none of lump, "},
                                 {{"source.teacher_columns=0"}, "source.teacher_columns: 0 is out of range"},
                                 {{"source.special_rows=[same]"}, "source.special_rows: 'same' is none of no_columns, "},
                                 {{"teacher_temperature=2"}, "teacher_temperature: unknown key"},
                                 {{"source.teacher=near"}, "source.teacher: unknown key"}});
  expect_config_errors(kSoft, {{{"label_smoothing=2"}, "label_smoothing: "},
                               {{"source.probs_zeros=2"}, "source.probs_zeros: 2 is out of range"},
                               {{"source.probs_dtype=int8"}, "source.probs_dtype: 'int8' is none of "},
                               {{"source.special_rows=[same]"}, "source.special_rows: 'same' is none of no_class, "},
                               {{"outputs=[divergence]"}, "outputs: 'divergence' is none of"},
                               {{"temperature_on=logprob"}, "temperature_on: expected logits, got logprob"},
                               {{"source.teacher=near"}, "source.teacher: unknown key"}});
  // Of other losses they are no keys and no outputs.
  expect_config_errors("gradcheck_ce_edges.yaml", {{{"source.teacher=near"}, "source.teacher: unknown key"},
                                                   {{"outputs=[divergence]"}, "outputs: 'divergence' is none of"}});
  expect_config_errors("gradcheck_logprobs.yaml", {{{"source.teacher=near"}, "source.teacher: unknown key"},
                                                   {{"outputs=[divergence]"}, "outputs: 'divergence' is none of"},
                                                   {{"mask_prob=0.1"}, "mask_prob: unknown key"}});
}

// A student that another program has stored, and perhaps its teacher.
class StoredTeacher : public testing::Test {
 protected:
  const std::string kStored = "gradcheck_distillation_safetensors.yaml";
  const std::string kPath = "source.teacher_path=/teacher.safetensors";

  std::vector<TensorFile> file(const char* dtype, std::vector<int64_t> shape) const {
    return {TensorFile("/teacher.safetensors", {stored("t", dtype, std::move(shape), elements_)})};
  }

  std::vector<uint16_t> elements_ = std::vector<uint16_t>(16 * 30522);  // logits of 0: a uniform teacher
};

TEST_F(StoredTeacher, IsReadBesideTheLogits) {
  const GradcheckCall check(config_of(
      kStored, {kPath, "source.teacher=t", "label_weight=0", "divergence_weight=1", "divergence=reverse_kl", "temperature=1"},
      file("BF16", {16, 30522})));
  EXPECT_FALSE(check.mutants().empty());
  // KL(p | uniform) = log V - H(p), in means over the rows in use.
  EXPECT_GT(check.verdict.loss_ref, 1.0);
  EXPECT_LT(check.verdict.loss_ref, std::log(30522.0));
  EXPECT_EQ(check.inputs.used_rows().size(), 14U);
  // Of the student's own logits the loss is 0, and so is the gradient.
  const GradcheckCall same(kStored, {"source.teacher=logits", "label_weight=0", "expect_mostly_zero=true"});
  EXPECT_EQ(same.failures(), Sets());
  EXPECT_EQ(same.verdict.loss_kernel, 0.0);
}

TEST_F(StoredTeacher, NearTheStudentWhereTheFileHasNone) { EXPECT_FALSE(GradcheckCall(kStored).mutants().empty()); }

TEST_F(StoredTeacher, ThatDoesNotFitIsRefused) {
  const auto refused = [&](const std::string& name, const char* dtype, std::vector<int64_t> shape) {
    return refusal(kStored, {kPath, "source.teacher=" + name}, file(dtype, std::move(shape)));
  };
  EXPECT_TRUE(is_refused(refused("t", "F16", {16, 30522}), "t: expected the student's dtype, bfloat16, got F16"));
  EXPECT_TRUE(is_refused(refused("t", "BF16", {30522, 16}),
                         "t: expected 30522 columns, as the student has, and at least 16 rows, got [30522, 16]"));
  EXPECT_TRUE(is_refused(refused("u", "BF16", {16, 30522}), "no tensor 'u'"));
  expect_config_errors(
      kStored, {{{kPath}, "source.teacher_path: expected source.teacher beside it"},
                {{"source.teacher=logits", "source.teacher_noise=1"}, "source.teacher_noise: only where the teacher is near"},
                {{"mask_prob=0.5"}, "mask_prob: the mask comes from the file"}});
}

}  // namespace
}  // namespace tileloss::tools
