// The C entry points: every one validates, plans if need be, dispatches and returns a status.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <vector>

#include "api/options.h"
#include "api/plan.h"
#include "api/problem.h"
#include "api/run.h"
#include "api/status.h"
#include "backends/cpu/isa/isa.h"
#include "backends/cpu/threads/executor.h"

namespace tileloss::api {
namespace {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

}  // namespace

tileloss_status report(Status status) noexcept {
  if (!status.ok()) {
    if (status.message.empty()) {  // no memory was left for a message
      last_error().clear();
    } else {
      last_error() = std::move(status.message);
    }
  }
  return status.code;
}

namespace {

Status call(const char* function, tileloss_pass pass, const tileloss_args* args, const void* options, const tileloss_plan* plan,
            const tileloss_run* given) {
  Problem problem;
  if (Status s = make_problem(function, pass, args, options, &problem); !s.ok()) return s;
  if (plan == nullptr) {
    tileloss_plan own{};
    own.struct_size = sizeof own;
    if (Status s = make_plan(problem, nullptr, given == nullptr ? nullptr : given->executor, &own); !s.ok()) return s;
    return run(problem, own, given);
  }
  if (!is_plan_size(plan->struct_size))
    return expected("plan.struct_size", std::to_string(sizeof *plan), std::to_string(plan->struct_size));
  const std::string planned(plan->function, strnlen(plan->function, sizeof plan->function));
  if (plan->fingerprint != fingerprint(problem) || plan->pass != pass || planned != function) {
    return {TILELOSS_PLAN_MISMATCH, std::string("plan: expected one made for this ") + function +
                                        " (same shapes, dtypes, strides and options), got one made for another call of " +
                                        planned};
  }
  if (Status s = check_plan(*plan); !s.ok()) return s;
  if (!cpu::isa_supported(plan->isa))
    return {TILELOSS_UNSUPPORTED, std::string("plan.isa: expected one that this machine has, got ") + cpu::isa_name(plan->isa)};
  return run(problem, *plan, given);
}

void init(void* value, std::size_t struct_size) {
  std::memset(value, 0, struct_size);
  std::memcpy(value, &struct_size, sizeof struct_size);
}

// The defaults, and on top of them a preset; null: none.
Status init_options(const char* function, const char* preset, void* options, std::size_t options_size) {
  const RegisteredLoss* loss = function == nullptr ? nullptr : find_loss(function);
  if (loss == nullptr) return expected("function", "the name of a registered function", function == nullptr ? "null" : function);
  if (options == nullptr) return expected("options", "a pointer", "null");
  if (options_size < sizeof(std::size_t))
    return expected("options_size", "that of the struct, at least " + std::to_string(sizeof(std::size_t)),
                    std::to_string(options_size));
  if (preset != nullptr) {
    if (loss->info.presets == nullptr) return expected("preset", std::string("none: ") + function + " has no presets", preset);
    const std::string all = std::string("|") + loss->info.presets + "|", name = preset;
    if (name.empty() || name.find('|') != std::string::npos || all.find("|" + name + "|") == std::string::npos)
      return expected("preset", "one of " + std::string(loss->info.presets), preset);
  }
  std::vector<std::byte> own(loss->info.options_size);
  fill_defaults(*loss, own.data());
  if (preset != nullptr) loss->info.set_preset(preset, own.data());
  init(options, options_size);
  const std::size_t known = std::min(options_size, loss->info.options_size), head = sizeof options_size;
  std::memcpy(static_cast<std::byte*>(options) + head, own.data() + head, known - head);
  return {};
}

}  // namespace
}  // namespace tileloss::api

using namespace tileloss;       // NOLINT(google-build-using-namespace): the C functions below stand outside every namespace
using namespace tileloss::api;  // NOLINT(google-build-using-namespace)

