// gradcheck of rows with several labels: the shipped kernels pass, and every wrong one is rejected.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "judge/row_trace.h"
#include "tests/judge/strict_support.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

// Some labels are there twice, some slots are empty, some rows have none.
const std::string kBase =
    "loss=logprobs labels_per_row=5 batch_size=3 seq_len=11 vocab_size=703 valid_vocab=690 seed=3 ignore_prob=0.2 "
    "source.std=2 dtype=bf16 upstream=per_row outputs=[logp, lse, entropy, argmax, log_sum_sq_probs, mean_logit] ";

const std::string kLinear = "level=linear hidden_size=48 gradients=[dhidden, dhead, dbias] bias=random " + kBase;

const std::set<std::string> kMutants{"slot_dropped", "slots_swapped", "duplicate_counted_once", "empty_slot_filled",
                                     "first_slots_gradient"};

TEST(GradcheckSeveralLabels, TheKernelsPass) {
  for (const std::string& isa : supported_isas()) {
    for (const Sets& variant : std::vector<Sets>{{"dtype=fp32"},
                                                 {"dtype=fp16", "kernel.in_place=true"},
                                                 {"kernel.row_groups=true", "labels_per_row=2"},
                                                 {"softcap=10", "labels_per_row=64"},
                                                 {"temperature=0.7", "upstream=ones"},
                                                 {"temperature=2", "temperature_on=logprob", "dtype=fp32"},
                                                 {"source.distribution=wide", "dtype=fp32"},
                                                 {"source.distribution=confident", "expect_mostly_zero=true"},
                                                 {"vocab_size=3", "valid_vocab=2", "labels_per_row=1024"},
                                                 {"allowed=half", "dtype=fp32", "softcap=10"},
                                                 {"allowed=runs", "kernel.in_place=true", "labels_per_row=64"},
                                                 {"allowed=sparse", "allowed_rows=[label_outside, one, empty]"},
                                                 {"allowed=shared", "dtype=fp16", "kernel.row_groups=true"}}) {
      EXPECT_EQ(GradcheckCall(kBase, joined({"kernel.isa=" + isa}, variant)).failures(), Sets())
          << isa << " " << testing::PrintToString(variant);
    }
  }
}

// In rows whose other slots are empty or have it again, the likeliest's small 1 - p is what its gradient is made of.
TEST(GradcheckSeveralLabels, AConfidentLabelKeepsItsDigits) {
  const Sets sets{"source.distribution=confident", "dtype=fp32", "expect_mostly_zero=true", "outputs=[logp]", "ignore_prob=0.7"};
  const auto rounded = [](const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
                          const tileloss_run* run) {
    call(function, pass, args, plan, run);
    // 1 - p from p.
    for (int64_t i = 0; pass == TILELOSS_BACKWARD && i < args.dlogits.rows * args.dlogits.row_stride; ++i) {
      float& g = static_cast<float*>(args.dlogits.data)[i];
      g = (g + 1.0F) - 1.0F;
    }
  };
  EXPECT_EQ(GradcheckCall(kBase, sets).failures(), Sets());
  EXPECT_TRUE(has_part(GradcheckCall(kBase, sets, rounded).failures(), "dlogits/ulp_target"));
}

TEST(GradcheckSeveralLabels, EveryMutantIsCaught) {
  for (const Sets& sets : std::vector<Sets>{{}, {"dtype=fp32", "temperature=0.7"}, {"labels_per_row=16"}}) {
    expect_mutants(GradcheckCall(kBase, sets), kMutants,
                   {"slot_dropped_in_value", "slots_swapped_in_value", "empty_slot_filled_in_value"});
  }
}

TEST(GradcheckSeveralLabels, KernelsThatComputeSomethingElseAreRejected) {
  expect_rejected(kBase, {},
                  {
                      {"the slots as rows of one label",
                       [](Function&, tileloss_args& args) {
                         args.labels_per_row = 1;
                         args.labels.size = args.logits.rows;
                         if (args.logp.data != nullptr) args.logp.size = args.logits.rows;
                         if (args.logp_grad.data != nullptr) args.logp_grad.size = args.logits.rows;
                       }},
                  },
                  {"logp", "/dlogits/ulp_target"});
}

// Of a store that cuts bits off, whatever the labels' own components are.
TEST(GradcheckSeveralLabels, TheNormOffTheLabelsIsWithoutThem) {
  const auto truncated = [](const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
                            const tileloss_run* run) {
    call(function, pass, args, plan, run);
    const auto* labels = static_cast<const int64_t*>(args.labels.data);
    for (int64_t i = 0; pass == TILELOSS_BACKWARD && i < args.dlogits.rows; ++i) {
      for (int64_t j = 0; j < 690; ++j) {
        const auto* own = labels + i * args.labels_per_row;
        auto& bits = static_cast<uint16_t*>(args.dlogits.data)[i * args.dlogits.row_stride + j];
        if (bits % 2 == 1 && std::find(own, own + args.labels_per_row, j) == own + args.labels_per_row) --bits;
      }
    }
  };
  EXPECT_TRUE(has_part(GradcheckCall(kBase, {}, truncated).failures(), "dlogits/normwise"));
}

