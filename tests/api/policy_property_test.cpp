// Random policy losses, all pairs of options: every case must agree with the oracle.
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
          {"valid_vocab", {"all", "fewer"}},
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
          {"clip", {"default", "asymmetric", "delta", "dual_clip"}},
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

std::vector<Forbidden> policy_forbidden() {
  std::vector<Forbidden> all = {{"kind", "vespo", "sampler", "truncate_sequence"},
                                {"kind", "vespo", "sampler", "mask_sequence"},
                                {"aggregation", "none", "entropy_bonus", "token_mean"},
                                {"aggregation", "none", "loss_grad", "scalar"}};
  for (const char* aggregation : {"seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum", "sum"}) {
    for (const char* upstream : {"per_row", "strided", "broadcast"})
      all.push_back({"aggregation", aggregation, "loss_grad", upstream});
  }
  // An upstream gradient per row means aggregation none, which excludes these.
  for (const char* upstream : {"per_row", "strided", "broadcast"}) {
    all.push_back({"loss_grad", upstream, "entropy_bonus", "token_mean"});
    for (const char* items : {"12.5", "0"}) all.push_back({"loss_grad", upstream, "num_items", items});
  }
  for (const char* aggregation : {"seq_mean_token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum", "none"}) {
    for (const char* items : {"12.5", "0"}) all.push_back({"aggregation", aggregation, "num_items", items});
  }
  return all;
}

// The place of a level in a factor's list, as the choice fields number them.
int place(const PairwiseSampler& s, const char* factor, std::initializer_list<const char*> levels) {
  int at = 0;
  for (const char* level : levels) {
    if (s.is(factor, level)) return at;
    ++at;
  }
  return 0;
}

// Numbers that may be given behind a pointer, which have to stay where they are.
struct Numbers {
  float temperature = 1, epsilon_high = 1, beta = 0, num_items = 1;
};

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
  const bool by_pointer = s.is("numbers_by", "pointer");
  const auto set = [&](tileloss_scalar& scalar, float& place_of, double value) {
    place_of = static_cast<float>(value);
    scalar.value = static_cast<double>(place_of);
    if (by_pointer) scalar = {-1, &place_of};
  };
  o.kind = place(s, "kind", {"clip", "cispo", "sapo", "vespo", "reinforce"});
  o.ratio_level = place(s, "ratio_level", {"token", "sequence"});
  o.advantage_level = place(s, "advantage_level", {"token", "sequence"});
  o.aggregation = place(s, "aggregation",
                        {"seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum", "sum", "none"});
  if (o.aggregation == TILELOSS_SEQ_MEAN_TOKEN_SUM_NORM) o.max_length = 40;
  if (!s.is("clip", "default")) {
    o.epsilon_low.value = 0.1;
    set(o.epsilon_high, numbers.epsilon_high, 0.28);
  }
  if (o.kind == TILELOSS_POLICY_CISPO && s.is("clip", "default")) o.epsilon_high.value = 1.1;
  if (s.is("clip", "delta")) o.delta.value = 1.25;
  if (s.is("clip", "dual_clip")) o.dual_clip.value = 1.35;
  if (s.is("cispo_cap", "one_plus")) o.cispo_cap = TILELOSS_CISPO_CAP_ONE_PLUS;
  if (s.is("cispo_cap", "cap_low")) o.cap_low.value = 0.8;
  if (!s.is("log_ratio_clamp", "off")) o.log_ratio_clamp = 0.2;
  set_masks(s, o);
  if (!s.is("kl", "off")) {
    set(o.beta, numbers.beta, 0.25);
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
  if (!s.is("num_items", "absent")) set(o.num_items, numbers.num_items, s.number("num_items"));
}

PolicyCaseSpec policy_spec(const PairwiseSampler& s, NumberFormat format, std::uint64_t seed) {
  PolicyCaseSpec spec;
  spec.logits = common_spec(s, format, seed);
  spec.logits.loss_grad = upstream_named(s.level("loss_grad"));
  spec.use_offsets = !s.is("sequences", "length");
  spec.int32_offsets = s.is("sequences", "offsets32");
  spec.sequences = spec.use_offsets ? 3 : spec.logits.rows == 33 ? 11 : 1;
  constexpr tileloss_dtype kMasks[] = {TILELOSS_NONE, TILELOSS_UINT8, TILELOSS_INT32, TILELOSS_INT64, TILELOSS_FLOAT32};
  spec.mask_dtype = kMasks[place(s, "mask", {"none", "uint8", "int32", "int64", "float32"})];
  spec.metrics = s.is("metrics", "yes");
  spec.old_logp = s.is("old_logp", "yes");
  spec.ref_logp = !s.is("kl", "off");
  spec.sampler_logp = !s.is("sampler", "off");
  return spec;
}

class RandomPolicies : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, RandomPolicies, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(reference::format_info(param.param).name); });

TEST_P(RandomPolicies, AgreeForAllPairs) {
  PairwiseSampler sampler(policy_factors(), policy_forbidden(), 13);
  int failures = 0;
  for (int k = 0; k < kPolicyCases && failures < kMaxFailures; ++k) {
    sampler.next();
    const PolicyCaseSpec spec = policy_spec(sampler, GetParam(), static_cast<std::uint64_t>(2000 + k));
    tileloss_policy_loss_options options;
    tileloss_policy_loss_options_init(&options);
    Numbers numbers;
    set_logit_options(sampler, spec.logits, numbers.temperature, options.logit);
    set_policy_options(sampler, numbers, options);
    PolicyCase c(spec, options);
    testing::AssertionResult result =
        run_passes("policy_loss", sampler.level("passes"), c.logits(), &options, wishes_of(sampler));
    if (result) result = agrees(c.check());
    EXPECT_TRUE(result) << "case " << k << ": " << sampler.describe();
    failures += result ? 0 : 1;
  }
  if (failures == 0) report_coverage("policy_loss", kPolicyCases, GetParam(), sampler);
}

}  // namespace
}  // namespace tileloss::test
