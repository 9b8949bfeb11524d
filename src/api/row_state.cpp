// The row state's monoid over arrays.
#include "core/row_state.h"

#include <string>

#include "api/row_arrays.h"
#include "api/status.h"

namespace tileloss::api {
namespace {

Status check(const char* name, const tileloss_row_state* s) {
  if (s == nullptr || s->struct_size != sizeof *s)
    return expected(name, "a struct from tileloss_row_state_init", s == nullptr ? "null" : "another size");
  if (s->rows < 0) return expected(std::string(name) + ".rows", ">= 0", std::to_string(s->rows));
  if (s->rows > 0 && (s->max == nullptr || s->sum == nullptr || s->target == nullptr)) {
    return expected(name, "the arrays max, sum and target", "a null one");
  }
  if (s->device_type != TILELOSS_CPU)
    return expected(std::string(name) + ".device_type", "the CPU", std::to_string(s->device_type));
  return {};
}

}  // namespace
}  // namespace tileloss::api

using namespace tileloss;       // NOLINT(google-build-using-namespace): the C functions below stand outside every namespace
using namespace tileloss::api;  // NOLINT(google-build-using-namespace)

extern "C" tileloss_status tileloss_row_state_set_identity(tileloss_row_state* state) {
  return guarded([&]() -> Status {
    if (Status s = check("state", state); !s.ok()) return s;
    for (std::int64_t i = 0; i < state->rows; ++i) save_row(*state, i, RowState{});
    state->smoothing_weight = 0;
    return {};
  });
}

extern "C" tileloss_status tileloss_row_state_merge(tileloss_row_state* into, const tileloss_row_state* from) {
  return guarded([&]() -> Status {
    if (Status s = check("into", into); !s.ok()) return s;
    if (Status s = check("from", from); !s.ok()) return s;
    if (into->rows != from->rows) return expected("from.rows", std::to_string(into->rows), std::to_string(from->rows));
    tileloss_row_state both = *into;
    if (from->entropy_sum == nullptr) both.entropy_sum = nullptr;
    if (from->collision_sum == nullptr) both.collision_sum = nullptr;
    if (from->smoothing_sum == nullptr) both.smoothing_sum = nullptr;
    if (from->argmax == nullptr) both.argmax = nullptr;
    for (std::int64_t i = 0; i < into->rows; ++i) {
      save_row(both, i, merge(load_row(*into, i), into->smoothing_weight, load_row(*from, i), from->smoothing_weight));
    }
    into->smoothing_weight += from->smoothing_weight;
    return {};
  });
}
