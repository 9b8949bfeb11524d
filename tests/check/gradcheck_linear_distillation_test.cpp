// gradcheck of distillation from two LM heads: the shipped kernels pass, and every wrong one is rejected.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "check/gradcheck_linear.h"
#include "support/exit_codes.h"
#include "support/result_writer.h"
#include "support/safetensors.h"
#include "tests/check/strict_support.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::ProgramResult;
using test::run_program;

const std::string kConfigPath = TILELOSS_SOURCE_DIR "/configs/gradcheck_linear_distillation.yaml";
const std::vector<std::string> kDivergences = {"forward_kl",      "reverse_kl",     "jsd", "jeffreys", "skew_forward_kl",
                                               "skew_reverse_kl", "total_variation"};

struct Check {
  explicit Check(std::vector<std::string> sets, const KernelCall& kernel = call)
      : config(with_sets(std::move(sets))),
        inputs(make_inputs(config, team)),
        results(run_kernels(config, inputs, kernel)),
        judge(config, inputs, results),
        verdict(judge.judge()) {}

  std::vector<std::string> failures() const {
    std::vector<std::string> names;
    for (const Gate& gate : verdict.gates) {
      if (!gate.pass) names.push_back(gate.name);
    }
    return names;
  }

  static GradcheckConfig with_sets(std::vector<std::string> sets) {
    sets.insert(sets.begin(), {"vocab_size=319", "seq_len=33", "hidden_size=24", "teacher_hidden_size=40"});
    return read_gradcheck_config(kConfigPath, sets);
  }

  ThreadTeam team{1};
  GradcheckConfig config;
  CheckInputs inputs;
  KernelResults results;
  LinearJudge judge;
  Verdict verdict;
};

TEST(GradcheckLinearDistillation, TheKernelsPassInEveryStorageAndLayout) {
  const std::vector<std::vector<std::string>> variants = {
      {},
      {"reduction=none", "upstream=per_row", "alpha=0", "head_layout=hv", "bias=none", "gradients=[dhidden, dhead]"},
      {"reduction=sum", "valid_vocab=300", "teacher_softcap=20", "teacher_logit_scale=0.5", "mask_prob=0", "dhead_dtype=head",
       "accumulate=true"},
      {"num_items=12.5", "softcap=20", "token_weights=none", "upstream=ones", "teacher_hidden_size=1", "compute_dtype=float32",
       "gradients=[dhidden]"}};
  for (const std::string& isa : supported_isas()) {
    for (size_t d = 0; d < kDivergences.size(); ++d) {
      for (size_t v = 0; v < variants.size(); ++v) {
        const char* dtype = std::vector<const char*>{"fp32", "bf16", "fp16"}[(d + v) % 3];
        std::vector<std::string> sets = {"divergence=" + kDivergences[d], std::string("dtype=") + dtype, "kernel.isa=" + isa};
        sets.insert(sets.end(), variants[v].begin(), variants[v].end());
        const Check check(sets);
        EXPECT_EQ(check.failures(), std::vector<std::string>()) << testing::PrintToString(sets);
        EXPECT_GT(check.verdict.checks.rows, 40);
      }
    }
  }
}

// The mutants that the options of this divergence leave room for, without the tensor that each is planted in.
std::set<std::string> mutants_of(const std::string& divergence) {
  std::set<std::string> names = {"teacher_temperature_ignored", "square_forgotten",     "base_2",
                                 "label_term_dropped",          "ignored_rows_counted", "label_temperature_ignored"};
  if (divergence.ends_with("_kl")) names.insert("direction_swapped");
  if (divergence == "jsd" || divergence.starts_with("skew")) names.insert({"beta_swapped", "mixture_forgotten"});
  if (divergence != "forward_kl") names.insert("mean_dropped");
  return names;
}

TEST(GradcheckLinearDistillation, EveryMutantIsCaughtByAGateOfWhatItAlters) {
  for (const std::string& divergence : kDivergences) {
    const Check check({"divergence=" + divergence, "dtype=bf16"});
    ASSERT_EQ(check.failures(), std::vector<std::string>()) << divergence;
    std::set<std::string> wanted;
    for (const std::string tensor : {"dhidden_", "dhead_", "dbias_"}) {
      for (const std::string& name : mutants_of(divergence)) wanted.insert(tensor + name);
      for (const char* name : {"halved", "negated", "first_tile_dropped", "last_tile_dropped"}) wanted.insert(tensor + name);
    }
    for (const MutantVerdict& mutant : check.judge.judge_mutants()) {
      EXPECT_TRUE(!mutant.planted || !mutant.caught_by.empty()) << divergence << " " << mutant.name;
      if (mutant.planted) wanted.erase(mutant.name);
    }
    EXPECT_TRUE(wanted.empty()) << divergence << " " << testing::PrintToString(wanted);
  }
}