extern "C" {

const char* tileloss_last_error(void) { return last_error().c_str(); }

const char* tileloss_status_name(tileloss_status status) {
  switch (status) {
    case TILELOSS_OK: return "ok";
    case TILELOSS_INVALID_ARGUMENT: return "invalid_argument";
    case TILELOSS_LABEL_OUT_OF_RANGE: return "label_out_of_range";
    case TILELOSS_OUT_OF_MEMORY: return "out_of_memory";
    case TILELOSS_WORKSPACE_TOO_SMALL: return "workspace_too_small";
    case TILELOSS_UNSUPPORTED: return "unsupported";
    case TILELOSS_PLAN_MISMATCH: return "plan_mismatch";
    case TILELOSS_INTERNAL: return "internal";
    default: return "unknown";
  }
}

const char* tileloss_version(void) { return TILELOSS_VERSION_STRING; }

tileloss_matrix tileloss_make_matrix(const void* data, tileloss_dtype dtype, int64_t rows, int64_t cols, int64_t row_stride) {
  return {const_cast<void*>(data), rows, cols, row_stride, 1, dtype, TILELOSS_CPU, 0, 0};
}

tileloss_vector tileloss_make_vector(const void* data, tileloss_dtype dtype, int64_t size) {
  return {const_cast<void*>(data), size, 1, dtype, TILELOSS_CPU, 0, 0};
}

void tileloss_struct_init(void* value, size_t struct_size) {
  if (value != nullptr && struct_size >= sizeof struct_size) init(value, struct_size);
}

tileloss_status tileloss_make_plan(const char* function, tileloss_pass pass, const tileloss_args* args, const void* options,
                                   const tileloss_plan_options* plan_options, const tileloss_executor* executor,
                                   tileloss_plan* plan) {
  return guarded([&]() -> Status {
    Problem problem;
    if (Status s = make_problem(function, pass, args, options, &problem); !s.ok()) return s;
    return make_plan(problem, plan_options, executor, plan);
  });
}

tileloss_status tileloss_call(const char* function, tileloss_pass pass, const tileloss_args* args, const void* options,
                              const tileloss_plan* plan, const tileloss_run* run) {
  return guarded([&] { return call(function, pass, args, options, plan, run); });
}

tileloss_status tileloss_logprobs(const tileloss_args* args, const tileloss_logprobs_options* options, const tileloss_plan* plan,
                                  const tileloss_run* run) {
  return tileloss_call("logprobs", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_logprobs_backward(const tileloss_args* args, const tileloss_logprobs_options* options,
                                           const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("logprobs", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_cross_entropy(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                       const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("cross_entropy", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_cross_entropy_backward(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                                const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("cross_entropy", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_cross_entropy_value_and_grad(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                                      const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("cross_entropy", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}

tileloss_status tileloss_policy_loss(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                     const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("policy_loss", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_policy_loss_backward(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                              const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("policy_loss", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_policy_loss_value_and_grad(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                                    const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("policy_loss", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}

tileloss_status tileloss_linear_logprobs(const tileloss_args* args, const tileloss_logprobs_options* options,
                                         const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_logprobs", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_logprobs_backward(const tileloss_args* args, const tileloss_logprobs_options* options,
                                                  const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_logprobs", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_cross_entropy(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                              const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_cross_entropy", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_cross_entropy_backward(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                                       const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_cross_entropy", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_cross_entropy_value_and_grad(const tileloss_args* args,
                                                             const tileloss_cross_entropy_options* options,
                                                             const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}
tileloss_status tileloss_linear_policy_loss(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                            const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_policy_loss", TILELOSS_FORWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_policy_loss_backward(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                                     const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_policy_loss", TILELOSS_BACKWARD, args, options, plan, run);
}
tileloss_status tileloss_linear_policy_loss_value_and_grad(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                                           const tileloss_plan* plan, const tileloss_run* run) {
  return tileloss_call("linear_policy_loss", TILELOSS_VALUE_AND_GRAD, args, options, plan, run);
}

int64_t tileloss_function_count(void) { return static_cast<int64_t>(losses().size()); }

tileloss_status tileloss_get_function_info(int64_t index, tileloss_function_info* info) {
  return guarded([&]() -> Status {
    if (index < 0 || index >= tileloss_function_count())
      return expected("index", "0 to " + std::to_string(tileloss_function_count() - 1), std::to_string(index));
    if (info == nullptr || info->struct_size != sizeof *info)
      return expected("info", "struct_size = " + std::to_string(sizeof *info), "another");
    const RegisteredLoss& loss = losses()[static_cast<std::size_t>(index)];
    *info = {sizeof *info,
             loss.name.c_str(),
             loss.info.options_size,
             loss.fields.data(),
             static_cast<int64_t>(loss.fields.size()),
             loss.info.is_loss ? 1 : 0,
             0,
             loss.info.presets,
             loss.info.metrics};
    return {};
  });
}

tileloss_status tileloss_options_init(const char* function, void* options, size_t options_size) {
  return guarded([&] { return init_options(function, nullptr, options, options_size); });
}
tileloss_status tileloss_options_preset(const char* function, const char* preset, void* options, size_t options_size) {
  return guarded([&] { return init_options(function, preset == nullptr ? "" : preset, options, options_size); });
}

const char* tileloss_isa_name(tileloss_isa isa) { return cpu::isa_name(isa); }
int32_t tileloss_isa_supported(tileloss_isa isa) { return cpu::isa_supported(isa) ? 1 : 0; }
int32_t tileloss_default_threads(void) { return cpu::default_threads(); }

const char* tileloss_schedule_name(tileloss_schedule schedule) {
  switch (schedule) {
    case TILELOSS_SCHEDULE_AUTO: return "auto";
    case TILELOSS_SCHEDULE_STASH: return "stash";
    case TILELOSS_SCHEDULE_RECOMPUTE: return "recompute";
    case TILELOSS_SCHEDULE_SWEEPS: return "sweeps";
    default: return "unknown";
  }
}

}  // extern "C"
