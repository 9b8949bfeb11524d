#include "losses/registry.h"

#include "losses/all_losses.h"
#include "schema/option_fields.h"

namespace tileloss::impl {
namespace {

std::vector<tileloss_field> all_fields(const LossInfo& info, bool is_linear) {
  std::vector<tileloss_field> fields(std::begin(kLogitFields), std::end(kLogitFields));
  if (is_linear) fields.insert(fields.end(), std::begin(kLinearFields), std::end(kLinearFields));
  fields.insert(fields.end(), info.fields.begin(), info.fields.end());
  return fields;
}

static_assert(TILELOSS_FLOAT32 == 1 && TILELOSS_BFLOAT16 == 2, "compute_dtype's choices are dtypes in their order");

RegisteredLoss make_entry(const LossInfo& info, bool is_linear) {
  std::uint32_t groups = info.tensors | (info.is_loss ? kLosses : 0u) | (is_linear ? kFromHidden : kFromLogits);
  if (needs_target_sweep(info.target)) groups |= kOptionalLabels;
  switch (info.target) {
    case TargetKind::kLabels: break;
    case TargetKind::kLogits: groups |= kDivergence | (is_linear ? kTeacherHead : kTeacherLogits); break;
    case TargetKind::kProbabilities: groups |= kTargetProbs; break;
    case TargetKind::kColumns: groups |= kDivergence | kTeacherColumns; break;
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
