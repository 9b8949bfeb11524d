// The C entry points: every one validates, plans if need be, dispatches and returns a status.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <vector>

#include "api/arguments.h"
#include "api/boundary.h"
#include "api/describe.h"
#include "api/validate.h"
#include "backends/driver.h"
#include "core/enumerators.h"
#include "schema/options.h"

namespace tileloss::impl::api {
namespace {

Status check_executor(const tileloss_executor* given, tileloss_executor* whole) {
  if (Status s = take_struct("executor", given, whole); !s.ok()) return s;
  if (given == nullptr) return {};
  if (whole->reserved != 0) return expected("executor.reserved", "0", std::to_string(whole->reserved));
  if (whole->threads < 1) return expected("executor.threads", ">= 1", std::to_string(whole->threads));
  if (whole->parallel_for == nullptr && whole->schedule == nullptr)
    return expected("executor", "parallel_for or schedule", "neither");
  return {};
}

// The head of a plan here, the rest by the backend.
Status make_plan(const Problem& problem, const tileloss_plan_options* given, const tileloss_executor* executor,
                 tileloss_plan* out) {
  tileloss_plan_options hints{};
  if (Status s = take_struct("plan_options", given, &hints); !s.ok()) return s;
  if (hints.workspace_bytes < 0) return expected("workspace_bytes", ">= 0", std::to_string(hints.workspace_bytes));
  tileloss_executor own_executor{};
  if (Status s = check_executor(executor, &own_executor); !s.ok()) return s;
  tileloss_plan plan{};
  plan.struct_size = sizeof plan;
  std::strncpy(plan.function, problem.loss->name.c_str(), sizeof plan.function - 1);
  plan.pass = problem.pass;
  plan.device_type = problem.device_type;
  plan.device_index = problem.device_index;
  plan.fingerprint = fingerprint(problem);
  const Backend& backend = *find_backend(problem.device_type);
  if (Status s = backend.plan(problem, hints, executor == nullptr ? nullptr : &own_executor, &plan); !s.ok()) return s;
  fill_struct(plan, out);
  return {};
}

// The structs whole; `executor` holds the run's.
Status take_run(const Problem& problem, const tileloss_run* given, tileloss_run* run, tileloss_executor* executor) {
  if (Status s = take_struct("run", given, run); !s.ok()) return s;
  if (Status s = check_executor(run->executor, executor); !s.ok()) return s;
  if (run->executor != nullptr) run->executor = executor;
  if (problem.merges_shards() && run->merge == nullptr)
    return expected("run.merge", "a function, as the logits are a shard", "null");
  if (!problem.merges_shards() && run->merge != nullptr)
    return expected("run.merge", "null: it is for value_and_grad of a shard of the vocabulary", "a function");
  return {};
}

Status run_planned(const Problem& problem, const tileloss_plan& plan, const tileloss_run* given) {
  const Backend& backend = *find_backend(problem.device_type);
  if (Status s = check_pointers(problem, backend); !s.ok()) return s;
  tileloss_run run{};
  tileloss_executor executor{};
  if (Status s = take_run(problem, given, &run, &executor); !s.ok()) return s;
  if (run.workspace != nullptr) {
    if (Status s = check_reach("workspace", problem, backend, run.workspace); !s.ok()) return s;
  }
  return run_call(backend, problem, plan, run);
}

Status scale_gradient(const tileloss_matrix* given, const float* factor, const tileloss_run* given_run) {
  if (given == nullptr) return expected("gradient", "a matrix", "null");
  tileloss_matrix gradient = *given;
  Problem problem;  // of no function
  if (Status s = choose_device(problem, "gradient", device_of(gradient)); !s.ok()) return s;
  if (Status s = check_matrix(problem, "gradient", gradient); !s.ok()) return s;
  tileloss_run run{};
  tileloss_executor executor{};
  if (Status s = take_run(problem, given_run, &run, &executor); !s.ok()) return s;
  if (gradient.rows == 0) return {};
  const Backend& backend = *find_backend(gradient.device_type);
  const std::pair<const char*, const void*> pointers[] = {{"gradient.data", gradient.data}, {"factor", factor}};
  for (const auto& [name, pointer] : pointers) {
    if (pointer == nullptr) return expected(name, "a pointer", "null");
    if (Status s = check_reach(name, problem, backend, pointer); !s.ok()) return s;
  }
  if (gradient.rows > 1 && gradient.row_stride == gradient.cols) {  // rows without gaps are one
    gradient.cols *= gradient.rows;
    gradient.rows = 1;
  }
  return backend.scale_gradient(gradient, factor, run);
}

Status call(const char* function, tileloss_pass pass, const tileloss_args* args, const void* options, const tileloss_plan* given,
            const tileloss_run* run) {
  Problem problem;
  if (Status s = make_problem(function, pass, args, options, &problem); !s.ok()) return s;
  tileloss_plan plan{};
  plan.struct_size = sizeof plan;
  if (given == nullptr) {
    if (Status s = make_plan(problem, nullptr, run == nullptr ? nullptr : run->executor, &plan); !s.ok()) return s;
    return run_planned(problem, plan, run);
  }
  if (Status s = take_struct("plan", given, &plan); !s.ok()) return s;
  const std::string planned(plan.function, strnlen(plan.function, sizeof plan.function));
  if (plan.fingerprint != fingerprint(problem) || plan.pass != pass || planned != function ||
      plan.device_type != problem.device_type) {
    return {TILELOSS_PLAN_MISMATCH, std::string("plan: expected one made for this ") + function +
                                        " (same shapes, dtypes, strides and options), got one made for another call of " +
                                        planned};
  }
  if (plan.workspace_bytes < 0) return expected("plan.workspace_bytes", ">= 0", std::to_string(plan.workspace_bytes));
  if (Status s = find_backend(plan.device_type)->check_plan(plan); !s.ok()) return s;
  return run_planned(problem, plan, run);
}

void init(void* value, std::size_t struct_size) {
  std::memset(value, 0, struct_size);
  std::memcpy(value, &struct_size, sizeof struct_size);
}

Status find_function(const char* function, const RegisteredLoss** found) {
  *found = function == nullptr ? nullptr : find_loss(function);
  if (*found != nullptr) return {};
  return expected("function", "the name of a registered function", function == nullptr ? "null" : function);
}

// The defaults, and on top of them a preset; null: none.
Status init_options(const char* function, const char* preset, void* options, std::size_t options_size) {
  const RegisteredLoss* loss = nullptr;
  if (Status s = find_function(function, &loss); !s.ok()) return s;
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
  fill_defaults(loss->fields, own.data(), own.size());
  if (preset != nullptr) loss->info.set_preset(preset, own.data());
  init(options, options_size);
  const std::size_t known = std::min(options_size, loss->info.options_size), head = sizeof options_size;
  std::memcpy(static_cast<std::byte*>(options) + head, own.data() + head, known - head);
  return {};
}

// With the function's fields, once options were found to have room for all of them.
template <class Set>
Status set_option(const char* function, const void* options, const Set& set) {
  const RegisteredLoss* loss = nullptr;
  if (Status s = find_function(function, &loss); !s.ok()) return s;
  if (options == nullptr) return expected("options", "a struct from tileloss_options_init", "null");
  std::size_t size = 0;
  std::memcpy(&size, options, sizeof size);
  if (size < loss->info.options_size)
    return expected("options.struct_size", "at least " + std::to_string(loss->info.options_size), std::to_string(size));
  return set(loss->fields);
}

}  // namespace
}  // namespace tileloss::impl::api

