// gradcheck of distillation: the shipped kernels pass on every instruction set, and every wrong one is rejected.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "check/judge/judge.h"
#include "support/exit_codes.h"
#include "support/result_writer.h"
#include "support/safetensors.h"
#include "tests/check/gradcheck_call.h"
#include "tests/check/strict_support.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::ProgramResult;
using test::run_program;

const std::string kConfig = "gradcheck_distillation.yaml";
const std::string kConfigPath = TILELOSS_SOURCE_DIR "/configs/" + kConfig;
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

TEST(GradcheckDistillationProgram, ReportsWhatItChecked) {
  const TemporaryFolder folder;
  const std::string output = (folder.path() / "r.jsonl").string();
  const ProgramResult result = run_program({"gradcheck", "--config", kConfigPath, "--set", "output=" + output});
  ASSERT_EQ(result.exit_code, kExitPass) << result.out << result.err;
  EXPECT_EQ(result.last_line(), "PASS");
  const Json line = read_results(output).lines.at(0);
  EXPECT_EQ(line["loss"], "distillation");
  EXPECT_EQ(line["options"]["divergence"], "jsd");
  EXPECT_LT(line["fwd/divergence_max_abs"], 1e-5);
  EXPECT_EQ(line["fwd/agreement_mismatches"], 0);
  const ProgramResult row = run_program({"gradcheck", "--config", kConfigPath, "--row", "5", "--set", "vocab_size=255"});
  EXPECT_EQ(row.exit_code, kExitPass) << row.out << row.err;
  EXPECT_NE(row.out.find("\nterm/divergence "), std::string::npos) << row.out;
  const ProgramResult tight = run_program({"gradcheck", "--config", kConfigPath, "--set", "tolerances.dlogits_max_abs=1e-12"});
  EXPECT_EQ(tight.exit_code, kExitCheckFailed) << tight.out;
  EXPECT_NE(tight.last_line().find("backward/dlogits_max_abs"), std::string::npos) << tight.last_line();
}

TEST(GradcheckDistillationProgram, ConfigErrorsNameTheKey) {
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

// A student and a teacher that another program has stored.
class StoredTeacher : public testing::Test {
 protected:
  ProgramResult check(const std::vector<std::string>& sets) const {
    std::vector<std::string> arguments = {"gradcheck", "--config",
                                          TILELOSS_SOURCE_DIR "/configs/gradcheck_distillation_safetensors.yaml"};
    for (const std::string& set : sets) arguments.insert(arguments.end(), {"--set", set});
    return run_program(arguments);
  }
  std::string write(const char* name, const char* dtype, std::vector<int64_t> shape) const {
    const std::filesystem::path path = folder_.path() / "teacher.safetensors";
    write_safetensors(
        path, {{name, dtype, std::move(shape), elements_.data(), static_cast<int64_t>(elements_.size() * sizeof(uint16_t))}});
    return "source.teacher_path=" + path.string();
  }

  TemporaryFolder folder_;
  std::vector<uint16_t> elements_ = std::vector<uint16_t>(16 * 30522);  // logits of 0: a uniform teacher
};

TEST_F(StoredTeacher, IsReadBesideTheLogits) {
  const std::string path = write("t", "BF16", {16, 30522});
  const std::string output = "output=" + (folder_.path() / "r.jsonl").string();
  const ProgramResult result = check(
      {path, "source.teacher=t", output, "label_weight=0", "divergence_weight=1", "divergence=reverse_kl", "temperature=1"});
  ASSERT_EQ(result.exit_code, kExitPass) << result.out << result.err;
  // KL(p | uniform) = log V - H(p), in means over the rows in use.
  const Json line = read_results(folder_.path() / "r.jsonl").lines.at(0);
  EXPECT_GT(line["loss_ref"], 1.0);
  EXPECT_LT(line["loss_ref"], std::log(30522.0));
  EXPECT_EQ(line["shape/rows_used"], 14);
  // Of the student's own logits the loss is 0, and so is the gradient.
  const ProgramResult same =
      check({"source.teacher=logits", "label_weight=0", "expect_mostly_zero=true", "mutants=false", output});
  EXPECT_EQ(same.exit_code, kExitPass) << same.out << same.err;
  EXPECT_EQ(read_results(folder_.path() / "r.jsonl").lines.at(1)["loss_kernel"], 0.0);
}

TEST_F(StoredTeacher, NearTheStudentWhereTheFileHasNone) {
  const ProgramResult result = check({});
  EXPECT_EQ(result.exit_code, kExitPass) << result.out << result.err;
}

TEST_F(StoredTeacher, ThatDoesNotFitIsRefused) {
  const auto error = [&](const std::vector<std::string>& sets) {
    const ProgramResult result = check(sets);
    EXPECT_EQ(result.exit_code, kExitUsage) << result.out;
    return result.err;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos ? testing::AssertionSuccess() : testing::AssertionFailure() << text;
  };
  EXPECT_TRUE(
      has(error({write("t", "F16", {16, 30522}), "source.teacher=t"}), "t: expected the student's dtype, bfloat16, got F16"));
  EXPECT_TRUE(has(error({write("t", "BF16", {30522, 16}), "source.teacher=t"}),
                  "t: expected 30522 columns, as the student has, and at least 16 rows, got [30522, 16]"));
  EXPECT_TRUE(has(error({write("t", "BF16", {16, 30522}), "source.teacher=u"}), "u"));
  EXPECT_TRUE(has(error({write("t", "BF16", {16, 30522})}), "source.teacher_path: expected source.teacher beside it"));
  EXPECT_TRUE(
      has(error({"source.teacher=logits", "source.teacher_noise=1"}), "source.teacher_noise: only where the teacher is near"));
  EXPECT_TRUE(has(error({"mask_prob=0.5"}), "mask_prob: the mask comes from the file"));
}

// ----------------------------------------------------------------------------------------------------------------- strict

constexpr const char* kStrict =
    "loss: distillation\ndivergence: jsd\nlabel_weight: 0.3\ndivergence_weight: 0.7\n"
    "batch_size: 2\nseq_len: 4\nvocab_size: 1000\ndtype: bf16\nseed: 3\n"
    "source: {kind: synthetic, distribution: normal, std: 2, special_rows: [both_zeros, same]}\n"
    "outputs: [logp, lse, entropy, argmax, correct, divergence, teacher_entropy, agreement]\n";

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
