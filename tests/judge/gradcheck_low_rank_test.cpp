// gradcheck of heads with a low-rank part: the shipped kernels pass, and every wrong one is rejected.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "judge/row_trace.h"
#include "tests/judge/strict_support.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

const std::string kBase =
    "level=linear loss=cross_entropy batch_size=3 seq_len=11 vocab_size=703 valid_vocab=690 hidden_size=48 rank=5 seed=3 "
    "ignore_prob=0.2 source.std=2 dtype=bf16 bias=random gradients=[dhidden, dhead, dbias, dhidden_r, dhead_r] ";

TEST(GradcheckLowRank, TheKernelsPassAndEveryMutantIsCaught) {
  for (const std::string& isa : supported_isas()) {
    for (const Sets& variant : std::vector<Sets>{{},
                                                 {"dtype=fp32", "head_layout=hv", "accumulate=true"},
                                                 {"dtype=fp16", "rank=130", "softcap=10", "dhead_dtype=head"},
                                                 {"rank=1", "gradients=[dhidden_r, dhead_r]", "allowed=runs"},
                                                 {"loss=logprobs", "upstream=per_row", "labels_per_row=4"},
                                                 {"loss=distillation", "teacher_hidden_size=20"}}) {
      const GradcheckCall check(kBase, joined({"kernel.isa=" + isa}, variant));
      EXPECT_EQ(check.failures(), Sets()) << isa << " " << testing::PrintToString(variant);
      const std::vector<MutantVerdict> mutants = check.mutants();
      for (const char* name :
           {"dhidden_r_low_rank_left_out", "dhead_r_low_rank_doubled", "dhead_r_last_tile_dropped", "dhidden_r_block_left_out"}) {
        EXPECT_TRUE(is_caught(mutants, name)) << name << " " << isa << " " << testing::PrintToString(variant);
      }
    }
  }
  const std::vector<MutantVerdict> mutants = GradcheckCall(kBase).mutants();
  for (const char* name : {"dhead_of_other_part", "dhidden_r_of_other_part", "dbias_low_rank_left_out"})
    EXPECT_TRUE(is_caught(mutants, name)) << name;
}

TEST(GradcheckLowRank, AKernelThatLeavesItOutIsRejected) {
  const auto without = [](const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan&,
                          const tileloss_run* run) {
    tileloss_args less = args;
    less.hidden_r = less.head_r = less.dhidden_r = less.dhead_r = {};
    call(function, pass, less, make_plan(function, pass, less, {}), run);
  };
  const Sets failures = GradcheckCall(kBase, {}, without).failures();
  for (const char* gate : {"logp", "/dhidden/frobenius", "/dhead/cap", "/dhidden_r/nonfinite", "/dhead_r/nonfinite"})
    EXPECT_TRUE(has_part(failures, gate)) << gate;
}

TEST(GradcheckLowRankStrict, NothingIsFound) { EXPECT_EQ(strict_report({}, call, kBase).findings, Sets()); }

TEST(GradcheckLowRankTrace, TheRowOfBothPartsIsJudged) {
  const GradcheckConfig config = config_of(kBase);
  const GradcheckCall check(config);
  const int64_t row = check.inputs.used_rows()[1];
  KernelResults results = run_kernels(config, check.inputs, call);
  EXPECT_EQ(trace_row(config, check.inputs, results, row, std::nullopt).failures(), Sets());
  LinearGradient& dhidden_r = results.gradients.front().linear[3];
  ASSERT_EQ(dhidden_r.which, LinearOutput::kDhiddenR);
  dhidden_r.data.as<uint16_t>()[row * 5 + 2] = 0x4000;
  EXPECT_TRUE(has_part(trace_row(config, check.inputs, results, row, std::nullopt).failures(), "dhidden_r/cap"));
}

TEST(GradcheckLowRankFile, TheTensorsOfAFileAreThoseOfTheCall) {
  const GradcheckConfig config = config_of(kBase);
  ThreadTeam team(1);
  const CheckInputs drawn = make_inputs(config, team);
  std::vector<StoredTensor> tensors = input_tensors(config, drawn);
  const std::string of_file =
      "level=linear loss=cross_entropy valid_vocab=690 source.kind=safetensors source.path=/x.safetensors source.lm_head=head "
      "source.bias=bias source.hidden_r=hidden_r ";
  const auto refused = [&] { return refusal(of_file + "source.head_r=head_r", {}, {TensorFile("/x.safetensors", tensors)}); };
  const GradcheckCall check(config_of(of_file + "source.head_r=head_r", {}, {TensorFile("/x.safetensors", tensors)}));
  EXPECT_EQ(check.failures(), Sets());
  EXPECT_EQ(check.verdict.loss_kernel, GradcheckCall(kBase).verdict.loss_kernel);
  std::ranges::find(tensors, "hidden_r", &StoredTensor::name)->shape = {11, 15};
  EXPECT_TRUE(is_refused(refused(), "hidden_r: expected BF16 with the rows of hidden, got BF16 [11, 15]"));
  expect_config_errors(of_file, {{{}, "expected hidden_r and head_r, or neither"},
                                 {{"source.head_r=head_r", "rank=4"}, "rank: only with a synthetic source"}});
  expect_config_errors(
      kBase, {{{"rank=0"}, "gradients: expected none of a low-rank part without one, got dhidden_r"}, {{"rank=513"}, "rank"}});
}

}  // namespace
}  // namespace tileloss::tools
