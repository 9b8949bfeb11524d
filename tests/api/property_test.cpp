// Random options, all pairs of them: every case must agree with the oracle.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/api/calls.h"
#include "tests/api/pairwise.h"

namespace tileloss::test {
namespace {

using reference::NumberFormat;

constexpr int kCases = 300;

std::vector<Factor> common_factors() {
  return {{"rows", {"1", "2", "7", "33"}},
          {"vocab", {"1", "2", "17", "64", "127", "1000", "2049", "4500"}},
          {"distribution",
           {"normal", "uniform", "narrow", "wide", "offset_plus", "offset_minus", "spike_first", "spike_last", "spike_tile_edge",
            "confident"}},
          {"valid_vocab", {"all", "fewer"}},
          {"stride_extra", {"0", "1", "13", "64"}},
          {"misalignment", {"0", "1", "3", "31"}},
          {"flush", {"right", "left"}},
          {"ignored", {"0", "0.3", "1"}},
          {"ignore_index", {"-100", "-1", "0"}},
          {"labels", {"int32", "int64"}},
          {"outputs", {"none", "logp_lse", "all"}},
          {"in_place", {"no", "yes"}},
          {"schedule", {"0", "1", "2", "3"}},
          {"vocab_block", {"0", "64", "320", "8192"}},
          {"row_block", {"0", "1", "5"}},
          {"threads", {"0", "1", "3"}},
          {"logit_scale", {"1", "0.5", "3"}},
          {"softcap", {"0", "5", "30"}},
          {"temperature", {"1", "0.6", "2"}},
          {"numbers_by", {"value", "pointer"}},
          {"temperature_on", {"logits", "logprob"}}};
}

Upstream upstream_named(const std::string& name) {
  if (name == "scalar") return Upstream::kScalar;
  if (name == "per_row") return Upstream::kPerRow;
  if (name == "strided") return Upstream::kStrided;
  if (name == "broadcast") return Upstream::kBroadcast;
  return Upstream::kAbsent;
}

LogitsCaseSpec common_spec(const PairwiseSampler& s, NumberFormat format, std::uint64_t seed) {
  LogitsCaseSpec spec{.rows = s.integer("rows"),
                      .vocab = s.integer("vocab"),
                      .format = format,
                      .distribution = s.level("distribution"),
                      .seed = seed};
  spec.valid_vocab = s.is("valid_vocab", "fewer") ? (spec.vocab + 1) / 2 : -1;
  spec.stride_extra = s.integer("stride_extra");
  spec.misalignment = s.integer("misalignment");
  spec.flush = s.is("flush", "left") ? Flush::kLeft : Flush::kRight;
  spec.ignore_prob = s.number("ignored");
  spec.ignore_index = s.integer("ignore_index");
  spec.int32_labels = s.is("labels", "int32");
  spec.row_outputs = !s.is("outputs", "none");
  spec.extra_outputs = s.is("outputs", "all");
  spec.in_place = s.is("in_place", "yes");
  return spec;
}

// `temperature` must outlive the options.
void set_logit_options(const PairwiseSampler& s, const LogitsCaseSpec& spec, float& temperature,
                       tileloss_logit_options& options) {
  options.logit_scale = s.number("logit_scale");
  options.softcap = s.number("softcap");
  temperature = static_cast<float>(s.number("temperature"));
  options.temperature.value = static_cast<double>(temperature);
  if (s.is("numbers_by", "pointer")) options.temperature = {-1, &temperature};
  options.temperature_on = s.is("temperature_on", "logprob") ? TILELOSS_TEMPERATURE_ON_LOGPROB : TILELOSS_TEMPERATURE_ON_LOGITS;
  options.valid_vocab = spec.valid_vocab;
  options.ignore_index = spec.ignore_index;
}

tileloss_plan_options wishes_of(const PairwiseSampler& s) {
  tileloss_plan_options wishes = plan_options();
  wishes.schedule = static_cast<tileloss_schedule>(s.integer("schedule"));
  wishes.vocab_block = s.integer("vocab_block");
  wishes.row_block = s.integer("row_block");
  wishes.threads = static_cast<std::int32_t>(s.integer("threads"));
  return wishes;
}

// value_and_grad, or a forward and a backward with or without its state. `has_loss`: whether value_and_grad exists.
testing::AssertionResult run_passes(const char* function, const std::string& passes, LogitsCase& c, const void* options,
                                    const tileloss_plan_options& wishes) {
  if (passes == "value_and_grad") return runs(function, TILELOSS_VALUE_AND_GRAD, c.args(), options, wishes);
  const tileloss_args all = c.args();
  RowStateArrays state(c.spec().rows);
  c.args().dlogits = {};
  c.args().logp_grad = c.args().lse_grad = c.args().entropy_grad = {};
  if (passes == "saved_state") c.args().row_state = state.get();
  testing::AssertionResult result = runs(function, TILELOSS_FORWARD, c.args(), options, wishes);
  if (!result) return result;
  c.args() = all;
  if (passes == "saved_state") c.args().row_state = state.get();
  result = runs(function, TILELOSS_BACKWARD, c.args(), options, wishes);
  c.args().row_state = {};
  return result;
}

// A case that failed must not stop the others, but a broken kernel need not print three hundred.
constexpr int kMaxFailures = 5;

void report_coverage(const char* function, NumberFormat format, const PairwiseSampler& sampler) {
  std::printf("%s %s: %d cases cover %zu of %zu pairs of options\n", function, reference::format_info(format).name, kCases,
              sampler.covered(), sampler.total());
  EXPECT_EQ(sampler.covered(), sampler.total()) << "not covered: " << sampler.first_missing();
}

class RandomOptions : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, RandomOptions, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(reference::format_info(param.param).name); });

