// Random options, all pairs of them: every case must agree with the oracle.
#include <gtest/gtest.h>

#include "tests/api/random_options.h"

namespace tileloss::test {
namespace {

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
  if (failures == 0) report_coverage("cross_entropy", kCases, GetParam(), sampler);
}

TEST_P(RandomOptions, LogprobsAgreesForAllPairs) {
  std::vector<Factor> factors = common_factors();
  factors.insert(factors.end(), {{"passes", {"saved_state", "no_state"}},
                                 {"logp_grad", {"absent", "per_row", "strided", "broadcast"}},
                                 {"lse_grad", {"absent", "per_row", "strided", "broadcast"}},
                                 {"entropy_grad", {"absent", "per_row", "strided", "broadcast"}},
                                 {"mean_logit_grad", {"absent", "per_row", "strided", "broadcast"}}});
  PairwiseSampler sampler(factors, {}, 12);
  int failures = 0;
  for (int k = 0; k < kCases && failures < kMaxFailures; ++k) {
    sampler.next();
    LogitsCaseSpec spec = common_spec(sampler, GetParam(), static_cast<std::uint64_t>(1000 + k));
    spec.loss = false;
    spec.logp_grad = upstream_named(sampler.level("logp_grad"));
    spec.lse_grad = upstream_named(sampler.level("lse_grad"));
    spec.entropy_grad = upstream_named(sampler.level("entropy_grad"));
    spec.mean_logit_grad = upstream_named(sampler.level("mean_logit_grad"));
    tileloss_logprobs_options options = logprobs_options();
    float temperature = 1;
    set_logit_options(sampler, spec, temperature, options.logit);
    LogitsCase c(spec);
    testing::AssertionResult result = run_passes("logprobs", sampler.level("passes"), c, &options, wishes_of(sampler));
    if (result) result = agrees(check_logprobs(c, options));
    EXPECT_TRUE(result) << "case " << k << ": " << sampler.describe();
    failures += result ? 0 : 1;
  }
  if (failures == 0) report_coverage("logprobs", kCases, GetParam(), sampler);
}

}  // namespace
}  // namespace tileloss::test
