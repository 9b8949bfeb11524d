// What the property tests of every function draw and do alike.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tests/api/calls.h"
#include "tests/api/pairwise.h"

namespace tileloss::test {

using oracle::NumberFormat;

inline constexpr int kCases = 300;

inline std::vector<Factor> common_factors() {
  return {{"rows", {"1", "2", "7", "33"}},
          {"vocab", {"1", "2", "17", "64", "127", "1000", "2049", "4500"}},
          {"distribution",
           {"normal", "uniform", "narrow", "wide", "offset_plus", "offset_minus", "spike_first", "spike_last", "spike_tile_edge",
            "confident"}},
          {"valid_vocab", {"all", "half"}},
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

// None of the levels with any of the others.
inline void forbid(std::vector<Forbidden>& all, const char* factor, const std::vector<const char*>& levels, const char* other,
                   const std::vector<const char*>& others) {
  for (const char* level : levels) {
    for (const char* other_level : others) all.push_back({factor, level, other, other_level});
  }
}

// Losses that reduce the rows of a LogitsCase: what their values may be, and which exclude each other.
inline std::vector<Factor> loss_factors() {
  return {{"reduction", {"none", "sum", "mean"}},
          {"loss_grad", {"absent", "scalar", "per_row", "strided", "broadcast"}},
          {"token_weights", {"no", "yes"}},
          {"num_items", {"absent", "1", "12.5", "4096", "0"}}};
}
inline std::vector<Forbidden> loss_forbidden() {
  std::vector<Forbidden> all = {{"reduction", "none", "loss_grad", "scalar"}};
  forbid(all, "reduction", {"sum", "mean"}, "loss_grad", {"per_row", "strided", "broadcast"});
  return all;
}
// Options that would be refused beside the choices of others: num_items of a reduction that is no mean, and so of an upstream
// gradient per row; a beta of a divergence that has none, but for the default.
inline void forbid_num_items(std::vector<Forbidden>& all) {
  const std::vector<const char*> items = {"1", "12.5", "4096", "0"};
  forbid(all, "reduction", {"none", "sum"}, "num_items", items);
  forbid(all, "loss_grad", {"per_row", "strided", "broadcast"}, "num_items", items);
}
inline void forbid_beta(std::vector<Forbidden>& all, const std::vector<const char*>& betas) {
  forbid(all, "divergence", {"0", "1", "3", "6"}, "beta", betas);
}

// `factors` with those of `more` behind them, in place of their own of the same names.
inline std::vector<Factor> with_factors(std::vector<Factor> factors, const std::vector<Factor>& more) {
  for (const Factor& added : more) {
    std::erase_if(factors, [&](const Factor& f) { return std::string_view(f.name) == added.name; });
    factors.push_back(added);
  }
  return factors;
}
inline std::vector<Factor> with_factors(std::vector<Factor> factors, const std::vector<Factor>& loss,
                                        const std::vector<Factor>& more) {
  return with_factors(with_factors(std::move(factors), loss), more);
}

inline Upstream upstream_named(const std::string& name) {
  if (name == "scalar") return Upstream::kScalar;
  if (name == "per_row") return Upstream::kPerRow;
  if (name == "strided") return Upstream::kStrided;
  if (name == "broadcast") return Upstream::kBroadcast;
  return Upstream::kAbsent;
}

// Columns that are no padding: of a level of "valid_vocab".
inline std::int64_t valid_of(const PairwiseSampler& s, std::int64_t vocab) {
  const std::string level = s.level("valid_vocab");
  if (level == "all") return -1;
  if (level == "half") return (vocab + 1) / 2;
  if (level == "one_fewer") return std::max<std::int64_t>(vocab - 1, 1);
  return std::min(vocab, s.integer("valid_vocab"));
}

inline LogitsCaseSpec common_spec(const PairwiseSampler& s, NumberFormat format, std::uint64_t seed) {
  LogitsCaseSpec spec{.rows = s.integer("rows"),
                      .vocab = s.integer("vocab"),
                      .format = format,
                      .distribution = s.level("distribution"),
                      .seed = seed};
  spec.valid_vocab = valid_of(s, spec.vocab);
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

inline LogitsCaseSpec loss_spec(const PairwiseSampler& s, NumberFormat format, std::uint64_t seed) {
  LogitsCaseSpec spec = common_spec(s, format, seed);
  spec.loss_grad = upstream_named(s.level("loss_grad"));
  spec.token_weights = s.is("token_weights", "yes");
  spec.per_row_loss = s.is("reduction", "none");
  return spec;
}

// Numbers that may be given behind a pointer, which have to stay where they are.
struct Numbers {
  float temperature = 1, teacher_temperature = 1, num_items = 1, epsilon_high = 1, beta = 0;
};
inline void set_number(const PairwiseSampler& s, tileloss_scalar& scalar, float& place, double value) {
  place = static_cast<float>(value);
  scalar = s.is("numbers_by", "pointer") ? tileloss_scalar(-1, &place) : tileloss_scalar(static_cast<double>(place));
}

// `numbers` must outlive the options.
inline void set_logit_options(const PairwiseSampler& s, const LogitsCaseSpec& spec, Numbers& numbers,
                              tileloss_logit_options& options) {
  options.logit_scale = s.number("logit_scale");
  options.softcap = s.number("softcap");
  set_number(s, options.temperature, numbers.temperature, s.number("temperature"));
  options.temperature_on = s.is("temperature_on", "logprob") ? TILELOSS_TEMPERATURE_ON_LOGPROB : TILELOSS_TEMPERATURE_ON_LOGITS;
  options.valid_vocab = spec.valid_vocab;
  options.ignore_index = spec.ignore_index;
}
template <class Options>
void set_loss_options(const PairwiseSampler& s, const LogitsCaseSpec& spec, Numbers& numbers, Options& options) {
  set_logit_options(s, spec, numbers, options.logit);
  options.reduction = s.is("reduction", "none")  ? TILELOSS_REDUCTION_NONE
                      : s.is("reduction", "sum") ? TILELOSS_REDUCTION_SUM
                                                 : TILELOSS_REDUCTION_MEAN;
  if (!s.is("num_items", "absent")) set_number(s, options.num_items, numbers.num_items, s.number("num_items"));
}

// Puts options that have no effect beside the choices of others back to their defaults: they would be refused.
template <class Options>
void leave_out_without_effect(const char* name, Options& options) {
  tools::Function function(name, &options);
  for (const tileloss_field& field : function.fields()) {
    if (field.only_with == nullptr) continue;
    const auto chosen = static_cast<int>(function.get(field.only_with, 0));
    if ((field.only_with_choices >> chosen & 1) == 0) function.reset(field.name);
  }
  std::memcpy(&options, function.options(), sizeof options);
}

// The divergence has what the label leaves of 1.
template <class Options>
void set_weights(Options& options, double label) {
  options.label_weight.value = label;
  options.divergence_weight.value = 1 - label;
}

inline tileloss_plan_options hints_of(const PairwiseSampler& s) {
  tileloss_plan_options hints = plan_options();
  hints.cpu.schedule = static_cast<tileloss_schedule>(s.integer("schedule"));
  hints.cpu.vocab_block = s.integer("vocab_block");
  hints.cpu.row_block = s.integer("row_block");
  hints.cpu.threads = static_cast<std::int32_t>(s.integer("threads"));
  return hints;
}

// value_and_grad, or a forward and a backward with or without its state. `has_loss`: whether value_and_grad exists.
inline testing::AssertionResult run_passes(const char* function, const std::string& passes, LogitsCase& c, const void* options,
                                           const tileloss_plan_options& hints) {
  if (passes == "value_and_grad") return runs(function, TILELOSS_VALUE_AND_GRAD, c.args(), options, hints);
  const tileloss_args all = c.args();
  RowStateArrays state(c.spec().rows);
  c.args().dlogits = {};
  c.args().logp_grad = c.args().lse_grad = c.args().entropy_grad = c.args().mean_logit_grad = {};
  if (passes == "saved_state") c.args().row_state = &state.get();
  testing::AssertionResult result = runs(function, TILELOSS_FORWARD, c.args(), options, hints);
  if (!result) return result;
  c.args() = all;
  if (passes == "saved_state") c.args().row_state = &state.get();
  result = runs(function, TILELOSS_BACKWARD, c.args(), options, hints);
  c.args().row_state = nullptr;
  return result;
}

// Some cases that cover all pairs of the factors' values; `agree` runs and judges one with this number. A case that failed does
// not stop the others, but a broken kernel need not print three hundred.
inline void expect_all_pairs_agree(const char* function, NumberFormat format, PairwiseSampler sampler, int cases,
                                   const std::function<testing::AssertionResult(const PairwiseSampler&, std::uint64_t)>& agree) {
  constexpr int kMaxFailures = 5;
  int failures = 0;
  for (int k = 0; k < cases && failures < kMaxFailures; ++k) {
    sampler.next();
    const testing::AssertionResult result = agree(sampler, static_cast<std::uint64_t>(k));
    EXPECT_TRUE(result) << "case " << k << ": " << sampler.describe();
    failures += result ? 0 : 1;
  }
  if (failures > 0) return;
  std::printf("%s %s: %d cases cover %zu of %zu pairs of options\n", function, oracle::format_info(format).name, cases,
              sampler.covered(), sampler.total());
  EXPECT_EQ(sampler.covered(), sampler.total()) << "not covered: " << sampler.first_missing();
}

}  // namespace tileloss::test