TEST_P(RandomOptions, CrossEntropyAgreesForAllPairs) {
  std::vector<Factor> factors = common_factors();
  factors.insert(factors.end(), {{"reduction", {"none", "sum", "mean"}},
                                 {"passes", {"value_and_grad", "saved_state", "no_state"}},
                                 {"loss_grad", {"absent", "scalar", "per_row", "strided", "broadcast"}},
                                 {"token_weights", {"no", "yes"}},
                                 {"class_weights", {"no", "yes"}},
                                 {"label_smoothing", {"0", "0.1", "1"}},
                                 {"z_loss", {"0", "0.001", "0.3"}},
                                 {"num_items", {"absent", "12.5", "0"}}});
  const std::vector<Forbidden> forbidden = {{"temperature_on", "logprob", "label_smoothing", "0.1"},
                                            {"temperature_on", "logprob", "label_smoothing", "1"},
                                            {"reduction", "none", "loss_grad", "scalar"},
                                            {"reduction", "sum", "loss_grad", "per_row"},
                                            {"reduction", "sum", "loss_grad", "strided"},
                                            {"reduction", "sum", "loss_grad", "broadcast"},
                                            {"reduction", "mean", "loss_grad", "per_row"},
                                            {"reduction", "mean", "loss_grad", "strided"},
                                            {"reduction", "mean", "loss_grad", "broadcast"}};
  PairwiseSampler sampler(factors, forbidden, 11);
  int failures = 0;
  for (int k = 0; k < kCases && failures < kMaxFailures; ++k) {
    sampler.next();
    LogitsCaseSpec spec = common_spec(sampler, GetParam(), static_cast<std::uint64_t>(k));
    spec.loss_grad = upstream_named(sampler.level("loss_grad"));
    spec.token_weights = sampler.is("token_weights", "yes");
    spec.class_weights = sampler.is("class_weights", "yes");
    spec.per_row_loss = sampler.is("reduction", "none");
    tileloss_cross_entropy_options options = cross_entropy_options();
    float temperature = 1, num_items = 1;
    set_logit_options(sampler, spec, temperature, options.logit);
    options.reduction = spec.per_row_loss                ? TILELOSS_REDUCTION_NONE
                        : sampler.is("reduction", "sum") ? TILELOSS_REDUCTION_SUM
                                                         : TILELOSS_REDUCTION_MEAN;
    options.label_smoothing = sampler.number("label_smoothing");
    options.z_loss = sampler.number("z_loss");
    if (!sampler.is("num_items", "absent")) {
      num_items = static_cast<float>(sampler.number("num_items"));
      options.num_items.value = static_cast<double>(num_items);
      if (sampler.is("numbers_by", "pointer")) options.num_items = {-1, &num_items};
    }
    LogitsCase c(spec);
    testing::AssertionResult result = run_passes("cross_entropy", sampler.level("passes"), c, &options, wishes_of(sampler));
    if (result) result = agrees(check_cross_entropy(c, options));
    EXPECT_TRUE(result) << "case " << k << ": " << sampler.describe();
    failures += result ? 0 : 1;
  }
  if (failures == 0) report_coverage("cross_entropy", GetParam(), sampler);
}

TEST_P(RandomOptions, LogprobsAgreesForAllPairs) {
  std::vector<Factor> factors = common_factors();
  factors.insert(factors.end(), {{"passes", {"saved_state", "no_state"}},
                                 {"logp_grad", {"absent", "per_row", "strided", "broadcast"}},
                                 {"lse_grad", {"absent", "per_row", "strided", "broadcast"}},
                                 {"entropy_grad", {"absent", "per_row", "strided", "broadcast"}}});
  PairwiseSampler sampler(factors, {}, 12);
  int failures = 0;
  for (int k = 0; k < kCases && failures < kMaxFailures; ++k) {
    sampler.next();
    LogitsCaseSpec spec = common_spec(sampler, GetParam(), static_cast<std::uint64_t>(1000 + k));
    spec.loss = false;
    spec.logp_grad = upstream_named(sampler.level("logp_grad"));
    spec.lse_grad = upstream_named(sampler.level("lse_grad"));
    spec.entropy_grad = upstream_named(sampler.level("entropy_grad"));
    tileloss_logprobs_options options = logprobs_options();
    float temperature = 1;
    set_logit_options(sampler, spec, temperature, options.logit);
    LogitsCase c(spec);
    testing::AssertionResult result = run_passes("logprobs", sampler.level("passes"), c, &options, wishes_of(sampler));
    if (result) result = agrees(check_logprobs(c, options));
    EXPECT_TRUE(result) << "case " << k << ": " << sampler.describe();
    failures += result ? 0 : 1;
  }
  if (failures == 0) report_coverage("logprobs", GetParam(), sampler);
}

}  // namespace
}  // namespace tileloss::test
