#include "support/abi.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "backends/cuda/kernel_names.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"

namespace tileloss::tools {
namespace {

using impl::cuda::kKernelNames;
using oracle::NumberFormat;

constexpr std::array<std::pair<const char*, NumberFormat>, 7> kDtypes = {{{"bf16", NumberFormat::kBfloat16},
                                                                          {"bfloat16", NumberFormat::kBfloat16},
                                                                          {"fp16", NumberFormat::kFloat16},
                                                                          {"float16", NumberFormat::kFloat16},
                                                                          {"fp32", NumberFormat::kFloat32},
                                                                          {"f32", NumberFormat::kFloat32},
                                                                          {"float32", NumberFormat::kFloat32}}};

ExitCode exit_code(tileloss_status status) {
  switch (status) {
    case TILELOSS_UNSUPPORTED: return kExitEnvironment;
    case TILELOSS_INTERNAL:
    case TILELOSS_PLAN_MISMATCH: return kExitCheckFailed;
    default: return kExitUsage;
  }
}

// A bound of an integer field is stored as a double; INT64_MAX itself is not one.
int64_t to_int64(double value) {
  if (value >= 0x1p63) return std::numeric_limits<int64_t>::max();
  if (value <= -0x1p63) return std::numeric_limits<int64_t>::min();
  return static_cast<int64_t>(value);
}

tileloss_function_info function_info(int64_t index) {
  tileloss_function_info info = {};
  info.struct_size = sizeof info;
  check_status(tileloss_get_function_info(index, &info), "function info");
  return info;
}

template <class Enum, class NameOf>
Enum find_name(const std::string& name, Enum count, NameOf name_of, const char* what) {
  for (Enum value = 0; value < count; ++value) {
    if (name == name_of(value)) return value;
  }
  throw ToolError(kExitUsage, formatted("{} '{}' is unknown", what, shown(name)));
}

// name_of(0), name_of(1), ...
template <class NameOf>
std::vector<std::string> names_of(int64_t count, NameOf name_of) {
  std::vector<std::string> names;
  for (int32_t value = 0; value < count; ++value) names.emplace_back(name_of(value));
  return names;
}

// The library's names are the list.
tileloss_isa isa_count() {
  tileloss_isa count = 0;
  while (std::strcmp(tileloss_isa_name(count), "unknown") != 0) ++count;
  return count;
}
constexpr tileloss_pass kPassCount = TILELOSS_VALUE_AND_GRAD + 1;  // that take logits
constexpr tileloss_schedule kScheduleCount = TILELOSS_SCHEDULE_SWEEPS + 1;

}  // namespace

LibraryError::LibraryError(ExitCode code, const std::string& action, const std::string& refusal)
    : ToolError(code, action + ": " + refusal) {
  const size_t colon = refusal.find(": ");
  if (colon == std::string::npos) return;
  argument_ = refusal.substr(0, colon);
  problem_ = refusal.substr(colon + 2);
}

void check_status(tileloss_status status, const std::string& action) {
  if (status == TILELOSS_OK) return;
  const std::string doing = formatted("{}: {}", action, tileloss_status_name(status));
  if (status == TILELOSS_OUT_OF_MEMORY) throw OutOfMemory(doing + ": " + tileloss_last_error());
  throw LibraryError(exit_code(status), doing, tileloss_last_error());
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t start = 0;;) {
    const size_t end = text.find(separator, start);
    parts.emplace_back(text.substr(start, end - start));
    if (end == std::string_view::npos) return parts;
    start = end + 1;
  }
}

std::vector<std::string> Function::names() {
  return names_of(tileloss_function_count(), [](int32_t index) { return function_info(index).name; });
}

Function Function::of(std::string_view loss, bool is_linear) {
  for (int64_t index = 0; index < tileloss_function_count(); ++index) {
    const tileloss_function_info info = function_info(index);
    if (loss == info.loss && (info.is_linear != 0) == is_linear) return Function(info.name);
  }
  return Function((is_linear ? "linear_" : "") + std::string(loss));  // which there is not
}

