#include "backends/cpu/cpu_backend.h"

#include "backends/cpu/call.h"
#include "backends/cpu/isa/isa.h"
#include "backends/cpu/plan/plan.h"
#include "backends/cpu/threads/executor.h"
#include "backends/cpu/threads/floating_point.h"
#include "backends/host/gradient.h"
#include "backends/host/row_state.h"
#include "core/enumerators.h"

namespace tileloss::impl::cpu {
namespace {

struct Scaled {
  tileloss_matrix gradient;
  float factor;
};

class CpuBackend final : public Backend {
 public:
  tileloss_device_type device_type() const override { return TILELOSS_CPU; }
  const char* name() const override { return "cpu"; }

  Status plan(const Problem& problem, const tileloss_plan_options& hints, const tileloss_executor* executor,
              tileloss_plan* plan) const override {
    return make_plan(problem, hints, executor, plan);
  }
  Status check_plan(const tileloss_plan& plan) const override { return cpu::check_plan(plan); }
  Status begin(const Problem& problem, const tileloss_plan& plan, const tileloss_run& run,
               std::unique_ptr<Call>* call) const override {
    return begin_call(problem, plan, run, call);
  }
  Status set_identity(const tileloss_row_state& state) const override {
    host::set_identity(state);
    return {};
  }
  Status merge(tileloss_row_state* into, const tileloss_row_state& from) const override {
    host::merge(into, from);
    return {};
  }
  Status scale_gradient(const tileloss_matrix& gradient, const float* factor, const tileloss_run& run) const override {
    if (Status s = refuse_stream("run.stream", run.stream); !s.ok()) return s;
    const Scaled scaled = {gradient, *factor};
    if (scaled.factor == 1) return {};
    const auto task = [](void* data, std::int64_t piece) {
      const FloatingPointScope scope;
      const auto& [matrix, number] = *static_cast<const Scaled*>(data);
      host::scale_piece(matrix, piece, number);
    };
    parallel_for(run.executor, host::count_pieces(gradient), task, const_cast<Scaled*>(&scaled));
    return {};
  }
  Status check_errors(std::int32_t /*device_index*/, void* stream) const override { return refuse_stream("stream", stream); }
  std::vector<PlanFact> describe(const tileloss_plan& plan) const override {
    const tileloss_cpu_plan& own = plan.cpu;
    std::vector<PlanFact> facts = {
        {"isa", isa_name(own.isa)},
        {"schedule", tileloss_schedule_name(own.schedule)},
        {"threads", std::int64_t{own.threads}},
        {"row_block", own.row_block},
        {"vocab_block", own.vocab_block},
    };
    if (own.isa_note[0] != '\0') facts.insert(facts.begin() + 1, {"isa_note", std::string(own.isa_note)});
    if (own.chunk_columns > 0) {
      facts.push_back({"chunk_columns", own.chunk_columns});
      facts.push_back({"kept_rows", own.kept_rows});
      facts.push_back({"kept_columns", own.kept_columns});
    }
    return facts;
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace tileloss::impl::cpu

using namespace tileloss::impl;  // NOLINT(google-build-using-namespace): the C functions below stand outside every namespace

extern "C" {

const char* tileloss_isa_name(tileloss_isa isa) { return cpu::isa_name(isa); }
int32_t tileloss_isa_supported(tileloss_isa isa) { return cpu::isa_supported(isa) ? 1 : 0; }
int32_t tileloss_default_threads(void) { return cpu::default_threads(); }

const char* tileloss_schedule_name(tileloss_schedule schedule) {
  switch (as_enum<TILELOSS_SCHEDULE_AUTO>(schedule)) {
    case TILELOSS_SCHEDULE_AUTO: return "auto";
    case TILELOSS_SCHEDULE_STASH: return "stash";
    case TILELOSS_SCHEDULE_RECOMPUTE: return "recompute";
    case TILELOSS_SCHEDULE_SWEEPS: return "sweeps";
  }
  return "unknown";
}

}  // extern "C"
