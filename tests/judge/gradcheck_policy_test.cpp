// gradcheck of the policy losses: every preset's config at a reduced size, the mutants that are theirs, real data.
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

struct PresetCase {
  std::string preset;
  std::vector<std::string> mutants;  // those that this config must plant
  std::vector<std::string> metrics;  // those that must not be "does not apply"
};

void PrintTo(const PresetCase& preset_case, std::ostream* out) { *out << preset_case.preset; }

class GradcheckPresets : public testing::TestWithParam<PresetCase> {};

TEST_P(GradcheckPresets, AgreeInEveryDtypeWithEveryMutantCaught) {
  for (const std::string dtype : {"bf16", "fp16", "fp32"}) {
    const GradcheckCall check("gradcheck_" + GetParam().preset + ".yaml", {"vocab_size=500", "source.std=2", "dtype=" + dtype});
    EXPECT_EQ(check.config.function.preset(), GetParam().preset);
    const std::vector<MutantVerdict> mutants = check.mutants();
    for (const std::string& name : GetParam().mutants) EXPECT_TRUE(is_caught(mutants, name, "/dlogits/")) << dtype << name;
    const Json metrics = check.metrics();
    for (const std::string& metric : GetParam().metrics) {
      EXPECT_TRUE(metrics.contains("metric/" + metric) && metrics["metric/" + metric].is_number()) << metric;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Of, GradcheckPresets,
    testing::Values(
        PresetCase{"bnpo", {"clip_ignored", "kl_gradient_dropped"}, {"kl", "clip_fraction"}},
        PresetCase{"dr_grpo", {"clip_ignored"}, {"ratio_mean"}},
        PresetCase{"dapo", {"clip_ignored", "entropy_gradient_dropped"}, {"entropy", "tokens"}},
        PresetCase{"cispo", {"clip_ignored", "sampler_ignored"}, {"cispo_clip_fraction", "sampler_ratio_max"}},
        PresetCase{"sapo", {}, {"ratio_mean"}},
        PresetCase{"gspo", {"clip_ignored", "ratio_of_token", "masks_ignored", "kl_gradient_dropped"}, {"dropped_sequences"}},
        PresetCase{"luspo", {"clip_ignored", "ratio_of_token"}, {"clip_high_fraction"}},
        PresetCase{"vespo", {"sampler_ignored"}, {"phi_mean", "sampler_ratio_min"}},
        PresetCase{"reinforce", {"first_row_upstream", "entropy_gradient_dropped"}, {"entropy"}}),
    [](const auto& preset_case) { return preset_case.param.preset; });

TEST(GradcheckPolicy, TheLargeConfigPassesAtASmallSize) {
  const GradcheckCall check("gradcheck_grpo_qwen2.5_1.5b.yaml", {"vocab_size=2000", "seq_len=9"});
  EXPECT_FALSE(check.mutants().empty());
  EXPECT_TRUE(check.config.in_place);
  EXPECT_LT(std::ssize(check.inputs.used_rows()), check.inputs.rows);
  EXPECT_GT(check.verdict.margin, 2e-5);
}

// All 256 rows: values of another program, in float64.
void expect_whole_file(const std::string& folder) {
  const std::string path = "source.path=" + folder + "/qwen2-tiny-logits.safetensors";
  const GradcheckCall plain("gradcheck_grpo_safetensors.yaml", {path, "beta=0"});
  EXPECT_EQ(plain.failures(), Sets());
  const Json metrics = plain.metrics();
  EXPECT_NEAR(plain.verdict.loss_ref, 0.2539432597434461, 1e-15);
  EXPECT_NEAR(metrics["metric/clip_low_fraction_ref"].get<double>(), 13.0 / 249.0, 1e-15);
  EXPECT_NEAR(metrics["metric/clip_high_fraction_ref"].get<double>(), 42.0 / 249.0, 1e-15);
  EXPECT_NEAR(metrics["metric/ratio_mean_ref"].get<double>(), 1.0999995319732745, 1e-14);
  const GradcheckCall kl("gradcheck_grpo_safetensors.yaml", {path});
  EXPECT_EQ(kl.failures(), Sets());
  EXPECT_NEAR(kl.verdict.loss_ref, 0.25439396349799703, 1e-15);
  EXPECT_NEAR(kl.metrics()["metric/kl_ref"].get<double>(), 0.011267593863771836, 1e-15);
}

TEST(GradcheckPolicy, RealDataFromAFilePass) {
  const GradcheckCall check("gradcheck_grpo_safetensors.yaml");
  EXPECT_EQ(check.inputs.used_rows().size(), 14U);
  const std::vector<MutantVerdict> mutants = check.mutants();
  EXPECT_TRUE(is_caught(mutants, "clip_ignored", "/dlogits/"));
  EXPECT_TRUE(is_caught(mutants, "kl_gradient_dropped", "/dlogits/"));
  // The whole file too, if the environment names a folder that has it.
  if (const char* folder = std::getenv("TILELOSS_DATA")) expect_whole_file(folder);
}

TEST(GradcheckPolicy, ConfigErrorsNameTheKey) {
  expect_config_errors("gradcheck_bnpo.yaml",
                       {{{"preset=ppo"}, "preset: 'ppo' is none of grpo, "},
                        {{"kl_importance=yes"}, "kl_importance: 'yes' is none of"},
                        {{"sequences=ragged"}, "sequences: 'ragged' is none of"},
                        {{"old_logp_noise_scale=-1"}, "old_logp_noise_scale: -1 is out of range"},
                        {{"upstream=per_row"}, "upstream: per_row needs aggregation: none"},
                        {{"mask_prob=2"}, "mask_prob: 2 is out of range"},
                        // A threshold on top of an entropy cannot be drawn away.
                        {{"source.std=0", "vocab_size=8", "entropy_threshold=2.0794415"}, "choose another entropy_quantile"}});
  expect_config_errors("gradcheck_ce_options.yaml", {{{"preset=grpo"}, "preset: unknown key"}});
  expect_config_errors("gradcheck_grpo_safetensors.yaml",
                       {{{"old_logp_noise_scale=0.1"}, "old_logp_noise_scale: the tensor comes from the file"},
                        {{"mask_prob=0.1"}, "mask_prob: the mask comes from the file"},
                        {{"source.old_logp=labels"}, "labels: expected F32, got I64"},
                        {{"source.mask=logits"}, "logits: expected [16], as logits is [16, 30522], got [16, 30522]"}});
}

}  // namespace
}  // namespace tileloss::tools
