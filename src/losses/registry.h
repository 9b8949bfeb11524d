// The losses there are.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "losses/loss.h"

namespace tileloss::impl {

// Every loss is there from logits by its own name, and fused with the LM head as linear_<name>.
struct RegisteredLoss {
  std::string name;
  bool is_linear = false;
  LossInfo info;
  std::uint32_t groups = 0;            // TensorGroups that it takes
  std::vector<tileloss_field> fields;  // the logit options', with the LM head the linear ones, and the loss's own
  std::vector<tileloss_tensor> tensors;

  TargetKind target() const { return info.target; }
  bool needs_target_sweep() const { return impl::needs_target_sweep(info.target); }
};

// In order of registration. Not to be changed while calls are running.
const std::deque<RegisteredLoss>& losses();
const RegisteredLoss* find_loss(std::string_view name);
// All its forms. For losses that live outside this library (the tests' own); the built-in ones are those of all_losses.h.
void add_loss(const LossInfo& info);

}  // namespace tileloss::impl
