// gradcheck --strict of what a row is compared with besides its label - a teacher, some of its columns, class probabilities -
// from logits and with the LM head: the shipped kernels pass on every instruction set; accesses beside these tensors are caught.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/judge/strict_support.h"

namespace tileloss::tools {
namespace {

const std::string kBase = "batch_size=2 seq_len=4 dtype=bf16 seed=3 source.std=2 ";
const std::string kOutputs = "outputs=[logp, lse, entropy, argmax, correct";
const std::string kOfTeacher = "divergence=jsd label_weight=0.3 divergence_weight=0.7 ";
const std::string kTeacherOutputs = "divergence, teacher_entropy, agreement]";
const std::string kDistillation = kBase + kOfTeacher + "loss=distillation vocab_size=1000 " +
                                  "source.special_rows=[both_zeros, same] " + kOutputs + ", " + kTeacherOutputs;
const std::string kSparse = kBase + kOfTeacher + "loss=sparse_distillation vocab_size=1000 source.teacher_columns=5 " +
                            "source.special_rows=[gaps] " + kOutputs + ", " + kTeacherOutputs;
const std::string kSoft =
    kBase + "loss=soft_cross_entropy label_smoothing=0.1 vocab_size=1000 source.probs_dtype=bf16 " + kOutputs + "]";

void expect_nothing_found(const std::string& isa, const std::string& text, const std::vector<Sets>& variants) {
  for (const std::string dtype : {"fp32", "bf16", "fp16"}) {
    for (const std::string columns : {"1", "17", "1000"}) {
      for (const Sets& variant : variants) {
        Sets sets = joined(variant, {"kernel.isa=" + isa, "dtype=" + dtype, "vocab_size=" + columns});
        if (text == kSoft) sets.push_back("source.probs_dtype=" + dtype);
        const StrictReport report = strict_report(sets, call, text);
        EXPECT_TRUE(report.findings.empty()) << testing::PrintToString(sets) << "\n" << report.text();
        EXPECT_GE(report.calls, 3);
        EXPECT_EQ(report.layouts, 7);
      }
    }
  }
}

class StrictDistillation : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(On, StrictDistillation, testing::ValuesIn(supported_isas()), [](const auto& isa) { return isa.param; });

TEST_P(StrictDistillation, KernelsTouchNothingButTheirTensors) {
  expect_nothing_found(
      GetParam(), kDistillation,
      {{},
       {"kernel.in_place=true", "divergence=reverse_kl", "mask_prob=0.3"},
       {"kernel.schedule=stash", "divergence=total_variation", "kernel.vocab_block=64", "valid_vocab=1"},
       {"divergence=skew_reverse_kl", "reduction=none", "upstream=per_row", "kernel.threads=2", "teacher_softcap=20"}});
}

TEST(StrictTargets, KernelsTouchNothingButTheirTensors) {
  for (const std::string& isa : supported_isas()) {
    for (const std::string& text : {kSparse, kSoft}) expect_nothing_found(isa, text, {{"mask_prob=0.3"}});
  }
}

// An overrun of each: StrictCatches.AnOverrunOfEveryTensor.
TEST(StrictTargetsCatches, AccessesBetweenTheirRows) {
  const auto before = [](const tileloss_args& args, const tileloss_run&) {
    read_at<uint16_t>(args.teacher_logits.data, 3 * args.teacher_logits.row_stride - 1);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_BACKWARD, before), kDistillation),
                    "teacher_logits overrun: row 3, 1 element before the start (read), flush left, rows apart"));
  const auto logprobs = [](const tileloss_args& args, const tileloss_run&) {
    read_at<float>(args.teacher_logprobs.data, 3 * args.teacher_logprobs.row_stride - 1);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_BACKWARD, logprobs), kSparse),
                    "teacher_logprobs overrun: row 3, 1 element before the start (read), flush left, rows apart"));
  // The first row of the second group, by the student's stride: the teacher's groups are as far apart, and a row of them is past.
  const auto groups = [](const tileloss_args& args, const tileloss_run&) {
    const tileloss_matrix& target = args.teacher_logits.data != nullptr ? args.teacher_logits : args.target_probs;
    if (args.row_groups.rows > 0) read_at<uint16_t>(target.data, args.row_groups.teacher_logits_stride - 1);
  };
  const std::string finding = " overrun: row 4, 1 element before the start (read), flush left, groups of rows";
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, groups), kDistillation), "teacher_logits" + finding));
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, groups), kSoft), "target_probs" + finding));
}

// In place the student's logits are an output; the teacher's never are.
TEST(StrictTargetsCatches, AWriteToTheTeachersLogits) {
  for (const char* in_place : {"kernel.in_place=false", "kernel.in_place=true"}) {
    const auto plant = [](const tileloss_args& args, const tileloss_run&) {
      write_at<uint16_t>(args.teacher_logits.data, 2 * args.teacher_logits.row_stride + 5);
    };
    EXPECT_TRUE(finds(strict_report({in_place}, planted(TILELOSS_VALUE_AND_GRAD, plant), kDistillation),
                      "teacher_logits: row 2, column 5 (write), flush right, which is an input"))
        << in_place;
  }
}

// ------------------------------------------------------------------------------------------------------ with the LM head

const std::string kLinear =
    "level=linear label_weight=0.3 divergence_weight=0.7 divergence=jsd batch_size=2 seq_len=4 vocab_size=300 "
    "hidden_size=40 dtype=bf16 seed=3 ignore_prob=0.2 bias=random gradients=[dhidden, dhead, dbias] ";
const std::string kLinearDistillation =
    kLinear + "loss=distillation teacher_hidden_size=24 source.std=2 outputs=[logp, divergence, teacher_entropy, agreement]";
const std::string kLinearSparse =
    kLinear +
    "loss=sparse_distillation source.std=2 source.teacher_columns=5 outputs=[logp, divergence, teacher_entropy, agreement]";
const std::string kLinearSoft =
    "level=linear loss=soft_cross_entropy label_smoothing=0.1 batch_size=2 seq_len=4 vocab_size=300 hidden_size=40 "
    "dtype=bf16 seed=3 ignore_prob=0.2 bias=random gradients=[dhidden, dhead, dbias] source.std=2 source.probs_dtype=bf16 "
    "outputs=[logp]";

TEST(StrictLinearTargets, KernelsTouchNothingButTheirTensors) {
  const std::vector<Sets> variants = {
      {}, {"head_layout=hv", "accumulate=true", "dtype=fp32"}, {"dhead_dtype=head", "valid_vocab=290", "mask_prob=0.3"}};
  for (const std::string& isa : supported_isas()) {
    for (const std::string& config : {kLinearDistillation, kLinearSparse, kLinearSoft}) {
      for (size_t v = 0; v < variants.size(); ++v) {
        if (config != kLinearDistillation && v != (config == kLinearSparse ? 1 : 2)) continue;
        const Sets sets = joined({"kernel.isa=" + isa}, variants[v]);
        const StrictReport report = strict_report(sets, call, config);
        EXPECT_TRUE(report.findings.empty()) << testing::PrintToString(sets) << "\n" << report.text();
        EXPECT_GE(report.calls, 3);
      }
    }
  }
}

}  // namespace
}  // namespace tileloss::tools