// The shipped kernels, called with something else than the config says.
TEST(GradcheckLinearDistillation, KernelsThatComputeSomethingElseAreRejected) {
  using Change = void (*)(Function & function, tileloss_args & args);
  const std::vector<std::pair<const char*, Change>> changes = {
      {"divergence", [](Function& f, tileloss_args&) { f.set_choice("divergence", "jeffreys"); }},
      {"teacher_temperature", [](Function& f, tileloss_args&) { f.reset("teacher_temperature"); }},
      {"the sides", [](Function&, tileloss_args& args) { std::swap(args.hidden.data, args.teacher_hidden.data); }},
      {"the teacher", [](Function&, tileloss_args& args) { args.teacher_head.data = args.head.data; }},
      {"the teacher's bias", [](Function&, tileloss_args& args) { args.teacher_bias = {}; }},
      {"the student's bias", [](Function&, tileloss_args& args) { args.bias = args.teacher_bias; }},
  };
  const std::vector<std::string> sets = {"teacher_hidden_size=24"};
  for (const auto& [name, change] : changes) {
    const KernelCall kernel = [change = change](const Function& given, tileloss_pass pass, const tileloss_args& given_args,
                                                const tileloss_plan&, const tileloss_run* run) {
      Function function = given;
      tileloss_args args = given_args;
      change(function, args);
      call(function, pass, args, make_plan(function, pass, args, {}), run);
    };
    const std::vector<std::string> failed = Check(sets, kernel).failures();
    for (const std::string part : {"dhidden/", "dhead/", "dbias/"}) {
      EXPECT_TRUE(std::any_of(failed.begin(), failed.end(),
                              [&](const std::string& gate) { return gate.find(part) != std::string::npos; }))
          << name << " " << part;
    }
  }
  EXPECT_EQ(Check(sets).failures(), std::vector<std::string>());
}

TEST(GradcheckLinearDistillationProgram, ReportsWhatItChecked) {
  const TemporaryFolder folder;
  const std::string output = (folder.path() / "r.jsonl").string();
  const ProgramResult result = run_program({"gradcheck", "--config", kConfigPath, "--set", "output=" + output});
  ASSERT_EQ(result.exit_code, kExitPass) << result.out << result.err;
  const Json line = read_results(output).lines.at(0);
  EXPECT_EQ(line["loss"], "linear_distillation");
  EXPECT_EQ(line["shape/hidden_size"], 64);
  EXPECT_EQ(line["shape/teacher_hidden_size"], 96);
  EXPECT_LT(line["fwd/divergence_max_abs"], 1e-4);
  const ProgramResult row = run_program({"gradcheck", "--config", kConfigPath, "--row", "5"});
  EXPECT_EQ(row.exit_code, kExitPass) << row.out << row.err;
  EXPECT_NE(row.out.find("\nterm/divergence "), std::string::npos) << row.out;
}

TEST(GradcheckLinearDistillationProgram, ConfigErrorsNameTheKey) {
  for (const auto& [sets, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"source.kind=safetensors", "source.path=x.safetensors"},
            "source.kind: expected synthetic for linear_distillation, whose teacher's head is drawn, got safetensors"},
           {{"source.teacher=near"}, "source.teacher: unknown key"},
           {{"source.special_rows=[same]"}, "source.special_rows: unknown key"},
           {{"teacher_hidden_size=0"}, "teacher_hidden_size: 0 is out of range"},
           {{"loss=cross_entropy"}, "unknown key"}}) {
    std::vector<std::string> arguments = {"gradcheck", "--config", kConfigPath};
    for (const std::string& set : sets) arguments.insert(arguments.end(), {"--set", set});
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, kExitUsage) << message << result.out;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  }
}

TEST(GradcheckLinearDistillationProgram, WritesTheTeachersHeadForOthers) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "in.safetensors").string();
  const ProgramResult result = run_program({"judge", "--config", kConfigPath, "--write-inputs", path});
  ASSERT_EQ(result.exit_code, kExitPass) << result.err;
  const SafetensorsFile file(path);
  EXPECT_EQ(file.tensor("teacher_hidden").shape, (std::vector<int64_t>{96, 96}));
  EXPECT_EQ(file.tensor("teacher_head").shape, (std::vector<int64_t>{1087, 96}));
  EXPECT_EQ(file.tensor("teacher_bias").shape, (std::vector<int64_t>{1087}));
}

// ----------------------------------------------------------------------------------------------------------------- strict

constexpr const char* kStrict =
    "level: linear\nloss: distillation\ndivergence: jsd\nalpha: 0.3\n"
    "batch_size: 2\nseq_len: 4\nvocab_size: 300\nhidden_size: 40\nteacher_hidden_size: 24\ndtype: bf16\nseed: 3\n"
    "ignore_prob: 0.2\nsource: {std: 2}\nbias: random\ngradients: [dhidden, dhead, dbias]\n"
    "outputs: [logp, divergence, teacher_entropy, agreement]\n";

TEST(StrictLinearDistillation, KernelsTouchNothingButTheirTensors) {
  for (const std::string& isa : supported_isas()) {
    for (const std::vector<std::string>& variant : std::vector<std::vector<std::string>>{
             {}, {"head_layout=hv", "accumulate=true", "dtype=fp32"}, {"dhead_dtype=head", "valid_vocab=290", "mask_prob=0.3"}}) {
      std::vector<std::string> sets = {"kernel.isa=" + isa};
      sets.insert(sets.end(), variant.begin(), variant.end());
      const StrictReport report = strict_report(sets, call, kStrict);
      EXPECT_TRUE(report.findings.empty()) << testing::PrintToString(sets) << "\n" << report.text();
      EXPECT_GE(report.calls, 3);
    }
  }
  const auto past = [](const tileloss_args& args, const tileloss_run&) {
    read_at<uint16_t>(args.teacher_head.data, 299 * args.teacher_head.row_stride + 24);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, past), kStrict),
                    "teacher_head overrun: row 299, 1 element past the end (read), flush right, linear_distillation forward"));
}

}  // namespace
}  // namespace tileloss::tools
