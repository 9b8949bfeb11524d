// What the property tests of every function draw and do alike.
#ifndef TILELOSS_TESTS_API_RANDOM_OPTIONS_H_
#define TILELOSS_TESTS_API_RANDOM_OPTIONS_H_

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "tests/api/calls.h"
#include "tests/api/pairwise.h"

namespace tileloss::test {

using reference::NumberFormat;

inline constexpr int kCases = 300;

inline std::vector<Factor> common_factors() {
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

inline Upstream upstream_named(const std::string& name) {
  if (name == "scalar") return Upstream::kScalar;
  if (name == "per_row") return Upstream::kPerRow;
  if (name == "strided") return Upstream::kStrided;
  if (name == "broadcast") return Upstream::kBroadcast;
  return Upstream::kAbsent;
}

inline LogitsCaseSpec common_spec(const PairwiseSampler& s, NumberFormat format, std::uint64_t seed) {
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
inline void set_logit_options(const PairwiseSampler& s, const LogitsCaseSpec& spec, float& temperature,
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

inline tileloss_plan_options wishes_of(const PairwiseSampler& s) {
  tileloss_plan_options wishes = plan_options();
  wishes.schedule = static_cast<tileloss_schedule>(s.integer("schedule"));
  wishes.vocab_block = s.integer("vocab_block");
  wishes.row_block = s.integer("row_block");
  wishes.threads = static_cast<std::int32_t>(s.integer("threads"));
  return wishes;
}

// value_and_grad, or a forward and a backward with or without its state. `has_loss`: whether value_and_grad exists.
inline testing::AssertionResult run_passes(const char* function, const std::string& passes, LogitsCase& c, const void* options,
                                           const tileloss_plan_options& wishes) {
  if (passes == "value_and_grad") return runs(function, TILELOSS_VALUE_AND_GRAD, c.args(), options, wishes);
  const tileloss_args all = c.args();
  RowStateArrays state(c.spec().rows);
  c.args().dlogits = {};
  c.args().logp_grad = c.args().lse_grad = c.args().entropy_grad = c.args().mean_logit_grad = {};
  if (passes == "saved_state") c.args().row_state = &state.get();
  testing::AssertionResult result = runs(function, TILELOSS_FORWARD, c.args(), options, wishes);
  if (!result) return result;
  c.args() = all;
  if (passes == "saved_state") c.args().row_state = &state.get();
  result = runs(function, TILELOSS_BACKWARD, c.args(), options, wishes);
  c.args().row_state = nullptr;
  return result;
}

// A case that failed must not stop the others, but a broken kernel need not print three hundred.
inline constexpr int kMaxFailures = 5;

inline void report_coverage(const char* function, int cases, NumberFormat format, const PairwiseSampler& sampler) {
  std::printf("%s %s: %d cases cover %zu of %zu pairs of options\n", function, reference::format_info(format).name, cases,
              sampler.covered(), sampler.total());
  EXPECT_EQ(sampler.covered(), sampler.total()) << "not covered: " << sampler.first_missing();
}

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_API_RANDOM_OPTIONS_H_