using namespace tileloss::impl;       // NOLINT(google-build-using-namespace): the C functions below stand outside every namespace
using namespace tileloss::impl::api;  // NOLINT(google-build-using-namespace)

extern "C" {

const char* tileloss_last_error(void) { return last_error(); }

const char* tileloss_status_name(tileloss_status status) {
  switch (as_enum<TILELOSS_OK>(status)) {
    case TILELOSS_OK: return "ok";
    case TILELOSS_INVALID_ARGUMENT: return "invalid_argument";
    case TILELOSS_LABEL_OUT_OF_RANGE: return "label_out_of_range";
    case TILELOSS_OUT_OF_MEMORY: return "out_of_memory";
    case TILELOSS_WORKSPACE_TOO_SMALL: return "workspace_too_small";
    case TILELOSS_UNSUPPORTED: return "unsupported";
    case TILELOSS_PLAN_MISMATCH: return "plan_mismatch";
    case TILELOSS_INTERNAL: return "internal";
  }
  return "unknown";
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
    if (Status s = check_filled("plan", plan, offsetof(tileloss_plan, other)); !s.ok()) return s;
    Problem problem;
    if (Status s = make_problem(function, pass, args, options, &problem); !s.ok()) return s;
    return make_plan(problem, plan_options, executor, plan);
  });
}

tileloss_status tileloss_plan_describe(const tileloss_plan* plan, tileloss_text_format format, char* text, size_t capacity,
                                       size_t* needed) {
  return guarded([&] { return describe(plan, format, text, capacity, needed); });
}

tileloss_status tileloss_call(const char* function, tileloss_pass pass, const tileloss_args* args, const void* options,
                              const tileloss_plan* plan, const tileloss_run* run) {
  return guarded([&] { return call(function, pass, args, options, plan, run); });
}

tileloss_status tileloss_scale_gradient(const tileloss_matrix* gradient, const float* factor, const tileloss_run* run) {
  return guarded([&] { return scale_gradient(gradient, factor, run); });
}

tileloss_status tileloss_check_errors(tileloss_device_type device_type, int32_t device_index, void* stream) {
  return guarded([&]() -> Status {
    if (Status s = find_device("", {device_type, device_index}); !s.ok()) return s;
    return find_backend(device_type)->check_errors(device_index, stream);
  });
}

int64_t tileloss_function_count(void) { return static_cast<int64_t>(losses().size()); }

