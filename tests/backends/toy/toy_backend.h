// A device that does not exist, to show all that a new one has to bring: two sweeps in plain loops, from logits, over memory that
// the host can read. Registered by one line (add_backend) in its test.
#ifndef TILELOSS_TESTS_BACKENDS_TOY_TOY_BACKEND_H_
#define TILELOSS_TESTS_BACKENDS_TOY_TOY_BACKEND_H_

#include "backends/backend.h"

namespace tileloss::test {

inline constexpr tileloss_device_type kToyDevice = 77;

// Its own part of a plan.
struct ToyPlan {
  std::int64_t rows;
  std::int64_t columns;
};

class ToyBackend final : public impl::Backend {
 public:
  tileloss_device_type device_type() const override { return kToyDevice; }
  const char* name() const override { return "toy"; }
  impl::Status plan(const impl::Problem& problem, const tileloss_plan_options& wishes, const tileloss_executor* executor,
                    tileloss_plan* plan) const override;
  impl::Status check_plan(const tileloss_plan& plan) const override;
  impl::Status run(const impl::Problem& problem, const tileloss_plan& plan, const tileloss_run& run) const override;
  impl::Status set_identity(const tileloss_row_state& state) const override;
  impl::Status merge(tileloss_row_state* into, const tileloss_row_state& from) const override;
  std::vector<impl::PlanFact> describe(const tileloss_plan& plan) const override;
};

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_BACKENDS_TOY_TOY_BACKEND_H_
