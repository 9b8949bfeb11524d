// gradcheck from logits: what passes, what fails, what is refused; and every mutant is caught.
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

constexpr const char* kSmall =
    "loss=cross_entropy batch_size=2 seq_len=9 vocab_size=3001 dtype=bf16 seed=3 ignore_prob=0.2 source.std=2 "
    "outputs=[logp, lse, entropy, argmax, correct, log_sum_sq_probs, mean_logit]";

TEST(Gradcheck, AGateThatFailsIsNamed) {
  EXPECT_EQ(GradcheckCall(kSmall).failures(), Sets());
  const Sets failed = GradcheckCall(kSmall, {"tolerances.dlogits_max_abs=1e-12"}).failures();
  EXPECT_EQ(failed, (Sets{"value_and_grad/dlogits_max_abs", "backward_from_row_state/dlogits_max_abs"}));
}

TEST(Gradcheck, WhatThePlannerRefusesIsNamedWithTheConfigsKey) {
  const std::string problem = "kernel.vocab_block: expected a multiple of 64 up to ";
  expect_config_errors(kSmall, {{{"kernel.vocab_block=100"}, "kernel.vocab_block=100: " + problem},
                                {{"kernel.vocab_block=64", "valid_vocab=3002"},
                                 "valid_vocab=3002: valid_vocab: expected <= the logits' columns = 3001, got 3002"}});
}

TEST(Gradcheck, ADeviceThatCannotBeHadIsNamed) {
  expect_config_errors(kSmall, {{{"kernel.device=gpu"}, "kernel.device: expected cpu, cuda or cuda:N, got gpu"}});
  const std::string missing = refusal(kSmall, {"kernel.device=cuda:99"});
  EXPECT_TRUE(missing.starts_with("3: device: expected ")) << missing;
  EXPECT_NE(missing.find("got cuda:99"), std::string::npos) << missing;
}

TEST(Gradcheck, ImpossibleSizesAreRefusedBeforeAnythingIsAllocated) {
  const auto start = std::chrono::steady_clock::now();
  const std::string refused = refusal(kSmall, {"seq_len=1000000000"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));  // drawing the labels alone takes longer
  EXPECT_TRUE(refused.starts_with("3: logits: needs")) << refused;
}

TEST(Gradcheck, HasEveryMetricAndGate) {
  const GradcheckCall check(kSmall);
  const Json metrics = check.metrics();
  for (const char* key : {"loss_ref", "loss_kernel", "abs_diff_loss", "fwd/logp_max_abs", "fwd/per_loss_max_abs",
                          "dlogits_max_abs", "dlogits_max_rel", "dlogits_mean_abs", "dlogits_ulp_target",
                          "dlogits_ulp_off_target", "dlogits_normwise", "time/ref_s"}) {
    ASSERT_TRUE(metrics.contains(key) && metrics[key].is_number()) << key;
  }
  EXPECT_EQ(metrics["shape/vocab_size"], 3001);
  EXPECT_EQ(metrics["shape/rows"], 18);
  EXPECT_GE(check.verdict.gates.size(), 20U);
}

TEST(Gradcheck, TheSameSeedGivesTheSameNumbers) {
  const Json first = GradcheckCall(kSmall).metrics();
  const Json second = GradcheckCall(kSmall, {"kernel.threads=1", "kernel.row_block=1"}).metrics();
  for (const char* key : {"loss_ref", "loss_kernel", "dlogits_max_abs", "dlogits_normwise"}) EXPECT_EQ(first[key], second[key]);
  EXPECT_NE(first["loss_ref"], GradcheckCall(kSmall, {"seed=4"}).metrics()["loss_ref"]);
}

TEST(Gradcheck, RealLogitsFromAFilePass) {
  const std::string config = "gradcheck_ce_safetensors.yaml";
  EXPECT_EQ(GradcheckCall(config).failures(), Sets());
  for (const char* set : {"vocab_size=30000", "dtype=fp32", "seq_len=17", "source.logits=nothing", "source.labels=advantages",
                          "valid_vocab=40000"}) {
    EXPECT_TRUE(is_refused(refusal(config, {set}), "")) << set;
  }
}

