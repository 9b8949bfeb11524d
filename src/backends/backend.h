// The seam between TileLoss and devices: what one has to offer. A backend is two sweeps (architecture.md): it sees logits, or
// hidden states and head, row states, coefficients; of a loss's options what a RowStage with a teacher tells a sweep, no more. It
// is chosen by the device type of a call's views, and registered by a line in registry.cpp.
#ifndef TILELOSS_BACKENDS_BACKEND_H_
#define TILELOSS_BACKENDS_BACKEND_H_

#include <tileloss/tileloss.h>

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "backends/problem.h"
#include "schema/status.h"

namespace tileloss::impl {

// One fact of a plan, for tileloss_plan_describe.
struct PlanFact {
  std::string name;
  std::variant<std::int64_t, double, std::string> value;
};

class Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;

  virtual tileloss_device_type device_type() const = 0;
  virtual const char* name() const = 0;  // "cpu", "cuda", ...

  // Fills in workspace_bytes, predicted_ms, the buffers and the backend's own part of a zeroed plan; touches no data. The
  // function, the pass, the device and the fingerprint are there. `wishes` is complete; executor may be null.
  virtual Status plan(const Problem& problem, const tileloss_plan_options& wishes, const tileloss_executor* executor,
                      tileloss_plan* plan) const = 0;
  // Whether its own part of a plan that was stored, or written by hand, can be run on this machine.
  virtual Status check_plan(const tileloss_plan& plan) const = 0;
  // Runs the three stages. What only the device can look at (labels, numbers behind pointers) is checked before anything is
  // written; a device that cannot look first does what tileloss.h says of labels out of range. `run.workspace` may be null.
  // A problem that merges shards calls run.merge once, between forward and gradient; a backend that has no such sweep refuses it
  // when it plans.
  virtual Status run(const Problem& problem, const tileloss_plan& plan, const tileloss_run& run) const = 0;
  // The row state's monoid over arrays that lie on the device; max, sum and target are there.
  virtual Status set_identity(const tileloss_row_state& state) const = 0;
  virtual Status merge(tileloss_row_state* into, const tileloss_row_state& from) const = 0;
  // Its own part of a plan.
  virtual std::vector<PlanFact> describe(const tileloss_plan& plan) const = 0;
};

// In order of registration. Not to be changed while calls are running.
std::span<const Backend* const> backends();
// Null where there is none.
const Backend* find_backend(tileloss_device_type device_type);
// For backends that live outside this library (the tests' own); they must outlive every call.
void add_backend(const Backend* backend);

}  // namespace tileloss::impl

#endif  // TILELOSS_BACKENDS_BACKEND_H_
