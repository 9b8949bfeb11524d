// gradcheck with the LM head of what a row is compared with besides its label - a teacher's LM head, some columns of a teacher,
// class probabilities: the shipped kernels pass, and every wrong one is rejected.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/judge/strict_support.h"
#include "tests/judge/teacher_mutants.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

const std::string kDistillation = "gradcheck_linear_distillation.yaml";
const std::string kSparse = "gradcheck_linear_sparse_distillation.yaml";
const std::string kSoft = "gradcheck_linear_soft_cross_entropy.yaml";
const Sets kSmall = {"vocab_size=319", "seq_len=33", "hidden_size=24"};

Sets small_sets(const std::string& config, const Sets& sets = {}) {
  return joined(joined(kSmall, config == kDistillation ? Sets{"teacher_hidden_size=40"} : Sets{}), sets);
}

// A config and one choice of an option of its own: a divergence, and a tail of the columns.
struct Case {
  std::string config;
  Sets sets;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  const char* const tails[] = {"tail=lump", "tail=ignore", "tail=renormalise"};
  for (size_t d = 0; d < kDivergences.size(); ++d) {
    const Sets divergence = of_divergence(kDivergences[d]);
    all.push_back({kDistillation, divergence});
    all.push_back({kSparse, joined(divergence, {tails[d % 3]})});
    all.push_back({kSparse, joined(divergence, {tails[(d + 1) % 3]})});
  }
  for (const char* probs : {"fp32", "bf16", "fp16"}) all.push_back({kSoft, {std::string("source.probs_dtype=") + probs}});
  return all;
}

TEST(GradcheckLinearTargets, TheKernelsPassInEveryStorageAndLayout) {
  const std::vector<Sets> variants = {
      {},
      {"reduction=none", "upstream=per_row", "head_layout=hv", "bias=none", "gradients=[dhidden, dhead]"},
      {"reduction=sum", "valid_vocab=300", "mask_prob=0", "dhead_dtype=head", "accumulate=true"},
      {"num_items=12.5", "softcap=20", "token_weights=none", "upstream=ones", "compute_dtype=float32", "gradients=[dhidden]"}};
  const std::map<std::string, std::vector<Sets>> more = {
      {kDistillation, {{}, {"label_weight=0"}, {"teacher_softcap=20", "teacher_logit_scale=0.5"}, {"teacher_hidden_size=1"}}},
      {kSparse, {{}, {"label_weight=0"}, {"source.teacher_columns=1"}, {"label_temperature=3"}}},
      {kSoft, {{}, {"label_smoothing=0"}, {"class_weights=none"}, {"source.probs_zeros=0.99"}}}};
  const std::vector<Case> all = cases();
  for (const std::string& isa : supported_isas()) {
    for (size_t i = 0; i < all.size(); ++i) {
      for (size_t v = 0; v < variants.size(); ++v) {
        if (all[i].config == kSparse && (i / 3 + v) % 2 == 1) continue;  // two of them at each of its many options
        const char* dtype = std::vector<const char*>{"fp32", "bf16", "fp16"}[(i + v) % 3];
        const Sets sets = joined(joined(all[i].sets, variants[v]), more.at(all[i].config)[v]);
        const GradcheckCall check(all[i].config,
                                  small_sets(all[i].config, joined({std::string("dtype=") + dtype, "kernel.isa=" + isa}, sets)));
        EXPECT_EQ(check.failures(), Sets()) << all[i].config << testing::PrintToString(sets) << dtype;
        EXPECT_GT(check.verdict.checks.rows, 40);
      }
    }
  }
}

// The mutants that these options leave room for, without the tensor that each is planted in.
std::set<std::string> mutants_of(const Case& one) {
  std::set<std::string> names = {"halved", "negated", "first_tile_dropped", "last_tile_dropped", "ignored_rows_counted"};
  if (one.config == kSoft) {
    names.insert({"smoothing_forgotten", "sum_taken_as_one", "class_weights_forgotten", "label_for_probabilities"});
    return names;
  }
  const std::string divergence = one.sets.front().substr(one.sets.front().find('=') + 1);
  names.merge(teacher_mutants(divergence, one.config == kSparse));
  // Of p - q the tail's part is small where the columns hold nearly all of the teacher's mass.
  if (divergence.ends_with("forward_kl")) names.erase("other_tail");
  return names;
}

TEST(GradcheckLinearTargets, EveryMutantIsCaughtByAGateOfWhatItAlters) {
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.config + testing::PrintToString(one.sets));
    const GradcheckCall check(one.config, small_sets(one.config, joined({"dtype=bf16"}, one.sets)));
    std::set<std::string> expected;
    for (const std::string tensor : {"dhidden", "dhead", "dbias"}) {
      for (const std::string& name : mutants_of(one)) expected.insert(tensor + "_" + name);
    }
    for (const MutantVerdict& mutant : check.mutants()) expected.erase(mutant.name);
    EXPECT_TRUE(expected.empty()) << testing::PrintToString(expected);
  }
}