// float16 holds no number below 6e-8: the gradient of a mean over a wide softmax is nearly all zeros.
TEST(Gradcheck, AMostlyZeroGradientIsMistrustedUnlessExpected) {
  const Sets sets = {"dtype=fp16", "vocab_size=150000", "num_items=1000"};
  EXPECT_EQ(GradcheckCall(kSmall, sets).failures(), Sets{"inputs/zero_fraction"});
  EXPECT_EQ(GradcheckCall(kSmall, joined(sets, {"expect_mostly_zero=true"})).failures(), Sets());
}

TEST(Gradcheck, ATensorThatAnOptionNeedsIsAskedForByTheConfigsKeys) {
  const std::string base = "loss=policy_loss batch_size=1 seq_len=4 vocab_size=64 dtype=fp32";
  for (const std::string level : {"", " level=linear hidden_size=8"}) {
    expect_config_errors(
        base + level,
        {{{"beta=1"}, "ref_logp_noise_scale: expected a number, or source.ref_logp of a file, as beta is not 0, got neither"},
         {{"sampler_correction=truncate"},
          "sampler_logp_noise_scale: expected a number, or source.sampler_logp of a file, as sampler_correction is not off, got "
          "neither"}});
  }
}

// ----------------------------------------------------------------------------------------------------- tensors of a file

constexpr const char* kOfAFile = "loss=cross_entropy source.kind=safetensors source.path=/x.safetensors";

TEST(GradcheckFile, LabelsHaveTheLogitsLeadingDimensionsOrAreFlat) {
  const std::vector<float> logits(2 * 2 * 40, 0.5F);
  const auto refused = [&](const std::vector<int64_t>& shape) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    const std::vector<int64_t> labels(static_cast<size_t>(count), 1);
    return refusal(
        kOfAFile, {},
        {TensorFile("/x.safetensors", {stored("logits", "F32", {2, 2, 40}, logits), stored("labels", "I64", shape, labels)})});
  };
  EXPECT_EQ(refused({2, 2}), "");
  EXPECT_EQ(refused({4}), "");
  for (const auto& [shape, text] : std::vector<std::pair<std::vector<int64_t>, std::string>>{
           {{2, 3}, "[2, 3]"}, {{1, 4}, "[1, 4]"}, {{2, 2, 1}, "[2, 2, 1]"}, {{6}, "[6]"}, {{3}, "[3]"}}) {
    EXPECT_TRUE(is_refused(refused(shape), "labels: expected [2, 2] or [4], as logits is [2, 2, 40], got " + text));
  }
}

TEST(GradcheckFile, ALabelThatIsNoClassIsNamedWithItsFileAndRow) {
  const std::vector<float> logits(3 * 8, 0.5F);
  const auto refused = [&](int64_t label) {
    const std::vector<int64_t> labels = {1, 2, label};
    return refusal(
        kOfAFile, {},
        {TensorFile("/x.safetensors", {stored("logits", "F32", {3, 8}, logits), stored("labels", "I64", {3}, labels)})});
  };
  for (const int64_t label : {7, -100}) EXPECT_EQ(refused(label), "") << label;
  for (const int64_t label : {8, -1}) {
    EXPECT_TRUE(is_refused(refused(label), "x.safetensors: labels: row 2: expected a label from 0 to 7, or -100 (ignore_index)"));
  }
}

// Three rows of logits in a file, the third ignored.
GradcheckCall check_rows(float first, float second, const Sets& sets = {}) {
  constexpr int64_t kColumns = 40;
  std::vector<float> logits(3 * kColumns, second);
  std::fill_n(logits.begin(), kColumns, first);
  const std::vector<int64_t> labels = {1, 2, -100};
  return GradcheckCall(config_of(
      kOfAFile, sets,
      {TensorFile("/x.safetensors", {stored("logits", "F32", {3, kColumns}, logits), stored("labels", "I64", {3}, labels)})}));
}

TEST(GradcheckFile, WithoutOneFiniteRowIsMistrusted) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  for (const auto& [first, second] : {std::pair(kNan, kNan), {kInfinity, kInfinity}, {-kInfinity, kNan}}) {
    for (const Sets& sets : {Sets{}, {"loss=logprobs"}, {"expect_mostly_zero=true"}}) {
      EXPECT_EQ(check_rows(first, second, sets).failures(), Sets{"inputs/nonfinite_fraction"}) << first << second;
    }
  }
}

