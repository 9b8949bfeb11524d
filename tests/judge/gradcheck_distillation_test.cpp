// gradcheck of distillation: the shipped kernels pass on every instruction set, and every wrong one is rejected.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/judge/strict_support.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

const std::string kConfig = "gradcheck_distillation.yaml";
const Sets kSmall = {"vocab_size=255", "seq_len=21"};

class GradcheckDistillation : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

INSTANTIATE_TEST_SUITE_P(Of, GradcheckDistillation,
                         testing::Combine(testing::ValuesIn(kDivergences), testing::Values("fp32", "bf16", "fp16")),
                         [](const auto& param) { return std::get<0>(param.param) + "_" + std::get<1>(param.param); });

TEST_P(GradcheckDistillation, TheKernelsPassOnEveryInstructionSet) {
  const auto& [divergence, dtype] = GetParam();
  for (const std::string& isa : supported_isas()) {
    for (const std::vector<std::string>& variant : std::vector<std::vector<std::string>>{
             {},
             {"reduction=none", "upstream=per_row", "label_weight=0", "divergence_weight=1", "kernel.in_place=true",
              "source.special_rows=[same,confident,opposite,teacher_zeros,student_zeros,both_zeros,teacher_nan,student_inf]"},
             {"reduction=sum", "source.teacher=wide", "source.special_rows=[]", "kernel.row_groups=true", "valid_vocab=200",
              "teacher_softcap=20", "teacher_logit_scale=0.5", "mask_prob=0"},
             {"num_items=12.5", "source.teacher_noise=0.01", "softcap=20", "label_weight=1", "divergence_weight=0",
              "token_weights=none", "upstream=ones", "source.special_rows=[same,confident,teacher_zeros]"}}) {
      Sets sets = joined(of_divergence(divergence), {"dtype=" + dtype, "kernel.isa=" + isa});
      sets.insert(sets.end(), variant.begin(), variant.end());
      const GradcheckCall check(kConfig, joined(kSmall, sets));
      EXPECT_EQ(check.failures(), std::vector<std::string>()) << isa << " " << testing::PrintToString(variant);
      EXPECT_GT(check.verdict.checks.rows, 20);
    }
  }
}

// In values, seen in the loss of a row alone.
bool is_of_rows(const std::string& mutant) {
  return mutant == "square_forgotten" || mutant == "label_term_dropped" || mutant == "label_temperature_ignored";
}

// The mutants that the options of this divergence leave room for.
std::set<std::string> mutants_of(const std::string& divergence) {
  std::set<std::string> names = {"teacher_temperature_ignored", "square_forgotten", "base_2", "label_term_dropped",
                                 "label_temperature_ignored"};
  const bool has_direction = divergence.ends_with("_kl");
  const bool has_mixture = divergence == "jsd" || divergence.starts_with("skew");
  if (has_direction) names.insert("direction_swapped");
  if (has_mixture) names.insert({"beta_swapped", "mixture_forgotten"});
  if (divergence != "forward_kl") names.insert("mean_dropped");
  return names;
}

