// The losses of this library: the one place that lists them.
#pragma once

#include <string_view>

#include "losses/cross_entropy.h"
#include "losses/distillation.h"
#include "losses/logprobs.h"
#include "losses/policy_loss.h"
#include "losses/soft_cross_entropy.h"
#include "losses/sweep.h"

namespace tileloss::impl {

template <class... Losses>
struct LossList {
  // visit.template operator()<Loss>() for each of them, in order.
  template <class Visit>
  static void for_each(Visit&& visit) {
    (visit.template operator()<Losses>(), ...);
  }
};
using AllLosses = LossList<Logprobs, CrossEntropy, PolicyLoss, Distillation, SoftCrossEntropy, SparseDistillation, Sweep>;

// visit.template operator()<Loss>() for the one of that name. False: there is none.
template <class Visit>
bool visit_loss(std::string_view name, Visit&& visit) {
  bool is_found = false;
  AllLosses::for_each([&]<class Loss>() {
    if (is_found || Loss::info().name != name) return;
    is_found = true;
    visit.template operator()<Loss>();
  });
  return is_found;
}

}  // namespace tileloss::impl
