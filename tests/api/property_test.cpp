// Random options, all pairs of them: every case must agree with the oracle.
// On toy and cuda: RandomOptions.
#include <gtest/gtest.h>

#include "tests/api/random_options.h"

namespace tileloss::test {
namespace {

// More levels than losses with a teacher have.
std::vector<Factor> factors_of_labels() {
  return with_factors(common_factors(), {{"valid_vocab", {"all", "half", "1", "63", "2048", "one_fewer"}},
                                         {"logit_scale", {"1", "0.0625", "0.5", "3", "8"}},
                                         {"softcap", {"0", "1", "5", "30", "400", "1e4"}},
                                         {"temperature", {"1", "0.3", "0.6", "2"}}});
}

class RandomOptions : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, RandomOptions, testing::ValuesIn(kFormats), format_name);

TEST_P(RandomOptions, CrossEntropyAgreesForAllPairs) {
  std::vector<Forbidden> forbidden = loss_forbidden();
  forbid_num_items(forbidden);
  for (const char* smoothing : {"0.1", "0.5", "1"})
    forbidden.push_back({"temperature_on", "logprob", "label_smoothing", smoothing});
  PairwiseSampler sampler(with_factors(factors_of_labels(), loss_factors(),
                                       {{"passes", {"value_and_grad", "saved_state", "no_state"}},
                                        {"class_weights", {"no", "yes"}},
                                        {"label_smoothing", {"0", "0.1", "0.5", "1"}},
                                        {"z_loss", {"0", "1e-4", "0.001", "0.3"}}}),
                          forbidden, 11);
  const auto agree = [](const PairwiseSampler& s, std::uint64_t number) {
    LogitsCaseSpec spec = loss_spec(s, GetParam(), number);
    spec.class_weights = s.is("class_weights", "yes");
    tileloss_cross_entropy_options options;
    Numbers numbers;
    set_loss_options(s, spec, numbers, options);
    options.label_smoothing = s.number("label_smoothing");
    options.z_loss = s.number("z_loss");
    LogitsCase c(spec);
    const auto ran = run_passes("cross_entropy", s.level("passes"), c, &options, hints_of(s));
    return ran ? agrees(check_cross_entropy(c, options)) : ran;
  };
  expect_all_pairs_agree("cross_entropy", GetParam(), sampler, kCases, agree);
}

TEST_P(RandomOptions, LogprobsAgreesForAllPairs) {
  const std::vector<const char*> upstreams = {"absent", "per_row", "strided", "broadcast"};
  PairwiseSampler sampler(with_factors(factors_of_labels(), {{"passes", {"saved_state", "no_state"}},
                                                             {"logp_grad", upstreams},
                                                             {"lse_grad", upstreams},
                                                             {"entropy_grad", upstreams},
                                                             {"mean_logit_grad", upstreams}}),
                          {}, 12);
  const auto agree = [](const PairwiseSampler& s, std::uint64_t number) {
    LogitsCaseSpec spec = common_spec(s, GetParam(), 1000 + number);
    spec.loss = false;
    spec.logp_grad = upstream_named(s.level("logp_grad"));
    spec.lse_grad = upstream_named(s.level("lse_grad"));
    spec.entropy_grad = upstream_named(s.level("entropy_grad"));
    spec.mean_logit_grad = upstream_named(s.level("mean_logit_grad"));
    tileloss_logprobs_options options;
    Numbers numbers;
    set_logit_options(s, spec, numbers, options.logit);
    LogitsCase c(spec);
    const auto ran = run_passes("logprobs", s.level("passes"), c, &options, hints_of(s));
    return ran ? agrees(check_logprobs(c, options)) : ran;
  };
  expect_all_pairs_agree("logprobs", GetParam(), sampler, kCases, agree);
}

}  // namespace
}  // namespace tileloss::test