Function::Function(std::string_view name) : name_(name) {
  for (int64_t index = 0; index < tileloss_function_count(); ++index) {
    info_ = function_info(index);
    if (name_ != info_.name) continue;
    options_.resize((info_.options_size + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    check_status(tileloss_options_init(info_.name, options_.data(), info_.options_size), name_);
    return;
  }
  throw ToolError(kExitUsage, formatted("loss '{}' is unknown; there are: {}", shown(name), fmt::join(names(), ", ")));
}

Function::Function(std::string_view name, const void* options) : Function(name) {
  std::memcpy(options_.data(), options, info_.options_size);
}

const void* Function::at(const tileloss_field& field) const {
  return reinterpret_cast<const char*>(options_.data()) + field.offset;
}

void Function::set_number(const tileloss_field& field, double value) {
  void* target = const_cast<void*>(at(field));
  if (field.type == TILELOSS_FIELD_SCALAR) {
    const tileloss_scalar scalar = {value, nullptr};
    std::memcpy(target, &scalar, sizeof scalar);
  } else {
    std::memcpy(target, &value, sizeof value);
  }
}

void Function::set_integer(const tileloss_field& field, int64_t value) {
  void* target = const_cast<void*>(at(field));
  if (field.type == TILELOSS_FIELD_CHOICE) {
    const auto choice = static_cast<int32_t>(value);
    std::memcpy(target, &choice, sizeof choice);
  } else {
    std::memcpy(target, &value, sizeof value);
  }
}

const tileloss_field* Function::find_field(std::string_view name) const {
  for (const tileloss_field& field : fields()) {
    if (name == field.name) return &field;
  }
  return nullptr;
}

bool Function::takes(std::string_view tensor) const {
  const std::span<const tileloss_tensor> tensors(info_.tensors, static_cast<size_t>(info_.num_tensors));
  return std::any_of(tensors.begin(), tensors.end(), [&](const tileloss_tensor& known) { return tensor == known.name; });
}

std::vector<std::string> Function::presets() const {
  return info_.presets == nullptr ? std::vector<std::string>() : split(info_.presets, '|');
}

std::vector<std::string> Function::metrics() const {
  return info_.metrics == nullptr ? std::vector<std::string>() : split(info_.metrics, '|');
}

void Function::read_options(ConfigReader& config) {
  if (info_.presets != nullptr && config.has("preset")) {
    preset_ = config.choice("preset", std::nullopt, presets());
    check_status(tileloss_options_preset(name_.c_str(), preset_.c_str(), options_.data(), info_.options_size), name_);
  }
  for (const tileloss_field& field : fields()) {
    const std::string key = field.name;
    if (field.type == TILELOSS_FIELD_CHOICE) {
      set_choice(key, config.choice(key, get_choice(key, ""), split(field.choices, '|')));
    } else if (field.type == TILELOSS_FIELD_INT64) {
      const auto also = field.has_absent != 0 ? std::optional(to_int64(field.default_value)) : std::nullopt;
      const int64_t minimum = to_int64(field.minimum) + (field.exclusive_minimum != 0 ? 1 : 0);
      set_integer(field, config.integer(key, get_integer(key, 0), minimum, to_int64(field.maximum), also));
    } else {
      NumberRange range{field.minimum, field.maximum, field.exclusive_minimum != 0, std::nullopt};
      if (field.has_absent != 0 && std::isfinite(field.default_value)) range.also = field.default_value;
      set_number(field, config.number(key, get(key, 0), range));
    }
  }
}

const tileloss_field& Function::field_named(std::string_view name) const {
  const tileloss_field* field = find_field(name);
  if (field == nullptr) throw ToolError(kExitUsage, formatted("{} has no option {}", name_, name));
  return *field;
}

void Function::set_choice(std::string_view name, std::string_view choice) {
  const tileloss_field& field = field_named(name);
  const std::vector<std::string> choices = split(field.choices, '|');
  for (size_t index = 0; index < choices.size(); ++index) {
    if (choices[index] == choice) return set_integer(field, static_cast<int64_t>(index));
  }
  throw ToolError(kExitUsage, formatted("{}: '{}' is none of {}", name, choice, field.choices));
}

void Function::set_integer(std::string_view name, int64_t value) { set_integer(field_named(name), value); }
void Function::set_number(std::string_view name, double value) { set_number(field_named(name), value); }

void Function::reset(std::string_view name) {
  const tileloss_field& field = field_named(name);
  if (field.type == TILELOSS_FIELD_CHOICE || field.type == TILELOSS_FIELD_INT64) {
    set_integer(field, to_int64(field.default_value));
  } else {
    set_number(field, field.default_value);
  }
}

double Function::get(std::string_view name, double fallback) const {
  const tileloss_field* field = find_field(name);
  if (field == nullptr) return fallback;
  if (field->type == TILELOSS_FIELD_INT64 || field->type == TILELOSS_FIELD_CHOICE) {
    return static_cast<double>(get_integer(name, 0));
  }
  double value = 0;  // a tileloss_scalar starts with its value
  std::memcpy(&value, at(*field), sizeof value);
  return value;
}

int64_t Function::get_integer(std::string_view name, int64_t fallback) const {
  const tileloss_field* field = find_field(name);
  if (field == nullptr) return fallback;
  if (field->type == TILELOSS_FIELD_CHOICE) {
    int32_t choice = 0;
    std::memcpy(&choice, at(*field), sizeof choice);
    return choice;
  }
  int64_t value = 0;
  std::memcpy(&value, at(*field), sizeof value);
  return value;
}

std::string Function::get_choice(std::string_view name, std::string_view fallback) const {
  const tileloss_field* field = find_field(name);
  if (field == nullptr) return std::string(fallback);
  return split(field->choices, '|').at(static_cast<size_t>(get_integer(name, 0)));
}

Json Function::to_json() const {
  const Function defaults(name_);
  Json json = Json::object();
  for (const tileloss_field& field : fields()) {
    const std::string name = field.name;
    if (field.type == TILELOSS_FIELD_CHOICE) {
      if (get_integer(name, 0) != defaults.get_integer(name, 0)) json[name] = get_choice(name, "");
    } else if (field.type == TILELOSS_FIELD_INT64) {
      if (get_integer(name, 0) != defaults.get_integer(name, 0)) json[name] = get_integer(name, 0);
    } else if (const double value = get(name, 0); std::isfinite(value) && value != defaults.get(name, 0)) {
      json[name] = value;
    }
  }
  return json;
}

std::vector<std::string> dtype_names() {
  return names_of(std::ssize(kDtypes), [](int32_t index) { return kDtypes[static_cast<size_t>(index)].first; });
}

NumberFormat parse_dtype(std::string_view name) {
  for (const auto& [known, format] : kDtypes) {
    if (name == known) return format;
  }
  throw ToolError(kExitUsage, formatted("dtype '{}' is none of {}", shown(name), fmt::join(dtype_names(), ", ")));
}

tileloss_dtype abi_dtype(NumberFormat format) {
  switch (format) {
    case NumberFormat::kFloat32: return TILELOSS_FLOAT32;
    case NumberFormat::kBfloat16: return TILELOSS_BFLOAT16;
    case NumberFormat::kFloat16: return TILELOSS_FLOAT16;
  }
  return TILELOSS_NONE;
}

std::vector<std::string> isa_names() { return names_of(isa_count(), tileloss_isa_name); }

std::vector<std::string> schedule_names() { return names_of(kScheduleCount, tileloss_schedule_name); }

std::vector<std::string> cuda_kernel_names() { return {std::begin(kKernelNames), std::end(kKernelNames)}; }

tileloss_plan_options KernelHints::plan_options() const {
  tileloss_plan_options options;
  tileloss_plan_options_init(&options);
  options.cpu.isa = find_name<tileloss_isa>(isa, isa_count(), tileloss_isa_name, "instruction set");
  options.cpu.schedule = find_name<tileloss_schedule>(schedule, kScheduleCount, tileloss_schedule_name, "schedule");
  options.cpu.threads = static_cast<int32_t>(threads);
  options.cpu.row_block = row_block;
  options.cpu.vocab_block = vocab_block;
  options.workspace_bytes = workspace_bytes;
  options.cpu.chunk_columns = chunk_columns;
  const auto kernel = find_name<tileloss_cuda_kernel>(
      cuda_kernel, std::size(kKernelNames), [](tileloss_cuda_kernel each) { return kKernelNames[each]; }, "CUDA kernel");
  options.cuda = {kernel, options.cpu.schedule, row_block, vocab_block, chunk_columns};
  return options;
}

KernelHints read_hints(ConfigReader& config) {
  KernelHints hints;
  hints.isa = config.choice("isa", hints.isa, isa_names());
  hints.schedule = config.choice("schedule", hints.schedule, schedule_names());
  hints.threads = config.integer("threads", 0, 0, kMaxThreads);
  hints.row_block = config.integer("row_block", 0, 0, kMaxCount);
  hints.vocab_block = config.integer("vocab_block", 0, 0, kMaxCount);
  hints.cuda_kernel = config.choice("cuda_kernel", hints.cuda_kernel, cuda_kernel_names());
  return hints;
}

tileloss_plan make_plan(const Function& function, tileloss_pass pass, const tileloss_args& args, const KernelHints& hints) {
  const tileloss_plan_options options = hints.plan_options();
  tileloss_plan plan;
  tileloss_plan_init(&plan);
  check_status(tileloss_make_plan(function.name().c_str(), pass, &args, function.options(), &options, nullptr, &plan),
               formatted("planning {} {}", function.name(), pass_name(pass)));
  return plan;
}

void call(const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
          const tileloss_run* run) {
  check_status(tileloss_call(function.name().c_str(), pass, &args, function.options(), &plan, run),
               formatted("{} {}", function.name(), pass_name(pass)));
}

Json plan_facts(const tileloss_plan& plan) {
  size_t needed = 0;
  check_status(tileloss_plan_describe(&plan, TILELOSS_JSON, nullptr, 0, &needed), "describing the plan");
  std::string text(needed, '\0');
  check_status(tileloss_plan_describe(&plan, TILELOSS_JSON, text.data(), needed, nullptr), "describing the plan");
  text.pop_back();
  return Json::parse(text);
}

std::vector<std::string> pass_names() { return names_of(kPassCount, pass_name); }

tileloss_pass parse_pass(std::string_view name) {
  for (tileloss_pass pass = 0; pass < kPassCount; ++pass) {
    if (name == pass_name(pass)) return pass;
  }
  throw ToolError(kExitUsage, formatted("pass '{}' is none of {}", shown(name), fmt::join(pass_names(), ", ")));
}

}  // namespace tileloss::tools
