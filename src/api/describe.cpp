#include "api/describe.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <variant>
#include <vector>

#include "api/validate.h"
#include "backends/backend.h"
#include "schema/tensors.h"

namespace tileloss::impl::api {
namespace {

template <std::size_t Size>
std::string text_of(const char (&field)[Size]) {
  return {field, strnlen(field, Size)};
}

std::vector<PlanFact> facts_of(const tileloss_plan& plan, const Backend& backend) {
  std::vector<PlanFact> facts = {
      {"function", text_of(plan.function)},      {"pass", pass_name(plan.pass)},      {"device", backend.name()},
      {"workspace_bytes", plan.workspace_bytes}, {"predicted_ms", plan.predicted_ms},
  };
  for (PlanFact& fact : backend.describe(plan)) facts.push_back(std::move(fact));
  return facts;
}

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return json + '"';
}

std::string value_of(const PlanFact& fact, bool is_json) {
  if (const auto* n = std::get_if<std::int64_t>(&fact.value)) return std::to_string(*n);
  if (const auto* x = std::get_if<double>(&fact.value)) return impl::text_of(*x);
  const auto& text = std::get<std::string>(fact.value);
  return is_json ? quoted(text) : text;
}

std::string as_text(const tileloss_plan& plan, const std::vector<PlanFact>& facts) {
  std::string text;
  for (const PlanFact& fact : facts) text += fact.name + ": " + value_of(fact, false) + "\n";
  for (std::int64_t i = 0; i < plan.buffer_count; ++i)
    text += "  " + text_of(plan.buffers[i].name) + ": " + std::to_string(plan.buffers[i].bytes) + " bytes\n";
  return text;
}

std::string as_json(const tileloss_plan& plan, const std::vector<PlanFact>& facts) {
  std::string json = "{";
  for (const PlanFact& fact : facts) json += quoted(fact.name) + ": " + value_of(fact, true) + ", ";
  json += "\"buffers\": {";
  for (std::int64_t i = 0; i < plan.buffer_count; ++i)
    json += (i == 0 ? "" : ", ") + quoted(text_of(plan.buffers[i].name)) + ": " + std::to_string(plan.buffers[i].bytes);
  return json + "}}";
}

}  // namespace

Status describe(const tileloss_plan* given, tileloss_text_format format, char* text, std::size_t capacity, std::size_t* needed) {
  if (given == nullptr) return expected("plan", "a plan", "null");
  tileloss_plan plan{};
  if (Status s = take_struct("plan", given, &plan); !s.ok()) return s;
  if (format != TILELOSS_TEXT && format != TILELOSS_JSON)
    return expected("format", "TILELOSS_TEXT or TILELOSS_JSON (0 or 1)", std::to_string(format));
  if (text == nullptr && capacity > 0) return expected("text", "a pointer, as capacity is not 0", "null");
  if (plan.buffer_count < 0 || plan.buffer_count > TILELOSS_MAX_PLAN_BUFFERS) {
    return expected("plan.buffer_count", "0 to " + std::to_string(TILELOSS_MAX_PLAN_BUFFERS), std::to_string(plan.buffer_count));
  }
  const Backend* backend = find_backend(plan.device_type);
  if (backend == nullptr) return expected("plan.device_type", "a device of this build", std::to_string(plan.device_type));
  const std::vector<PlanFact> facts = facts_of(plan, *backend);
  const std::string words = format == TILELOSS_JSON ? as_json(plan, facts) : as_text(plan, facts);
  if (needed != nullptr) *needed = words.size() + 1;
  if (capacity > 0) {
    const std::size_t length = std::min(words.size(), capacity - 1);
    std::memcpy(text, words.data(), length);
    text[length] = '\0';
  }
  return {};
}

}  // namespace tileloss::impl::api