// Rows of special values are checked beside others.
TEST(GradcheckFile, OneFiniteRowIsEnough) {
  for (const float special : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    for (const char* set : {"reduction=none", "loss=logprobs"}) {
      const GradcheckCall check = check_rows(special, 0.5F, {set});
      EXPECT_EQ(check.failures(), Sets());
      EXPECT_GT(check.gate("inputs/nonfinite_fraction").value, 0);
    }
  }
}

// --------------------------------------------------------------------------------------------------------------- mutants

// Mistakes that no config of full rows of tiles, adjoining rows and labels far from the argmax would show.
TEST(Gradcheck, TheConfigsOfEdgesPlantAndCatchWhatOthersDoNot) {
  for (const auto& [config, names] :
       {std::pair("gradcheck_ce_edges.yaml", Sets{"partial_tile_skipped", "row_group_off_by_one"}),
        {"gradcheck_policy_edges.yaml", {"partial_tile_skipped", "row_group_off_by_one", "entropy_sign_at_argmax"}}}) {
    for (const std::string dtype : {"bf16", "fp16", "fp32"}) {
      for (const std::string in_place : {"false", "true"}) {
        const std::vector<MutantVerdict> mutants =
            GradcheckCall(config, {"dtype=" + dtype, "kernel.in_place=" + in_place}).mutants();
        for (const std::string& name : names) EXPECT_TRUE(is_caught(mutants, name)) << config << dtype << name;
      }
    }
  }
}

TEST(Gradcheck, AMutantThatNothingCatchesFailsTheCheck) {
  const GradcheckCall check(kSmall, {"mutants=true"});
  const MutantVerdict caught{"gradient_zero", true, {"lse"}}, missed{"loss_halved", true, {}}, absent{"loss_shifted", false, {}};
  const auto failed = [&](const std::vector<MutantVerdict>& mutants) {
    return failures(check.config, {check.verdict, mutants, {}});
  };
  EXPECT_EQ(failed({caught, absent}), Sets());
  EXPECT_EQ(failed({caught, missed}), Sets{"mutant loss_halved"});
  EXPECT_EQ(failed({absent}), Sets{"mutants (none could be planted)"});
}

struct MutantCase {
  std::string name;
  Sets sets;
  Sets dtypes = {"bf16", "fp16", "fp32"};
};

void PrintTo(const MutantCase& mutant_case, std::ostream* out) { *out << mutant_case.name; }

class GradcheckMutants : public testing::TestWithParam<MutantCase> {};

TEST_P(GradcheckMutants, AreAllCaught) {
  for (const std::string& dtype : GetParam().dtypes) {
    EXPECT_GE(GradcheckCall(kSmall, joined(GetParam().sets, {"dtype=" + dtype})).mutants().size(), 5U) << dtype;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Families, GradcheckMutants,
    testing::Values(
        MutantCase{"plain", {}}, MutantCase{"in_place", {"kernel.in_place=true"}}, MutantCase{"sum", {"reduction=sum"}},
        MutantCase{"none_per_row", {"reduction=none", "upstream=per_row"}},
        MutantCase{"none_wide", {"reduction=none", "upstream=per_row", "source.distribution=wide", "source.std=1"}},
        MutantCase{"z_loss", {"z_loss=1e-2"}},
        MutantCase{"smoothing_z_loss", {"label_smoothing=0.1", "z_loss=1e-3", "reduction=sum"}},
        MutantCase{
            "weights",
            {"token_weights=random", "class_weights=random", "label_smoothing=0.2", "upstream=random", "outputs=[logp, lse]"}},
        MutantCase{"transforms", {"softcap=20", "temperature=0.7", "logit_scale=1.5"}},
        MutantCase{"temperature_on_logprob", {"temperature=0.5", "temperature_on=logprob"}},
        MutantCase{"padding", {"valid_vocab=2900"}},
        // Not float16, which rounds this gradient to zeros.
        MutantCase{"confident", {"source.distribution=confident", "source.std=1", "reduction=sum"}, {"bf16", "fp32"}},
        MutantCase{"logprobs_ones", {"loss=logprobs"}}, MutantCase{"logprobs_per_row", {"loss=logprobs", "upstream=per_row"}},
        MutantCase{"logprobs_in_place", {"loss=logprobs", "upstream=random", "kernel.in_place=true", "temperature=1.3"}}),
    [](const testing::TestParamInfo<MutantCase>& test_case) { return test_case.param.name; });

}  // namespace
}  // namespace tileloss::tools