tileloss_status tileloss_get_function_info(int64_t index, tileloss_function_info* info) {
  return guarded([&]() -> Status {
    if (index < 0 || index >= tileloss_function_count())
      return expected("index", "0 to " + std::to_string(tileloss_function_count() - 1), std::to_string(index));
    if (Status s = check_filled("info", info); !s.ok()) return s;
    const RegisteredLoss& loss = losses()[static_cast<std::size_t>(index)];
    tileloss_function_info whole{};
    whole.struct_size = sizeof whole;
    whole.name = loss.name.c_str();
    whole.loss = loss.info.name;
    whole.is_loss = loss.info.is_loss ? 1 : 0;
    whole.is_linear = loss.is_linear ? 1 : 0;
    whole.options_size = loss.info.options_size;
    whole.fields = loss.fields.data();
    whole.num_fields = static_cast<int64_t>(loss.fields.size());
    whole.tensors = loss.tensors.data();
    whole.num_tensors = static_cast<int64_t>(loss.tensors.size());
    whole.args_size = sizeof(tileloss_args);
    whole.row_state_offset = offsetof(tileloss_args, row_state);
    whole.sequence_length_offset = offsetof(tileloss_args, sequence_length);
    whole.row_groups_offset = offsetof(tileloss_args, row_groups);
    whole.presets = loss.info.presets;
    whole.metrics = loss.info.metrics;
    whole.pair_state_offset = offsetof(tileloss_args, pair_state);
    whole.labels_per_row_offset = offsetof(tileloss_args, labels_per_row);
    fill_struct(whole, info);
    return {};
  });
}

tileloss_status tileloss_options_init(const char* function, void* options, size_t options_size) {
  return guarded([&] { return init_options(function, nullptr, options, options_size); });
}
tileloss_status tileloss_options_preset(const char* function, const char* preset, void* options, size_t options_size) {
  return guarded([&] { return init_options(function, preset == nullptr ? "" : preset, options, options_size); });
}

tileloss_status tileloss_options_set(const char* function, void* options, const char* name, double value) {
  return guarded(
      [&] { return set_option(function, options, [&](Fields f) { return set_number(f, function, name, value, options); }); });
}
tileloss_status tileloss_options_set_choice(const char* function, void* options, const char* name, const char* choice) {
  return guarded(
      [&] { return set_option(function, options, [&](Fields f) { return set_choice(f, function, name, choice, options); }); });
}
tileloss_status tileloss_options_set_pointer(const char* function, void* options, const char* name, const float* pointer) {
  return guarded(
      [&] { return set_option(function, options, [&](Fields f) { return set_pointer(f, function, name, pointer, options); }); });
}

tileloss_status tileloss_row_state_set_identity(tileloss_row_state* state) {
  return guarded([&]() -> Status {
    tileloss_row_state whole{};
    if (Status s = check_row_state_struct("state", state, &whole); !s.ok()) return s;
    if (Status s = find_backend(whole.device_type)->set_identity(whole); !s.ok()) return s;
    whole.smoothing_weight = 0;
    fill_struct(whole, state);
    return {};
  });
}

tileloss_status tileloss_row_state_merge(tileloss_row_state* into, const tileloss_row_state* from) {
  return guarded([&]() -> Status {
    tileloss_row_state sum{}, more{};
    if (Status s = check_row_state_struct("into", into, &sum); !s.ok()) return s;
    if (Status s = check_row_state_struct("from", from, &more); !s.ok()) return s;
    if (sum.rows != more.rows) return expected("from.rows", std::to_string(sum.rows), std::to_string(more.rows));
    if (sum.device_type != more.device_type)
      return expected("from.device_type", device_name(sum.device_type), device_name(more.device_type));
    if (sum.device_index != more.device_index)
      return expected("from.device_index", std::to_string(sum.device_index), std::to_string(more.device_index));
    // A state that has none would count as one without a column.
    const auto check_alike = [](const char* name, const float* ours, const float* theirs) -> Status {
      if ((ours == nullptr) == (theirs == nullptr)) return {};
      return expected(name, theirs == nullptr ? "an array, as into has one" : "none, as into has none",
                      theirs == nullptr ? "none" : "an array");
    };
    if (Status s = check_alike("from.allowed_count", sum.allowed_count, more.allowed_count); !s.ok()) return s;
    if (Status s = check_alike("from.allowed_weight", sum.allowed_weight, more.allowed_weight); !s.ok()) return s;
    if (Status s = check_alike("from.label_logits", sum.label_logits, more.label_logits); !s.ok()) return s;
    if (sum.label_logits != nullptr && sum.labels_per_row != more.labels_per_row)
      return expected("from.labels_per_row", std::to_string(sum.labels_per_row), std::to_string(more.labels_per_row));
    if (Status s = find_backend(sum.device_type)->merge(&sum, more); !s.ok()) return s;
    sum.smoothing_weight += more.smoothing_weight;
    fill_struct(sum, into);
    return {};
  });
}

}  // extern "C"
