// A call on the CPU: the sweeps, with the row stage between a row's two while it is in cache.
#pragma once

#include <memory>

#include "backends/backend.h"

namespace tileloss::impl::cpu {

inline Status refuse_stream(const char* name, const void* stream) {
  return stream == nullptr ? Status{} : expected(name, "null: the CPU has no streams", "a pointer");
}

Status begin_call(const Problem& problem, const tileloss_plan& plan, const tileloss_run& run, std::unique_ptr<Call>* call);

}  // namespace tileloss::impl::cpu
