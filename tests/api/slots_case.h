// A test case of logprobs with several labels a row: its slots, beside logits or a head, and their judgement by the oracle.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tests/api/kept_calls.h"

namespace tileloss::test {

using oracle::NumberFormat;

inline constexpr std::int64_t kIgnored = -100;

// What calls are given of K labels a row, and give.
struct Slots {
  std::int64_t count;
  std::vector<std::int64_t> labels;
  std::vector<float> logp, logp_grad;

  // The `given` are the last slot's of even rows, the first one's of others; one that is empty leaves all of its row empty.
  Slots(std::span<const std::int64_t> given, std::int64_t vocab, std::int64_t per_row)
      : count(per_row),
        labels(given.size() * static_cast<std::size_t>(per_row)),
        logp(labels.size(), 7),
        logp_grad(labels.size()) {
    for (std::int64_t n = 0; n < std::ssize(labels); ++n) {
      const std::int64_t i = n / count, own = given[static_cast<std::size_t>(i)], at = i % 2 == 0 ? count - 1 : 0;
      labels[static_cast<std::size_t>(n)] = n % count == at || own == kIgnored ? own : n * 7919 % vocab;
      logp_grad[static_cast<std::size_t>(n)] = static_cast<float>(n * 37 % 11 - 4) / 3.0F;
    }
  }
  std::size_t index(std::int64_t i, std::int64_t k) const { return static_cast<std::size_t>(i * count + k); }
  std::int64_t& at(std::int64_t i, std::int64_t k) { return labels[index(i, k)]; }
  std::int64_t at(std::int64_t i, std::int64_t k) const { return labels[index(i, k)]; }
  void leave_some_empty() {
    at(1, 1) = at(1, 0);  // twice
    at(2, 1) = kIgnored;
    at(3, 0) = kIgnored;
  }

  tileloss_args forward(tileloss_args args) {
    args.dlogits = args.dhidden = args.dhead = {};
    args.logp_grad = args.lse_grad = args.entropy_grad = args.dbias = {};
    args.logp = tileloss_make_vector(logp.data(), TILELOSS_FLOAT32, std::ssize(logp));
    return with_labels(args);
  }
  tileloss_args backward(tileloss_args args) {
    args.logp = args.lse = args.entropy = args.argmax = args.correct = args.log_sum_sq_probs = args.mean_logit = {};
    args.logp_grad = tileloss_make_vector(logp_grad.data(), TILELOSS_FLOAT32, std::ssize(logp_grad));
    return with_labels(args);
  }
  // What all shards' calls are cut from.
  tileloss_args all_passes(const tileloss_args& args) {
    tileloss_args all = forward(args), gradient = backward(args);
    gradient.logp = all.logp;
    return gradient;
  }

  // The oracle of a case with these slots in place of its labels.
  std::unique_ptr<tools::Oracle> oracle(const tileloss_logprobs_options& options, tools::OracleTensors tensors) const {
    tensors.labels_per_row = count;
    tensors.logp_grad.assign(logp_grad.begin(), logp_grad.end());
    return make_logprobs(tools::Function("logprobs", &options), std::move(tensors));
  }
  // False where all slots of the row are empty.
  bool add_to(tools::GivenRow& given) const {
    given.labels = std::span(labels).subspan(index(given.logits.row, 0), static_cast<std::size_t>(count));
    const auto used = std::ranges::find_if(given.labels, [](std::int64_t label) { return label >= 0; });
    if (used == given.labels.end()) return false;
    given.label = *used;
    return true;
  }

 private:
  tileloss_args with_labels(tileloss_args args) const {
    args.labels_per_row = count;
    args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, std::ssize(labels));
    return args;
  }
};

struct SlotsCase {
  LogitsCase c;
  Slots slots;

  SlotsCase(const LogitsCaseSpec& spec, std::int64_t per_row) : c(spec), slots(c.labels(), spec.vocab, per_row) {}
  // `change`: before the logits are sealed.
  SlotsCase(const LogitsCaseSpec& spec, std::int64_t per_row, const std::function<void(LogitsCase&, Slots&)>& change)
      : c(spec, LogitsCase::Open{}), slots(c.labels(), spec.vocab, per_row) {
    change(c, slots);
    c.seal();
  }

  void forward(const tileloss_logprobs_options& options) {
    const tileloss_args args = slots.forward(c.args());
    ASSERT_TRUE(succeeds(tileloss_logprobs(&args, &options, nullptr, nullptr)));
  }
  void backward(const tileloss_logprobs_options& options) {
    const tileloss_args args = slots.backward(c.args());
    ASSERT_TRUE(succeeds(tileloss_logprobs_backward(&args, &options, nullptr, nullptr)));
  }

  testing::AssertionResult check(const tileloss_logprobs_options& options) {
    c.args() = slots.all_passes(c.args());
    return agrees(check_rows(c, *slots.oracle(options, c.oracle_tensors()), [&](const RowWork& work) {
      for (std::int64_t i = 0; i < c.spec().rows; ++i) {
        const std::vector<double> logits = c.logits_row(i);
        const std::vector<std::uint8_t> allowed = c.allowed().of_row(i, c.valid_columns());
        tools::GivenRow given{.logits = {.row = i, .logits = logits}, .allowed = allowed};
        if (slots.add_to(given)) work(given);
      }
    }));
  }
};

// Of a head's rows.
inline testing::AssertionResult check_slots(LinearCase& c, Slots& slots, const tileloss_logprobs_options& options) {
  c.args() = slots.all_passes(c.args());
  return agrees(c.check(*slots.oracle(options, c.row().oracle_tensors()),
                        [&](tools::GivenRow& given) { EXPECT_TRUE(slots.add_to(given)); }));
}

inline std::vector<tileloss_logprobs_options> options_of_logprobs() {
  std::vector<tileloss_logprobs_options> sets(4, logprobs_options());
  sets[1].logit.softcap = 10;
  sets[2].logit.temperature.value = 0.7;
  sets[3].logit.temperature = {2, nullptr};
  sets[3].logit.temperature_on = TILELOSS_TEMPERATURE_ON_LOGPROB;
  return sets;
}

}  // namespace tileloss::test
