#include "losses/registry.h"

#include "losses/all_losses.h"

namespace tileloss::impl {
namespace {

constexpr std::size_t logit_offset(std::size_t member) { return offsetof(CommonOptions, logit) + member; }
constexpr std::size_t linear_offset(std::size_t member) { return offsetof(CommonOptions, linear) + member; }

std::vector<tileloss_field> all_fields(const LossInfo& info, bool is_linear) {
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
  if (is_linear) {
    using Linear = tileloss_linear_options;
    fields.push_back(
        choice_field("compute_dtype", linear_offset(offsetof(Linear, compute_dtype)), 0, 3, "auto|float32|bfloat16"));
    fields.push_back(choice_field("accumulate", linear_offset(offsetof(Linear, accumulate)), 0, 2, "false|true"));
  }
  fields.insert(fields.end(), info.fields.begin(), info.fields.end());
  return fields;
}

static_assert(TILELOSS_FLOAT32 == 1 && TILELOSS_BFLOAT16 == 2, "compute_dtype's choices are dtypes in their order");

RegisteredLoss make_entry(const LossInfo& info, bool is_linear) {
  std::uint32_t groups = info.tensors | (info.is_loss ? kLosses : 0u) | (is_linear ? kFromHidden : kFromLogits);
  if (info.teacher != Teacher::kNone) groups |= kTeacher;
  switch (info.teacher) {
    case Teacher::kNone: break;
    case Teacher::kLogits: groups |= kDivergence | (is_linear ? kTeacherHead : kTeacherLogits); break;
    case Teacher::kProbabilities: groups |= kTargetProbs; break;
    case Teacher::kColumns: groups |= kDivergence | kTeacherColumns; break;
  }
  return {(is_linear ? "linear_" : "") + std::string(info.name),
          is_linear,
          info,
          groups,
          all_fields(info, is_linear),
          tensors_of(groups)};
}

std::deque<RegisteredLoss>& registry() {
  static std::deque<RegisteredLoss> all = [] {
    std::deque<RegisteredLoss> built_in;
    for (const bool is_linear : {false, true}) {
      AllLosses::for_each([&]<class Loss>() { built_in.push_back(make_entry(Loss::info(), is_linear)); });
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
  registry().push_back(make_entry(info, false));
  registry().push_back(make_entry(info, true));
}

}  // namespace tileloss::impl
