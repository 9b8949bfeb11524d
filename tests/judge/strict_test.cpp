// gradcheck --strict: the shipped kernels pass on every instruction set, and what is found fails the check.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "tests/judge/strict_support.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

class StrictKernels : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

// Every option that reads or writes another tensor, or takes another path through memory.
const std::vector<std::vector<std::string>> kVariants = {
    {},
    {"kernel.in_place=true"},
    {"loss=logprobs", "upstream=per_row", "outputs=[logp, lse, entropy, argmax, correct, log_sum_sq_probs, mean_logit]"},
    {"token_weights=random", "class_weights=random", "label_smoothing=0.1", "upstream=random"},
    {"kernel.schedule=recompute", "reduction=none", "upstream=per_row", "kernel.vocab_block=64"},
    {"loss=policy_loss", "preset=gspo", "mask_prob=0.3", "old_logp_noise_scale=0.1", "sampler_logp_noise_scale=0.1"},
    {"kernel.schedule=sweeps", "kernel.in_place=true", "softcap=20", "kernel.threads=2"},
    {"kernel.schedule=stash", "kernel.vocab_block=64", "label_smoothing=0.1", "z_loss=1e-3", "softcap=20"},
};

struct Shape {
  int64_t rows, vocab;
  size_t variants;  // the first so many: forks and page faults of the large ones take most of the time
};
constexpr Shape kShapes[] = {{1, 1, 8},    {3, 1, 8},    {33, 1, 2},    {1, 17, 8},    {3, 17, 8},    {33, 17, 8},
                             {1, 1000, 8}, {3, 1000, 2}, {33, 1000, 8}, {1, 50257, 8}, {3, 50257, 2}, {33, 50257, 1}};

TEST_P(StrictKernels, TouchNothingButTheirTensors) {
  const auto& [isa, dtype] = GetParam();
  for (const Shape& shape : kShapes) {
    for (size_t i = 0; i < shape.variants; ++i) {
      std::vector<std::string> sets = kVariants.at(i);
      sets.insert(sets.end(), {"kernel.isa=" + isa, "dtype=" + dtype, "batch_size=1", "seq_len=" + std::to_string(shape.rows),
                               "vocab_size=" + std::to_string(shape.vocab)});
      const StrictReport report = strict_report(sets);
      EXPECT_TRUE(report.findings.empty()) << shape.rows << " x " << shape.vocab << ", variant " << i << "\n" << report.text();
      EXPECT_GE(report.calls, 3);
      EXPECT_EQ(report.rows, shape.rows);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, StrictKernels,
                         testing::Combine(testing::ValuesIn(supported_isas()), testing::Values("fp32", "bf16", "fp16")),
                         [](const testing::TestParamInfo<StrictKernels::ParamType>& instance) {
                           return std::get<0>(instance.param) + "_" + std::get<1>(instance.param);
                         });

TEST(Strict, SaysWhatItLookedAt) {
  const StrictReport report = strict_report({});
  EXPECT_EQ(report.text(), "strict: 4 calls in 7 layouts of guard-page buffers, 8 of 8 rows: nothing found\n");
  EXPECT_EQ(report.to_json()["calls"], 4);
  const StrictReport many_rows = strict_report({"seq_len=700", "vocab_size=17"});
  EXPECT_TRUE(many_rows.text().ends_with(", 700 of 1400 rows: nothing found\n")) << many_rows.text();
}

TEST(Strict, AFindingFailsTheCheck) {
  const GradcheckCall check(kConfig);
  GradcheckReport report{check.verdict, {}, {}};
  EXPECT_EQ(failures(check.config, report), Sets());
  report.strict = strict_report({}, planted(TILELOSS_VALUE_AND_GRAD, [](const tileloss_args& args, const tileloss_run&) {
                                  write_at<uint16_t>(args.dlogits.data, 7 * args.dlogits.row_stride + 1000 + 2);
                                }));
  EXPECT_EQ(failures(check.config, report), Sets{"strict"});
}

}  // namespace
}  // namespace tileloss::tools
