// The interface between TileLoss and devices: what one offers. A backend is two sweeps and a way to run the row stage
// (architecture.md); driver.h says in which order. It is chosen by the device type of a call's views, and registered by a line in
// registry.cpp.
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>
#include <functional>
#include <memory>
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

// What a sweep does with every row, in this order. Bits.
enum Stages : std::uint32_t {
  kForward = 1,    // its state; of a target that is not labels its statistics and sums, too
  kPairState = 2,  // in place of that: what args.pair_state tells of it
  kGiveSums = 4,   // the sums of these columns, to there
  kRowStage = 8,
  kBackward = 16,
};

// A call on its device. The driver asks for one part after the other; a device may only queue them. What has to be kept from one
// part to the next (targets, row states, coefficients) is the call's own.
class Call {
 public:
  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  virtual ~Call() = default;

  // What only the device can look at - labels, numbers behind pointers - before anything is written. A device that cannot look
  // first does what tileloss.h says of labels out of range.
  virtual Status check() = 0;
  // The row stage's steps (losses/steps.h).
  virtual void prepare() = 0;
  virtual void couple() = 0;
  // Over all rows. Without kForward and kPairState row states are those of an earlier sweep, or args.row_state's.
  virtual Status sweep(std::uint32_t stages) = 0;
  // Whether the forward has to be a sweep of its own, also where no row waits for another.
  virtual bool keeps_states() const = 0;
  // The last part: the row stage's report, the loss.
  virtual Status finish() = 0;
};

// The devices' memory, for those whose data lies on the host.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual Status allocate(std::int32_t device_index, std::size_t bytes, void** data) = 0;
  virtual void release(std::int32_t device_index, void* data) = 0;
  // Queued on the device after all calls and copies before it; either end may be the host's, whose bytes stay as they are until
  // synchronise().
  virtual Status copy(std::int32_t device_index, void* to, const void* from, std::size_t bytes) = 0;
  // Returns when all that is queued on the device is done.
  virtual Status synchronise(std::int32_t device_index) = 0;
  // Milliseconds by the device's own clock of what `queue` queues, after all that was queued before it. Returns when it is done.
  virtual Status time(std::int32_t device_index, const std::function<void()>& queue, double* milliseconds) = 0;
};

class Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;

  virtual tileloss_device_type device_type() const = 0;
  virtual const char* name() const = 0;  // "cpu", "cuda", ...
  // Their device_index is below it.
  virtual std::int32_t device_count() const { return 1; }

  // Fills in workspace_bytes, predicted_ms, the buffers and the backend's own part of a zeroed plan; touches no data. The
  // function, the pass, the device and the fingerprint are there. `hints` is complete, and of its
  // parts one alone is this backend's; executor may be null.
  virtual Status plan(const Problem& problem, const tileloss_plan_options& hints, const tileloss_executor* executor,
                      tileloss_plan* plan) const = 0;
  // Whether its own part of a plan that was stored, or written by hand, can be run on this machine.
  virtual Status check_plan(const tileloss_plan& plan) const = 0;
  // All three outlive the call. `run.workspace` may be null.
  virtual Status begin(const Problem& problem, const tileloss_plan& plan, const tileloss_run& run,
                       std::unique_ptr<Call>* call) const = 0;
  // The row state's monoid over arrays that lie on the device; max, sum and label_logit are there.
  virtual Status set_identity(const tileloss_row_state& state) const = 0;
  virtual Status merge(tileloss_row_state* into, const tileloss_row_state& from) const = 0;
  // gradient *= *factor in float32, rounded once; neither read nor written where that is 1. There are rows; `factor` lies on the
  // device, and is read when the work is done.
  virtual Status scale_gradient(const tileloss_matrix& gradient, const float* factor, const tileloss_run& run) const = 0;
  // What calls on that device found wrong while they ran, since the last time; the caller has synchronised. A device whose calls
  // report all of it themselves has nothing to say.
  virtual Status check_errors(std::int32_t /*device_index*/, void* /*stream*/) const { return {}; }
  // Null: the host's.
  virtual DeviceMemory* memory() const { return nullptr; }
  // What that is, where the device cannot reach it: "a pointer of the host's"; else "", also where only a look could tell.
  virtual std::string out_of_reach(const void* /*data*/, std::int32_t /*device_index*/) const { return {}; }
  // Its own part of a plan.
  virtual std::vector<PlanFact> describe(const tileloss_plan& plan) const = 0;
};

// In order of registration. Not to be changed while calls are running.
std::span<const Backend* const> backends();
// Null where there is none. The one of CUDA is opened by the first who asks for it (cuda/library.h).
const Backend* find_backend(tileloss_device_type device_type);
// "", or of a device that there might be ", not NAME (what is missing)", for an error.
std::string why_no_backend(tileloss_device_type device_type);
// For backends that live outside this library (the tests' own); they must outlive every call. One of the same device gives way.
void add_backend(const Backend* backend);

}  // namespace tileloss::impl
