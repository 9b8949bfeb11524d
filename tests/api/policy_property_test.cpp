// Random policy losses, all pairs of options: every case must agree with the oracle.
// On toy and cuda: RandomPolicies.
#include <gtest/gtest.h>

#include <limits>

#include "tests/api/random_options.h"
#include "tests/shared/policy_case.h"

namespace tileloss::test {
namespace {

constexpr int kPolicyCases = 400;

std::vector<Factor> policy_factors() {
  return {{"rows", {"2", "7", "33"}},
          {"vocab", {"1", "2", "17", "127", "1000", "2049"}},
          {"distribution", {"normal", "uniform", "wide", "offset_plus", "spike_first", "confident"}},
          {"valid_vocab", {"all", "half"}},
          {"stride_extra", {"0", "13"}},
          {"misalignment", {"0", "3"}},
          {"flush", {"right", "left"}},
          {"ignored", {"0", "0.3", "1"}},
          {"ignore_index", {"-100", "0"}},
          {"labels", {"int32", "int64"}},
          {"outputs", {"none", "logp_lse", "all"}},
          {"in_place", {"no", "yes"}},
          {"schedule", {"0", "3"}},
          {"vocab_block", {"0", "64"}},
          {"row_block", {"0", "5"}},
          {"threads", {"0", "1", "3"}},
          {"logit_scale", {"1", "0.5"}},
          {"softcap", {"0", "30"}},
          {"temperature", {"1", "0.6"}},
          {"numbers_by", {"value", "pointer"}},
          {"temperature_on", {"logits", "logprob"}},
          {"passes", {"value_and_grad", "saved_state", "no_state"}},
          {"loss_grad", {"absent", "scalar", "per_row", "strided", "broadcast"}},
          {"sequences", {"offsets32", "offsets64", "length"}},
          {"mask", {"none", "uint8", "int32", "int64", "float32"}},
          {"metrics", {"no", "yes"}},
          {"old_logp", {"no", "yes"}},
          {"kind", {"clip", "cispo", "sapo", "vespo", "reinforce"}},
          {"ratio_level", {"token", "sequence"}},
          {"advantage_level", {"token", "sequence"}},
          {"aggregation", {"seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum", "sum", "none"}},
          {"clip", {"default", "low", "asymmetric", "delta", "dual_clip"}},
          {"cispo_cap", {"raw", "one_plus", "cap_low"}},
          {"log_ratio_clamp", {"off", "0.2"}},
          {"sampler", {"off", "truncate_token", "truncate_sequence", "mask_token", "mask_sequence"}},
          {"off_policy", {"off", "0.05"}},
          {"entropy_mask", {"off", "quantile", "threshold"}},
          {"kl", {"off", "k1", "k2", "k3", "k3_clamped"}},
          {"kl_importance", {"no", "yes"}},
          {"entropy_bonus", {"off", "token_mean", "as_loss"}},
          {"num_items", {"absent", "12.5", "0"}}};
}

// An upstream gradient per row means aggregation none; num_items is for two aggregations.
std::vector<Forbidden> policy_forbidden() {
  const std::vector<const char*> by_row = {"per_row", "strided", "broadcast"}, items = {"12.5", "0"};
  std::vector<Forbidden> all = {{"aggregation", "none", "entropy_bonus", "token_mean"},
                                {"aggregation", "none", "loss_grad", "scalar"}};
  forbid(all, "kind", {"vespo"}, "sampler", {"truncate_sequence", "mask_sequence"});
  forbid(all, "aggregation", {"seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum", "sum"},
         "loss_grad", by_row);
  forbid(all, "loss_grad", by_row, "entropy_bonus", {"token_mean"});
  forbid(all, "loss_grad", by_row, "num_items", items);
  forbid(all, "aggregation", {"seq_mean_token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum", "none"}, "num_items",
         items);
  return all;
}

void set_masks(const PairwiseSampler& s, tileloss_policy_loss_options& o) {
  if (!s.is("sampler", "off")) {
    const bool truncate = s.is("sampler", "truncate_token") || s.is("sampler", "truncate_sequence");
    const bool sequence = s.is("sampler", "truncate_sequence") || s.is("sampler", "mask_sequence");
    o.sampler_correction = truncate ? TILELOSS_SAMPLER_TRUNCATE : TILELOSS_SAMPLER_MASK;
    o.sampler_level = sequence ? TILELOSS_LEVEL_SEQUENCE : TILELOSS_LEVEL_TOKEN;
    o.sampler_max = 1.3;
    if (!truncate) o.sampler_min = 0.6;
  }
  if (!s.is("off_policy", "off")) o.off_policy_threshold = 0.05;
  if (s.is("entropy_mask", "quantile")) o.entropy_quantile = 0.6;
  if (s.is("entropy_mask", "threshold")) o.entropy_threshold.value = 0.123;
}

void set_policy_options(const PairwiseSampler& s, Numbers& numbers, tileloss_policy_loss_options& o) {
  for (const char* choice : {"kind", "ratio_level", "advantage_level", "aggregation"}) {
    EXPECT_TRUE(succeeds(tileloss_options_set_choice("policy_loss", &o, choice, s.level(choice).c_str())));
  }
  if (o.aggregation == TILELOSS_SEQ_MEAN_TOKEN_SUM_NORM) o.max_length = 40;
  if (!s.is("clip", "default")) o.epsilon_low.value = 0.1;
  const bool has_high = !s.is("clip", "default") && !s.is("clip", "low");
  if (has_high) set_number(s, o.epsilon_high, numbers.epsilon_high, 0.28);
  if (o.kind == TILELOSS_POLICY_CISPO && !has_high) o.epsilon_high.value = 1.1;
  if (s.is("clip", "delta")) o.delta.value = 1.25;
  if (s.is("clip", "dual_clip")) o.dual_clip.value = 1.35;
  if (s.is("cispo_cap", "one_plus")) o.cispo_cap = TILELOSS_CISPO_CAP_ONE_PLUS;
  if (s.is("cispo_cap", "cap_low")) o.cap_low.value = 0.8;
  if (!s.is("log_ratio_clamp", "off")) o.log_ratio_clamp = 0.2;
  set_masks(s, o);
  if (!s.is("kl", "off")) {
    set_number(s, o.beta, numbers.beta, 0.25);
    o.kl_estimator = s.is("kl", "k1") ? TILELOSS_KL_K1 : s.is("kl", "k2") ? TILELOSS_KL_K2 : TILELOSS_KL_K3;
    if (s.is("kl", "k3_clamped")) {
      o.kl_log_ratio_clamp = 0.4;
      o.kl_clamp = 0.05;
    }
  }
  o.kl_importance = s.is("kl_importance", "yes") ? 1 : 0;
  if (!s.is("entropy_bonus", "off")) {
    o.entropy_coef.value = 0.125;
    o.entropy_reduction = s.is("entropy_bonus", "as_loss") ? TILELOSS_ENTROPY_AS_LOSS : TILELOSS_ENTROPY_TOKEN_MEAN;
  }
  if (!s.is("num_items", "absent")) set_number(s, o.num_items, numbers.num_items, s.number("num_items"));
  leave_out_without_effect("policy_loss", o);
}

PolicyCaseSpec policy_spec(const PairwiseSampler& s, NumberFormat format, std::uint64_t seed) {
  PolicyCaseSpec spec;
  spec.logits = common_spec(s, format, seed);
  spec.logits.loss_grad = upstream_named(s.level("loss_grad"));
  spec.use_offsets = !s.is("sequences", "length");
  spec.int32_offsets = s.is("sequences", "offsets32");
  spec.sequences = spec.use_offsets ? 3 : spec.logits.rows == 33 ? 11 : 1;
  spec.mask_dtype = s.is("mask", "uint8")     ? TILELOSS_UINT8
                    : s.is("mask", "int32")   ? TILELOSS_INT32
                    : s.is("mask", "int64")   ? TILELOSS_INT64
                    : s.is("mask", "float32") ? TILELOSS_FLOAT32
                                              : TILELOSS_NONE;
  spec.metrics = s.is("metrics", "yes");
  spec.old_logp = s.is("old_logp", "yes");
  spec.ref_logp = !s.is("kl", "off");
  spec.sampler_logp = !s.is("sampler", "off");
  return spec;
}

class RandomPolicies : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, RandomPolicies, testing::ValuesIn(kFormats), format_name);

TEST_P(RandomPolicies, AgreeForAllPairs) {
  const auto agree = [](const PairwiseSampler& s, std::uint64_t number) {
    const PolicyCaseSpec spec = policy_spec(s, GetParam(), 2000 + number);
    tileloss_policy_loss_options options;
    Numbers numbers;
    set_logit_options(s, spec.logits, numbers, options.logit);
    set_policy_options(s, numbers, options);
    PolicyCase c(spec, options);
    const auto ran = run_passes("policy_loss", s.level("passes"), c.logits(), &options, hints_of(s));
    return ran ? agrees(c.check()) : ran;
  };
  expect_all_pairs_agree("policy_loss", GetParam(), {policy_factors(), policy_forbidden(), 13}, kPolicyCases, agree);
}

}  // namespace
}  // namespace tileloss::test
