#include "losses/registry.h"

#include "losses/cross_entropy.h"
#include "losses/logprobs.h"
#include "losses/policy_loss.h"

namespace tileloss {
namespace {

constexpr std::size_t logit_offset(std::size_t member) { return offsetof(CommonOptions, logit) + member; }

std::vector<tileloss_field> all_fields(const LossInfo& info) {
  using Logit = tileloss_logit_options;
  std::vector<tileloss_field> fields = {
      double_field("logit_scale", logit_offset(offsetof(Logit, logit_scale)), 1, 0, kUnbounded),
      double_field("softcap", logit_offset(offsetof(Logit, softcap)), 0, 0, kUnbounded),
      scalar_field("temperature", logit_offset(offsetof(Logit, temperature)), 1, 0, true),
      choice_field("temperature_on", logit_offset(offsetof(Logit, temperature_on)), 0, 2, "logits|logprob"),
      int64_field("valid_vocab", logit_offset(offsetof(Logit, valid_vocab)), -1, 1, true),
      int64_field("ignore_index", logit_offset(offsetof(Logit, ignore_index)), -100, -0x1p62, false),
      int64_field("vocab_start", logit_offset(offsetof(Logit, vocab_start)), 0, 0, false),
      int64_field("vocab_total", logit_offset(offsetof(Logit, vocab_total)), -1, 1, true),
  };
  fields.front().exclusive_minimum = 1;
  fields.insert(fields.end(), info.fields.begin(), info.fields.end());
  return fields;
}

RegisteredLoss make_entry(const LossInfo& info, bool is_linear) {
  return {(is_linear ? "linear_" : "") + std::string(info.name), is_linear, info, all_fields(info)};
}

std::deque<RegisteredLoss>& registry() {
  static std::deque<RegisteredLoss> all = [] {
    std::deque<RegisteredLoss> built_in;
    for (const bool is_linear : {false, true}) {
      for (const LossInfo& info : {
               Logprobs::info(),
               CrossEntropy::info(),
               PolicyLoss::info(),
           }) {
        built_in.push_back(make_entry(info, is_linear));
      }
    }
    return built_in;
  }();
  return all;
}

// Built at load: a fork during the initialisation of a local static would leave its guard locked in the child.
[[maybe_unused]] const bool is_built = !registry().empty();

}  // namespace

const std::deque<RegisteredLoss>& losses() { return registry(); }

const RegisteredLoss* find_loss(std::string_view name) {
  for (const RegisteredLoss& loss : registry()) {
    if (loss.name == name) return &loss;
  }
  return nullptr;
}

void add_loss(const LossInfo& info) {
  for (const bool is_linear : {false, true}) registry().push_back(make_entry(info, is_linear));
}

}  // namespace tileloss
