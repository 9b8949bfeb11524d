// sweep: no loss, the two sweeps alone, for losses that are computed elsewhere. Forward the row state; backward, of coefficients
// that the caller gives for each row,
//   dL/dz_j = target [j = y] + p_j (prob + prob_logp log p_j) + uniform c_j       (core/row_coefficients.h)
// A row's label is a column of this matrix; of any other label the target is elsewhere.
#pragma once

#include "losses/loss.h"

namespace tileloss::impl {

class Sweep {
 public:
  explicit Sweep(const LossContext& context) : context_(context) {}

  TILELOSS_HOST_DEVICE RowResult row(std::int64_t i, const RowStats&) const {
    return {0,
            {.target = context_.target_coef[i],
             .prob_plus_target = context_.prob_plus_target_coef[i],
             .prob_logp = context_.prob_logp_coef[i],
             .uniform = context_.uniform_coef[i]}};
  }

  static LossInfo info() {
    return {.name = "sweep",
            .is_loss = false,
            .options_size = sizeof(tileloss_sweep_options),
            .tensors = kCoefficients | kClassWeights,
            .make = &make_stage<Sweep>,
            .check = &check_temperature_on,
            .may_be_elsewhere = true};
  }

 private:
  LossContext context_;
};

}  // namespace tileloss::impl
