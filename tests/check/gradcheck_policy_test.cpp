// gradcheck of the policy losses, end to end: every preset's config at a reduced size, the mutants that are theirs, real data.
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "support/result_writer.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;

const std::string kConfigs = TILELOSS_SOURCE_DIR "/configs/";

// The result line of a config with overrides; null if the program did not exit with 0.
Json check(const std::string& config, std::vector<std::string> sets) {
  const TemporaryFolder folder;
  std::vector<std::string> arguments = {"gradcheck", "--config", kConfigs + config};
  sets.push_back("output=" + (folder.path() / "r.jsonl").string());
  for (const std::string& set : sets) arguments.insert(arguments.end(), {"--set", set});
  const ProgramResult result = run_program(arguments);
  EXPECT_EQ(result.exit_code, 0) << config << "\n" << result.out << result.err;
  return result.exit_code == 0 ? read_results(folder.path() / "r.jsonl").lines.at(0) : Json();
}

// Whether the mutant was planted and a gate on the gradient caught it.
bool caught_in_gradient(const Json& line, const std::string& name) {
  for (const Json& mutant : line["mutants"]) {
    if (mutant["name"] != name || !mutant["planted"].get<bool>()) continue;
    for (const Json& gate : mutant["caught_by"]) {
      if (gate.get<std::string>().find("/dlogits/") != std::string::npos) return true;
    }
  }
  return false;
}

struct PresetCase {
  std::string preset;
  std::vector<std::string> mutants;  // those that this config must plant
  std::vector<std::string> metrics;  // those that must not be "does not apply"
};

void PrintTo(const PresetCase& preset_case, std::ostream* out) { *out << preset_case.preset; }

class GradcheckPresets : public testing::TestWithParam<PresetCase> {};

TEST_P(GradcheckPresets, AgreeInEveryDtypeWithEveryMutantCaught) {
  for (const std::string dtype : {"bf16", "fp16", "fp32"}) {
    const Json line = check("gradcheck_" + GetParam().preset + ".yaml", {"vocab_size=500", "source.std=2", "dtype=" + dtype});
    ASSERT_TRUE(line.is_object()) << dtype;
    EXPECT_EQ(line["preset"], GetParam().preset);
    for (const std::string& mutant : GetParam().mutants) {
      EXPECT_TRUE(caught_in_gradient(line, mutant)) << dtype << " " << mutant << "\n" << line["mutants"].dump(1);
    }
    for (const std::string& metric : GetParam().metrics) {
      EXPECT_TRUE(line.contains("metric/" + metric) && line["metric/" + metric].is_number()) << metric;
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
  const Json line = check("gradcheck_grpo_qwen2.5_1.5b.yaml", {"vocab_size=2000", "seq_len=9"});
  ASSERT_TRUE(line.is_object());
  EXPECT_EQ(line["kernel/in_place"], true);
  EXPECT_LT(line["shape/rows_used"], line["shape/rows"]);
  EXPECT_GT(line["decision_margin"], 2e-5);
}

// All 256 rows: values of another program, in float64.
void expect_whole_file(const std::string& folder) {
  const std::string path = "source.path=" + folder + "/qwen2-tiny-logits.safetensors";
  const Json plain = check("gradcheck_grpo_safetensors.yaml", {path, "beta=0"});
  ASSERT_TRUE(plain.is_object());
  EXPECT_NEAR(plain["loss_ref"].get<double>(), 0.2539432597434461, 1e-15);
  EXPECT_NEAR(plain["metric/clip_low_fraction_ref"].get<double>(), 13.0 / 249.0, 1e-15);
  EXPECT_NEAR(plain["metric/clip_high_fraction_ref"].get<double>(), 42.0 / 249.0, 1e-15);
  EXPECT_NEAR(plain["metric/ratio_mean_ref"].get<double>(), 1.0999995319732745, 1e-14);
  const Json kl = check("gradcheck_grpo_safetensors.yaml", {path});
  ASSERT_TRUE(kl.is_object());
  EXPECT_NEAR(kl["loss_ref"].get<double>(), 0.25439396349799703, 1e-15);
  EXPECT_NEAR(kl["metric/kl_ref"].get<double>(), 0.011267593863771836, 1e-15);
}

TEST(GradcheckPolicy, RealDataFromAFilePass) {
  const Json line = check("gradcheck_grpo_safetensors.yaml", {});
  ASSERT_TRUE(line.is_object());
  EXPECT_EQ(line["shape/rows_used"], 14);
  EXPECT_TRUE(caught_in_gradient(line, "clip_ignored"));
  EXPECT_TRUE(caught_in_gradient(line, "kl_gradient_dropped"));
  // The whole file too, if the environment names a folder that has it.
  if (const char* folder = std::getenv("TILELOSS_DATA")) expect_whole_file(folder);
}

TEST(GradcheckPolicy, ConfigErrorsNameTheKey) {
  struct Error {
    const char* config;
    const char* set;
    const char* message;
  };
  for (const Error& error : {Error{"gradcheck_bnpo.yaml", "preset=ppo", "preset: 'ppo' is none of grpo, "},
                             Error{"gradcheck_bnpo.yaml", "kl_importance=yes", "kl_importance: 'yes' is none of"},
                             Error{"gradcheck_bnpo.yaml", "sequences=ragged", "sequences: 'ragged' is none of"},
                             Error{"gradcheck_bnpo.yaml", "old_logp_noise_scale=-1", "old_logp_noise_scale: -1 is out of range"},
                             Error{"gradcheck_bnpo.yaml", "upstream=per_row", "upstream: per_row needs aggregation: none"},
                             Error{"gradcheck_bnpo.yaml", "mask_prob=2", "mask_prob: 2 is out of range"},
                             Error{"gradcheck_ce_options.yaml", "preset=grpo", "preset: unknown key"},
                             Error{"gradcheck_grpo_safetensors.yaml", "old_logp_noise_scale=0.1",
                                   "old_logp_noise_scale: the tensor comes from the file"},
                             Error{"gradcheck_grpo_safetensors.yaml", "mask_prob=0.1", "mask_prob: the mask comes from the file"},
                             Error{"gradcheck_grpo_safetensors.yaml", "source.old_logp=labels", "labels: expected F32, got I64"},
                             Error{"gradcheck_grpo_safetensors.yaml", "source.mask=logits",
                                   "logits: expected [16], as logits is [16, 30522], got [16, 30522]"}}) {
    const ProgramResult result =
        run_program({"gradcheck", "--config", kConfigs + error.config, "--set", error.set, "--set", "kernel.threads=1"});

    EXPECT_EQ(result.exit_code, 2) << error.set << result.err;
    EXPECT_NE(result.err.find(error.message), std::string::npos) << error.set << result.err;
  }
}

// A threshold on top of an entropy cannot be drawn away.
TEST(GradcheckPolicy, InputsThatCannotBeClearOfADecisionAreRefused) {
  const ProgramResult result = run_program({"gradcheck", "--config", kConfigs + "gradcheck_bnpo.yaml", "--set", "source.std=0",
                                            "--set", "vocab_size=8", "--set", "entropy_threshold=2.0794415"});
  EXPECT_EQ(result.exit_code, 2) << result.out;
  EXPECT_NE(result.err.find("choose another entropy_quantile"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace tileloss::tools
