#include "backends/driver.h"

#include <string>

namespace tileloss::impl {
namespace {

// Between forward and backward a shard's states are merged with the others' by the caller.
Status merge_shards(const tileloss_run& run) {
  const tileloss_status status = run.merge(run.merge_context);
  if (status == TILELOSS_OK) return {};
  return {status, "run.merge: expected TILELOSS_OK, got " + std::to_string(status)};
}

std::uint32_t stages_of(const Problem& p) {
  const std::uint32_t known = p.has_pair_state ? kPairState : p.needs_forward ? kForward : 0u;
  if (p.gives_sums) return known | kGiveSums;
  return known | kRowStage | (p.needs_backward ? kBackward : 0u);
}

}  // namespace

Status run_call(const Backend& backend, const Problem& p, const tileloss_plan& plan, const tileloss_run& run) {
  std::unique_ptr<Call> call;
  if (Status s = backend.begin(p, plan, run, &call); !s.ok()) return s;
  if (Status s = call->check(); !s.ok()) return s;
  call->prepare();
  std::uint32_t stages = stages_of(p);
  if (p.needs_forward && (p.couples_rows || call->keeps_states())) {
    if (Status s = call->sweep(kForward); !s.ok()) return s;
    if (Status s = p.merges_shards() ? merge_shards(run) : Status{}; !s.ok()) return s;
    stages &= ~std::uint32_t{kForward};
  }
  if (p.couples_rows) call->couple();
  if (Status s = call->sweep(stages); !s.ok()) return s;
  return call->finish();
}

}  // namespace tileloss::impl
