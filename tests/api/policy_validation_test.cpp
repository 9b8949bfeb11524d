// What policy_loss refuses, and that the message names the argument, what was expected and what was given.
// On toy and cuda: PolicyValidation.
#include <gtest/gtest.h>

#include <limits>

#include "tests/api/corrupted_call.h"
#include "tests/shared/policy_case.h"

namespace tileloss::test {
namespace {

// 6 rows, 10 columns, 3 sequences by offsets.
struct PolicyCall {
  std::string function = "policy_loss";
  tileloss_pass pass = TILELOSS_VALUE_AND_GRAD;
  tileloss_policy_loss_options options = policy_options("grpo");
  PolicyCase data{{.logits = {.rows = 6, .vocab = 10}, .ref_logp = true, .sampler_logp = true}, options};
  tileloss_plan_options hints = plan_options();
  std::vector<std::int64_t> offsets;
  float scalar = 0;

  tileloss_args& args() { return data.args(); }
  const void* given_options() const { return &options; }
  void make_batch(std::int64_t length) {
    args().sequence_offsets = {};
    args().sequence_length = length;
  }
};
const auto expect_refusals = expect_refused<PolicyCall>;

auto option(auto member, auto value) {
  return [=](PolicyCall& c) { c.options.*member = value; };
}
auto number(tileloss_scalar tileloss_policy_loss_options::*member, double value) {
  return [=](PolicyCall& c) { (c.options.*member).value = value; };
}
using O = tileloss_policy_loss_options;

TEST(PolicyValidation, TheCallThatTheTestsCorruptIsValid) {
  PolicyCall call;
  EXPECT_TRUE(succeeds(tileloss_policy_loss_value_and_grad(&call.args(), &call.options, nullptr, nullptr)));
  EXPECT_TRUE(agrees(call.data.check()));
}

TEST(PolicyValidation, OptionsOutsideTheirRange) {
  expect_refusals({{"kind", "clip|cispo|sapo|vespo|reinforce", "5", option(&O::kind, 5)},
                   {"ratio_level", "token|sequence", "-1", option(&O::ratio_level, -1)},
                   {"aggregation", "seq_mean_token_mean|", "6", option(&O::aggregation, 6)},
                   {"epsilon_low", ">= 0", "-0.1", number(&O::epsilon_low, -0.1)},
                   {"epsilon_high", ">= 0", "-0.1", number(&O::epsilon_high, -0.1)},
                   {"delta", "> 0", "0", number(&O::delta, 0)},
                   {"dual_clip", "> 1", "1", number(&O::dual_clip, 1)},
                   {"cap_low", ">= 0", "-1", number(&O::cap_low, -1)},
                   {"tau_pos", "> 0", "0", option(&O::tau_pos, 0.0)},
                   {"log_ratio_clamp", "> 0", "0", option(&O::log_ratio_clamp, 0.0)},
                   {"entropy_quantile", "> 0 and <= 1", "1.5", option(&O::entropy_quantile, 1.5)},
                   {"entropy_quantile", "> 0", "0", option(&O::entropy_quantile, 0.0)},
                   {"beta", ">= 0", "-1", number(&O::beta, -1)},
                   {"beta", ">= 0", "nan", number(&O::beta, std::numeric_limits<double>::quiet_NaN())},
                   {"num_items", ">= 0", "-1", number(&O::num_items, -1)},
                   {"max_length", ">= 1, or -1", "0", option(&O::max_length, 0)},
                   {"options.reserved", "0", "another value", option(&O::reserved, 1)}},
                  When::kPlan);
}

TEST(PolicyValidation, CisposCapMayNotBeMissingBehindAPointerEither) {
  expect_refusals({{"epsilon_high", "kind = cispo takes its cap from it", "none",
                    [](PolicyCall& c) {
                      c.options.kind = TILELOSS_POLICY_CISPO;
                      c.scalar = std::numeric_limits<float>::quiet_NaN();
                      c.options.epsilon_high.pointer = &c.scalar;
                    }}},
                  When::kCall);
}

TEST(PolicyValidation, OptionsThatExcludeEachOther) {
  expect_refusals(
      {{"epsilon_high", "kind = cispo takes its cap from it", "none", option(&O::kind, TILELOSS_POLICY_CISPO)},
       {"sampler_level", "token with kind = vespo", "sequence",
        [](PolicyCall& c) {
          c.options.kind = TILELOSS_POLICY_VESPO;
          c.options.sampler_correction = TILELOSS_SAMPLER_MASK;
          c.options.sampler_level = TILELOSS_LEVEL_SEQUENCE;
        }},
       {"sampler_min", "<= sampler_max = 1.000000", "2.000000",
        [](PolicyCall& c) {
          c.options.sampler_correction = TILELOSS_SAMPLER_MASK;
          c.options.sampler_min = 2;
          c.options.sampler_max = 1;
        }},
       {"entropy_threshold", "none together with entropy_quantile", "a number",
        [](PolicyCall& c) {
          c.options.entropy_quantile = 0.5;
          c.options.entropy_threshold.value = 1;
        }},
       {"entropy_reduction", "as_loss with aggregation = none", "token_mean",
        [](PolicyCall& c) {
          c.options.aggregation = TILELOSS_AGGREGATION_NONE;
          c.options.entropy_coef.value = 1;
          c.args().loss.size = 6;
        }},
       {"max_length", "seq_mean_token_sum_norm divides by it", "none", option(&O::aggregation, TILELOSS_SEQ_MEAN_TOKEN_SUM_NORM)},
       {"schedule", "auto or sweeps", "stash",
        [](PolicyCall& c) {
          c.options.ratio_level = TILELOSS_LEVEL_SEQUENCE;
          c.hints.cpu.schedule = TILELOSS_SCHEDULE_STASH;
        }}},
      When::kPlan);
}

TEST(PolicyValidation, OptionsWithoutEffect) {
  const auto with = [](tileloss_policy_kind kind, const auto& give) {
    return [=](PolicyCall& c) {
      c.options.kind = kind;
      if (kind == TILELOSS_POLICY_CISPO) c.options.epsilon_high.value = 5;
      give(c);
    };
  };
  constexpr tileloss_policy_kind kClip = TILELOSS_POLICY_CLIP, kCispo = TILELOSS_POLICY_CISPO, kSapo = TILELOSS_POLICY_SAPO;
  expect_refusals(
      {{"num_items", "none with aggregation = seq_mean_token_mean, only with token_mean or sum", "a number",
        number(&O::num_items, 4)},
       {"num_items", "none with aggregation", "a number", [](PolicyCall& c) { c.options.num_items.pointer = &c.scalar; }},
       {"max_length", "none with aggregation = seq_mean_token_mean, only with seq_mean_token_sum_norm", "a number",
        option(&O::max_length, std::int64_t{9})},
       {"epsilon_low", "none with kind = cispo, only with clip", "a number", with(kCispo, number(&O::epsilon_low, 0.1))},
       {"epsilon_high", "none with kind = sapo, only with clip or cispo", "a number", with(kSapo, number(&O::epsilon_high, 0.3))},
       {"delta", "none with kind = cispo", "a number", with(kCispo, number(&O::delta, 2))},
       {"dual_clip", "none with kind = sapo", "a number", with(kSapo, number(&O::dual_clip, 2))},
       {"cap_low", "none with kind = clip", "a number", number(&O::cap_low, 0.5)},
       {"cispo_cap", "none with kind = clip, only with cispo", "one_plus", option(&O::cispo_cap, TILELOSS_CISPO_CAP_ONE_PLUS)},
       {"tau_pos", "none with kind = clip, only with sapo", "a number", option(&O::tau_pos, 2.0)},
       {"tau_neg", "none with kind = clip", "a number", option(&O::tau_neg, 2.0)},
       {"vespo_k_neg", "none with kind = clip, only with vespo", "a number", with(kClip, option(&O::vespo_k_neg, 2.0))},
       {"sampler_min", "none with sampler_correction = off, only with truncate or mask", "a number",
        option(&O::sampler_min, 0.5)},
       {"sampler_max", "none with sampler_correction = off", "a number", option(&O::sampler_max, 2.0)},
       {"sampler_level", "none with sampler_correction = off", "sequence", option(&O::sampler_level, TILELOSS_LEVEL_SEQUENCE)}},
      When::kPlan);
}

TEST(PolicyValidation, Tensors) {
  const auto size = [](auto member, std::int64_t value) { return [=](PolicyCall& c) { (c.args().*member).size = value; }; };
  const auto dtype = [](auto member, tileloss_dtype value) { return [=](PolicyCall& c) { (c.args().*member).dtype = value; }; };
  using A = tileloss_args;
  expect_refusals(
      {{"advantages", "a float32 vector of size 3", "none", [](PolicyCall& c) { c.args().advantages = {}; }},
       {"advantages.size", "3 with advantage_level = sequence", "6", size(&A::advantages, 6)},
       {"advantages.size", "6 with advantage_level = token", "3", option(&O::advantage_level, TILELOSS_LEVEL_TOKEN)},
       {"advantages.dtype", "float32", "bfloat16", dtype(&A::advantages, TILELOSS_BFLOAT16)},
       {"old_logp.size", "6", "5", size(&A::old_logp, 5)},
       {"mask.dtype", "float32, int32, int64 or uint8", "float16",
        [](PolicyCall& c) { c.args().mask = tileloss_make_vector(&c.scalar, TILELOSS_FLOAT16, 6); }},
       {"metrics.size", "1 to 13", "14", size(&A::metrics, 14)},
       {"metrics.size", "1 to 13", "0", size(&A::metrics, 0)},
       {"ref_logp", "as beta is not 0", "none",
        [](PolicyCall& c) {
          c.args().ref_logp = {};
          c.options.beta.value = 0.1;
        }},
       {"sampler_logp", "as sampler_correction is on", "none",
        [](PolicyCall& c) {
          c.args().sampler_logp = {};
          c.options.sampler_correction = TILELOSS_SAMPLER_TRUNCATE;
        }},
       {"sequence_offsets", "aggregation = seq_mean_token_mean needs sequences", "neither",
        [](PolicyCall& c) {
          c.args().sequence_offsets = {};
          c.options.advantage_level = TILELOSS_LEVEL_TOKEN;
        }},
       {"sequence_offsets.size", ">= 1", "0", size(&A::sequence_offsets, 0)},
       {"sequence_offsets.dtype", "int32 or int64", "float32", dtype(&A::sequence_offsets, TILELOSS_FLOAT32)},
       {"sequence_length", "0 together with sequence_offsets", "2", [](PolicyCall& c) { c.args().sequence_length = 2; }},
       {"sequence_length", "a divisor of the number of rows, 6", "4", [](PolicyCall& c) { c.make_batch(4); }},
       {"sequence_length", ">= 0", "-2", [](PolicyCall& c) { c.make_batch(-2); }},
       {"token_weights", "none: policy_loss does not take it", "a vector",
        [](PolicyCall& c) { c.args().token_weights = c.args().old_logp; }}},
      When::kPlan);
}

TEST(PolicyValidation, OffsetsAreReadAtTheCall) {
  const auto offsets = [](std::int64_t first, std::int64_t third, std::int64_t last) {
    return [=](PolicyCall& c) {
      c.offsets = {first, 4, third, last};
      c.args().sequence_offsets = view(c.offsets);
    };
  };
  expect_refusals(
      {{"sequence_offsets[0]", "0", "1", offsets(1, 4, 6)},
       {"sequence_offsets[2]", ">= the one before it, 4", "3", offsets(0, 3, 6)},
       {"sequence_offsets[3]", "the number of rows, 6", "7", offsets(0, 4, 7)},
       {"sequence_offsets.data", "a pointer", "null", [](PolicyCall& c) { c.args().sequence_offsets.data = nullptr; }},
       {"metrics.data", "a pointer", "null", [](PolicyCall& c) { c.args().metrics.data = nullptr; }}},
      When::kCall);
}

TEST(PolicyValidation, OtherFunctionsTakeNoneOfItsTensors) {
  const std::vector<std::pair<const char*, tileloss_vector tileloss_args::*>> tensors = {
      {"mask", &tileloss_args::mask},
      {"old_logp", &tileloss_args::old_logp},
      {"advantages", &tileloss_args::advantages},
      {"sequence_offsets", &tileloss_args::sequence_offsets},
      {"metrics", &tileloss_args::metrics}};
  for (const bool is_logprobs : {false, true}) {
    const auto make = [&](Call& call) {
      if (is_logprobs) call.make_logprobs(TILELOSS_FORWARD);
    };
    for (const auto& [name, member] : tensors) {
      if (!is_logprobs && member == &tileloss_args::mask) continue;  // a mask is cross-entropy's, too
      Call call;
      make(call);
      const float value[4] = {};
      const bool is_offsets = member == &tileloss_args::sequence_offsets;
      call.args().*member = tileloss_make_vector(value, is_offsets ? TILELOSS_INT32 : TILELOSS_FLOAT32, 4);
      EXPECT_TRUE(names<>({name, "none: " + call.function + " does not take it", "a vector"}, call.call()));
    }
    Call call;
    make(call);
    call.args().sequence_length = 2;
    EXPECT_TRUE(names<>({"sequence_length", "0: " + call.function + " does not take it", "2"}, call.call()));
  }
}

TEST(PolicyPresets, AreKindLevelAndAggregation) {
  const struct {
    const char* name;
    int kind, level, aggregation;
  } presets[] = {{"grpo", 0, 0, 0}, {"bnpo", 0, 0, 1}, {"dr_grpo", 0, 0, 2}, {"dapo", 0, 0, 1},  {"cispo", 1, 0, 1},
                 {"sapo", 2, 0, 0}, {"gspo", 0, 1, 0}, {"luspo", 0, 1, 3},   {"vespo", 3, 0, 1}, {"reinforce", 4, 0, 1}};
  for (const auto& p : presets) {
    const tileloss_policy_loss_options o = policy_options(p.name);
    EXPECT_EQ(o.kind, p.kind) << p.name;
    EXPECT_EQ(o.ratio_level, p.level) << p.name;
    EXPECT_EQ(o.aggregation, p.aggregation) << p.name;
    EXPECT_EQ(o.struct_size, sizeof o) << p.name;
  }
  tileloss_policy_loss_options o;
  EXPECT_TRUE(names<>({"preset", "one of grpo|bnpo", "grp"}, tileloss_options_preset("policy_loss", "grp", &o, sizeof o)));
  EXPECT_TRUE(
      names<>({"preset", "one of grpo|bnpo", "grpo|bnpo"}, tileloss_options_preset("policy_loss", "grpo|bnpo", &o, sizeof o)));
  EXPECT_TRUE(names<>({"preset", "one of grpo|bnpo", ""}, tileloss_options_preset("policy_loss", nullptr, &o, sizeof o)));
  EXPECT_TRUE(names<>({"preset", "none: cross_entropy has no presets", "grpo"},
                      tileloss_options_preset("cross_entropy", "grpo", &o, sizeof o)));
}

}  // namespace
}  // namespace tileloss::test