TEST(GradcheckLinearTargets, KernelsThatComputeSomethingElseAreRejected) {
  const Sets parts = {"dhidden/", "dhead/", "dbias/"};
  const std::vector<std::pair<const char*, Change>> of_teacher = {
      {"divergence", [](Function& f, tileloss_args&) { f.set_choice("divergence", "skew_forward_kl"); }},
      {"teacher_temperature", [](Function& f, tileloss_args&) { f.reset("teacher_temperature"); }},
      {"the sides", [](Function&, tileloss_args& args) { std::swap(args.hidden.data, args.teacher_hidden.data); }},
      {"the teacher", [](Function&, tileloss_args& args) { args.teacher_head.data = args.head.data; }},
      {"the teacher's bias", [](Function&, tileloss_args& args) { args.teacher_bias = {}; }},
      {"the student's bias", [](Function&, tileloss_args& args) { args.bias = args.teacher_bias; }},
  };
  expect_rejected(kDistillation, joined(kSmall, {"teacher_hidden_size=24"}), of_teacher, parts);
  const std::vector<std::pair<const char*, Change>> of_columns = {
      {"tail", [](Function& f, tileloss_args&) { f.set_choice("tail", "renormalise"); }},
      {"divergence", [](Function& f, tileloss_args&) { f.set_choice("divergence", "skew_forward_kl"); }},
      {"the last column",
       [](Function&, tileloss_args& args) { args.teacher_ids.cols = args.teacher_logprobs.cols = args.teacher_ids.cols - 1; }},
      {"the bias", [](Function&, tileloss_args& args) { args.bias = {}; }},
  };
  expect_rejected(kSparse, small_sets(kSparse), of_columns, parts);
  const std::vector<std::pair<const char*, Change>> of_probabilities = {
      {"smoothing", [](Function& f, tileloss_args&) { f.reset("label_smoothing"); }},
      {"temperature", [](Function& f, tileloss_args&) { f.reset("temperature"); }},
      {"class weights", [](Function&, tileloss_args& args) { args.class_weights = {}; }},
      {"the bias", [](Function&, tileloss_args& args) { args.bias = {}; }},
  };
  expect_rejected(kSoft, small_sets(kSoft), of_probabilities, parts);
}

TEST(GradcheckLinearTargets, TheConfigsPassWithTheirMetrics) {
  for (const std::string& config : {kDistillation, kSparse, kSoft}) {
    const GradcheckCall check(config);
    EXPECT_FALSE(check.mutants().empty()) << config;
    const Json metrics = check.metrics();
    EXPECT_EQ(metrics["shape/hidden_size"], 64);
    EXPECT_EQ(metrics.contains("shape/teacher_hidden_size"), config == kDistillation);
    if (config != kSoft) {
      EXPECT_LT(metrics["fwd/divergence_max_abs"], 1e-4);
    }
  }
}

TEST(GradcheckLinearTargets, ConfigErrorsNameTheKey) {
  expect_config_errors(
      kDistillation, {{{"source.kind=safetensors", "source.path=x.safetensors"},
                       "source.kind: expected synthetic for linear_distillation, whose teacher's head is drawn, got safetensors"},
                      {{"source.teacher=near"}, "source.teacher: unknown key"},
                      {{"source.special_rows=[same]"}, "source.special_rows: unknown key"},
                      {{"teacher_hidden_size=0"}, "teacher_hidden_size: 0 is out of range"},
                      {{"loss=cross_entropy"}, "unknown key"}});
  expect_config_errors(kSparse, {{{"source.special_rows=[gaps]"}, "source.special_rows: unknown key"},
                                 {{"teacher_hidden_size=8"}, "teacher_hidden_size: unknown key"}});
}

// The tensors that another implementation computes on.
TEST(GradcheckLinearTargets, WhatARowIsHeldAgainstIsHandedOver) {
  using Shape = std::vector<int64_t>;
  for (const auto& [config, shapes] : std::vector<std::pair<std::string, std::vector<std::pair<const char*, Shape>>>>{
           {kDistillation, {{"teacher_hidden", {96, 96}}, {"teacher_head", {1087, 96}}, {"teacher_bias", {1087}}}},
           {kSparse, {{"teacher_ids", {96, 200}}, {"teacher_logprobs", {96, 200}}}},
           {kSoft, {{"target_probs", {96, 1087}}}}}) {
    for (const auto& [name, shape] : shapes) EXPECT_EQ(drawn_shape(config, {}, name), shape) << name;
  }
}

}  // namespace
}  // namespace tileloss::tools