TEST(GradcheckSeveralLabelsLinear, TheKernelsPassAndEveryMutantIsCaught) {
  for (const Sets& sets : std::vector<Sets>{{},
                                            {"dtype=fp32"},
                                            {"dtype=fp16", "softcap=10"},
                                            {"head_layout=hv", "source.std=8"},
                                            {"allowed=half"},
                                            {"allowed=runs", "dtype=fp32"}}) {
    const GradcheckCall check(kLinear, sets);
    EXPECT_EQ(check.failures(), Sets()) << testing::PrintToString(sets);
    const std::vector<MutantVerdict> mutants = check.mutants();
    for (const std::string& name : kMutants) {
      EXPECT_TRUE(is_caught(mutants, "dhidden_" + name)) << name;
      EXPECT_TRUE(is_caught(mutants, "dhead_" + name)) << name;
    }
  }
}

// Rows of labels that are all outside, of one column, and of none.
TEST(GradcheckSeveralLabelsLinear, LabelsOutsideTheSetHaveNoProbability) {
  for (const std::string dtype : {"bf16", "fp32"}) {
    const Sets sets{"allowed=sparse", "allowed_rows=[label_outside, one, empty]", "dtype=" + dtype, "gradients=[dhidden]"};
    const GradcheckCall check(kLinear, sets);
    EXPECT_EQ(check.failures(), Sets()) << dtype;
    EXPECT_GT(std::ranges::count(check.results.outputs[kLogp], -std::numeric_limits<double>::infinity()), 20) << dtype;
  }
}

TEST(GradcheckSeveralLabelsStrict, NothingIsFound) {
  EXPECT_EQ(strict_report({}, call, kBase).findings, Sets());
  EXPECT_EQ(strict_report({}, call, kLinear).findings, Sets());
  EXPECT_EQ(strict_report({"allowed=half"}, call, kBase).findings, Sets());
}

TEST(GradcheckSeveralLabelsTrace, EachSlotIsShownAndTheWrongOneMarked) {
  const GradcheckConfig config = config_of(kBase);
  const GradcheckCall check(config);
  const int64_t row = check.inputs.used_rows()[1];
  KernelResults results = run_kernels(config, check.inputs, call);
  EXPECT_EQ(trace_row(config, check.inputs, results, row, std::nullopt).failures(), Sets());
  results.outputs[kLogp][static_cast<size_t>(row * 5 + 3)] += 0.01;
  const RowTrace trace = trace_row(config, check.inputs, results, row, std::nullopt);
  EXPECT_EQ(trace.failures(), (Sets{"logp[3]"}));
  const auto stage = std::ranges::find(trace.stages, "logp[3]", &Stage::name);
  ASSERT_NE(stage, trace.stages.end());
  EXPECT_EQ(stage->column, check.inputs.slots[static_cast<size_t>(row * 5 + 3)]);
}

TEST(GradcheckSeveralLabelsFile, TheLabelsOfAFileAreThoseOfTheCall) {
  const GradcheckConfig config = config_of(kBase);
  ThreadTeam team(1);
  const CheckInputs drawn = make_inputs(config, team);
  std::vector<StoredTensor> tensors = input_tensors(config, drawn);
  const auto labels = std::ranges::find(tensors, "labels", &StoredTensor::name);
  EXPECT_EQ(labels->shape, (std::vector<int64_t>{33, 5}));
  EXPECT_EQ(std::ranges::find(tensors, "logp_grad", &StoredTensor::name)->shape, (std::vector<int64_t>{33, 5}));

  const std::string of_file =
      "loss=logprobs labels_per_row=5 valid_vocab=690 upstream=per_row source.kind=safetensors source.path=/x.safetensors";
  const GradcheckCall check(config_of(of_file, {}, {TensorFile("/x.safetensors", tensors)}));
  EXPECT_EQ(check.inputs.slots, drawn.slots);
  EXPECT_EQ(check.failures(), Sets());
  labels->shape = {165};
  EXPECT_TRUE(is_refused(refusal(of_file, {}, {TensorFile("/x.safetensors", tensors)}),
                         "labels: expected [33, 5], as logits is [33, 703], got [165]"));
}

TEST(GradcheckSeveralLabelsConfig, WhatDoesNotGoTogetherIsRefused) {
  expect_config_errors(kBase, {{{"labels_per_row=0"}, "labels_per_row"},
                               {{"labels_per_row=1025"}, "labels_per_row"},
                               {{"loss=cross_entropy", "upstream=ones", "outputs=[logp]"}, "labels_per_row"},
                               {{"outputs=[logp, correct]"}, "outputs: expected none that is of one label"}});
}

}  // namespace
}  // namespace tileloss::tools