TEST_P(GradcheckDistillation, EveryMutantIsCaughtByAGateOfWhatItAlters) {
  const auto& [divergence, dtype] = GetParam();
  Sets sets = joined(of_divergence(divergence), {"dtype=" + dtype});
  sets.emplace_back("source.special_rows=[same,confident,teacher_zeros]");
  if (divergence == "reverse_kl" || divergence == "jeffreys")
    sets.back() = "source.special_rows=[same,confident]";  // else infinite
  for (const bool per_row : {false, true}) {
    if (per_row) sets.insert(sets.end(), {"reduction=none", "upstream=per_row"});
    std::set<std::string> of_gradient = mutants_of(divergence), of_values = {"agreement_flipped"};
    of_gradient.insert(per_row ? "first_row_upstream" : "ignored_rows_counted");
    for (const std::string& name : mutants_of(divergence)) {
      if (name == "mean_dropped" || name == "mixture_forgotten") continue;
      if (per_row || !is_of_rows(name)) of_values.insert(name + "_in_value");
    }
    expect_mutants(GradcheckCall(kConfig, joined(kSmall, sets)), of_gradient, of_values);
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
TEST(GradcheckDistillationKernels, ThatComputeSomethingElseAreRejected) {
  expect_rejected(
      kConfig, joined(kSmall, {"kernel.row_groups=true"}),
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
}

TEST(GradcheckDistillationKernels, TheConfigPassesWithItsMetrics) {
  const GradcheckCall check(kConfig);
  EXPECT_FALSE(check.mutants().empty());
  const Json metrics = check.metrics();
  EXPECT_LT(metrics["fwd/divergence_max_abs"], 1e-5);
  EXPECT_EQ(metrics["fwd/agreement_mismatches"], 0);
  EXPECT_TRUE(has_part(GradcheckCall(kConfig, {"tolerances.dlogits_max_abs=1e-12"}).failures(), "backward/dlogits_max_abs"));
}

TEST(GradcheckDistillationKernels, ConfigErrorsNameTheKey) {
  expect_config_errors(kConfig, {{{"divergence=kl"}, "divergence: 'kl' is none of forward_kl, "},
                                 {{"beta=1"}, "beta: expected a number > 0 and < 1"},
                                 {{"label_weight=-1"}, "label_weight: "},
                                 {{"source.teacher=far"}, "source.teacher: 'far' is none of near, same, normal, "},
                                 {{"source.special_rows=[sure]"}, "source.special_rows: 'sure' is none of same, "},
                                 {{"outputs=[divergences]"}, "outputs: 'divergences' is none of"},
                                 {{"mask_prob=2"}, "mask_prob: 2 is out of range"},
                                 {{"class_weights=random"}, "class_weights: "},
                                 {{"loss=linear_distillation"}, "loss: 'linear_distillation' is none of cross_entropy, "}});
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

// ----------------------------------------------------------------------------------------------------------------- strict

constexpr const char* kStrict =
    "loss=distillation divergence=jsd label_weight=0.3 divergence_weight=0.7 batch_size=2 seq_len=4 vocab_size=1000 "
    "dtype=bf16 seed=3 source.std=2 source.special_rows=[both_zeros, same] outputs=[logp, lse, entropy, argmax, correct, "
    "divergence, teacher_entropy, agreement]";

class StrictDistillation : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(On, StrictDistillation, testing::ValuesIn(supported_isas()), [](const auto& isa) { return isa.param; });

TEST_P(StrictDistillation, KernelsTouchNothingButTheirTensors) {
  const std::vector<std::vector<std::string>> variants = {
      {},
      {"kernel.in_place=true", "divergence=reverse_kl", "mask_prob=0.3"},
      {"kernel.schedule=stash", "divergence=total_variation", "kernel.vocab_block=64", "valid_vocab=1"},
      {"divergence=skew_reverse_kl", "reduction=none", "upstream=per_row", "kernel.threads=2", "teacher_softcap=20"}};
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    for (const char* columns : {"1", "17", "1000"}) {
      for (std::vector<std::string> sets : variants) {
        sets.insert(sets.end(),
                    {"kernel.isa=" + GetParam(), std::string("dtype=") + dtype, std::string("vocab_size=") + columns});
        const StrictReport report = strict_report(sets, call, kStrict);
        EXPECT_TRUE(report.findings.empty()) << testing::PrintToString(sets) << "\n" << report.text();
        EXPECT_GE(report.calls, 3);
        EXPECT_EQ(report.layouts, 7);
      }
    }
  }
}

TEST(StrictDistillationCatches, AccessesBesideTheTeachersLogits) {
  const auto past = [](const tileloss_args& args, const tileloss_run&) {
    read_at<uint16_t>(args.teacher_logits.data, 7 * args.teacher_logits.row_stride + 1000);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, past), kStrict),
                    "teacher_logits overrun: row 7, 1 element past the end (read), flush right, distillation forward"));
  const auto before = [](const tileloss_args& args, const tileloss_run&) {
    read_at<uint16_t>(args.teacher_logits.data, 3 * args.teacher_logits.row_stride - 1);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_BACKWARD, before), kStrict),
                    "teacher_logits overrun: row 3, 1 element before the start (read), flush left, rows apart"));
  // The first row of the second group, by the student's stride: the teacher's groups are as far apart, and a row of them is past.
  const auto groups = [](const tileloss_args& args, const tileloss_run&) {
    if (args.row_groups.rows > 0) read_at<uint16_t>(args.teacher_logits.data, args.row_groups.teacher_logits_stride - 1);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, groups), kStrict),
                    "teacher_logits overrun: row 4, 1 element before the start (read), flush left, groups of rows"));
}

// In place the student's logits are an output; the teacher's never are.
TEST(StrictDistillationCatches, AWriteToTheTeachersLogits) {
  for (const char* in_place : {"kernel.in_place=false", "kernel.in_place=true"}) {
    const auto plant = [](const tileloss_args& args, const tileloss_run&) {
      write_at<uint16_t>(args.teacher_logits.data, 2 * args.teacher_logits.row_stride + 5);
    };
    EXPECT_TRUE(finds(strict_report({in_place}, planted(TILELOSS_VALUE_AND_GRAD, plant), kStrict),
                      "teacher_logits: row 2, column 5 (write), flush right, which is an input"))
        << in_place;
  }
}

}  // namespace
}  // namespace tileloss::tools
