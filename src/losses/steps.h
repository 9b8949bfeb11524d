// What a loss does with all rows together - denominators, sequences, a quantile, metrics - as steps over indices: member
// functions of the loss, each called for 0 to count - 1 in any order, one step after the other, on the copy of the loss that lies
// where the data does. A device brings a class of these three functions; HostSteps is the host's. Steps are public and not const,
// or nvcc's host code does not compile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/host_device.h"

namespace tileloss::impl {

// A step as something to call, which a kernel can take.
template <auto kStep, class Loss, class With = void>
struct Step {
  Loss* loss;
  With with;
  Step(Loss* l, const With& w) : loss(l), with(w) {}
  template <class Index>
  TILELOSS_HOST_DEVICE auto operator()(Index i) const {
    return (loss->*kStep)(i, with);
  }
};
template <auto kStep, class Loss>
struct Step<kStep, Loss, void> {
  Loss* loss;
  explicit Step(Loss* l) : loss(l) {}
  template <class Index>
  TILELOSS_HOST_DEVICE auto operator()(Index i) const {
    return (loss->*kStep)(i);
  }
};

template <class Loss>
class HostSteps {
 public:
  explicit HostSteps(Loss& loss) : loss_(loss) {}

  // (loss.*kStep)(i, with...)
  template <auto kStep, class... With>
  void each(std::int64_t count, const With&... with) {
    for (std::int64_t i = 0; i < count; ++i) (loss_.*kStep)(i, with...);
  }
  // (loss.*kTake)(sum over i of (loss.*kTerm)(i, with...)), summed in an order that is fixed.
  template <auto kTerm, auto kTake, class... With>
  void sum(std::int64_t count, const With&... with) {
    double total = 0;
    for (std::int64_t i = 0; i < count; ++i) total += (loss_.*kTerm)(i, with...);
    (loss_.*kTake)(total);
  }
  // Ascending; none is NaN.
  void sort(double* values, std::int64_t count) { std::sort(values, values + count); }

 private:
  Loss& loss_;
};

}  // namespace tileloss::impl
