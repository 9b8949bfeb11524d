// Random shapes, layouts, options and workspaces of the LM head's cross-entropy, all pairs of them: every case must agree with
// the oracle in the workspace that was planned.
#include <gtest/gtest.h>

#include "tests/api/kept_calls.h"
#include "tests/api/random_options.h"

namespace tileloss::test {
namespace {

constexpr int kLinearCases = 160;

std::vector<Factor> factors() {
  return {{"rows", {"1", "7", "33", "70"}},
          {"vocab", {"2", "17", "64", "300", "1000"}},
          {"hidden", {"1", "7", "33"}},
          {"valid_vocab", {"all", "fewer"}},
          {"hidden_layout", {"0", "1", "2"}},
          {"head_layout", {"0", "1", "2"}},
          {"misalignment", {"0", "1", "3"}},
          {"flush", {"right", "left"}},
          {"ignored", {"0", "0.3", "1"}},
          {"compute", {"0", "1", "2"}},  // none, float32, bfloat16
          {"logit_std", {"0.01", "2", "30"}},
          {"label_logit", {"0", "25"}},
          {"bias", {"no", "yes"}},
          {"float32_dhead", {"no", "yes"}},
          {"accumulate", {"no", "yes"}},
          {"kept", {"all", "0.7", "0.4", "rows", "recompute"}},
          {"threads", {"1", "3"}},
          {"label_smoothing", {"0", "0.1", "1"}},
          {"z_loss", {"0", "0.3"}},
          {"logit_scale", {"1", "3"}},
          {"softcap", {"0", "30"}},
          {"temperature", {"1", "0.6"}}};
}

LinearCaseSpec spec_of(const PairwiseSampler& s, NumberFormat format, std::uint64_t seed) {
  const std::int64_t vocab = s.integer("vocab");
  return {.row = {.rows = s.integer("rows"),
                  .vocab = vocab,
                  .valid_vocab = s.is("valid_vocab", "fewer") ? (vocab + 1) / 2 : -1,
                  .misalignment = s.integer("misalignment"),
                  .flush = s.is("flush", "left") ? Flush::kLeft : Flush::kRight,
                  .seed = seed,
                  .ignore_prob = s.number("ignored")},
          .hidden = s.integer("hidden"),
          .format = format,
          .head_format = format,
          .compute_dtype = static_cast<tileloss_dtype>(s.integer("compute")),
          .hidden_layout = static_cast<MatrixLayout>(s.integer("hidden_layout")),
          .head_layout = static_cast<MatrixLayout>(s.integer("head_layout")),
          .logit_std = s.number("logit_std"),
          .label_logit = s.number("label_logit"),
          .bias = s.is("bias", "yes"),
          .dbias = true,
          .float32_dhead = s.is("float32_dhead", "yes"),
          .accumulate = s.is("accumulate", "yes")};
}

class RandomLinear : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, RandomLinear, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(reference::format_info(param.param).name); });

TEST_P(RandomLinear, CrossEntropyAgreesForAllPairs) {
  // Hidden states of thousands, which lead to gradients beyond float16.
  const std::vector<Forbidden> forbidden = {{"logit_std", "0.01", "label_logit", "25"}};
  PairwiseSampler sampler(factors(), forbidden, 13);
  int failures = 0, partly_kept = 0, in_dhead = 0;
  for (int k = 0; k < kLinearCases && failures < kMaxFailures; ++k) {
    sampler.next();
    LinearCase c(spec_of(sampler, GetParam(), static_cast<std::uint64_t>(2000 + k)));
    tileloss_cross_entropy_options options = cross_entropy_options();
    options.label_smoothing = sampler.number("label_smoothing");
    options.z_loss = sampler.number("z_loss");
    options.logit.logit_scale = sampler.number("logit_scale");
    options.logit.softcap = sampler.number("softcap");
    options.logit.temperature.value = sampler.number("temperature");
    options.logit.valid_vocab = c.spec().row.valid_vocab;
    tileloss_plan_options wishes = stash_of_columns();
    if (sampler.is("kept", "rows")) wishes.row_block = 16;
    if (sampler.is("kept", "recompute")) wishes.schedule = TILELOSS_SCHEDULE_RECOMPUTE;
    if (sampler.is("kept", "0.7") || sampler.is("kept", "0.4")) {
      wishes.workspace_bytes = budget_for(run_within(c, options, wishes).plan, sampler.number("kept"));
    }
    // So little that not a tile would be kept: the planner may take recompute.
    if (wishes.workspace_bytes > 0) wishes.schedule = TILELOSS_SCHEDULE_AUTO;
    if (wishes.workspace_bytes == 0) wishes.threads = static_cast<std::int32_t>(sampler.integer("threads"));
    const KeptRun r = run_within(c, options, wishes);
    const std::int64_t valid = c.spec().row.valid_vocab < 0 ? c.spec().row.vocab : c.spec().row.valid_vocab;
    partly_kept += r.plan.cpu.kept_columns > 0 && r.plan.cpu.kept_columns < valid ? 1 : 0;
    in_dhead += r.plan.cpu.kept_rows > 0 ? 1 : 0;
    const testing::AssertionResult result = agrees(check_linear_cross_entropy(c, options));
    EXPECT_TRUE(result) << "case " << k << ": " << sampler.describe();
    failures += result ? 0 : 1;
  }
  EXPECT_GT(partly_kept, kLinearCases / 20);
  EXPECT_GT(in_dhead, 0);
  if (failures == 0) report_coverage("linear_cross_entropy", kLinearCases, GetParam(), sampler);
}

}  // namespace
}  // namespace tileloss::test
