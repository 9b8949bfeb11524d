// A call on the CPU: the sweeps, with the row stage between a row's two while it is in cache.
#ifndef TILELOSS_BACKENDS_CPU_CALL_H_
#define TILELOSS_BACKENDS_CPU_CALL_H_

#include <memory>

#include "backends/backend.h"

namespace tileloss::impl::cpu {

inline Status refuse_stream(const char* name, const void* stream) {
  return stream == nullptr ? Status{} : expected(name, "null: the CPU has no streams", "a pointer");
}

Status begin_call(const Problem& problem, const tileloss_plan& plan, const tileloss_run& run, std::unique_ptr<Call>* call);

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_CALL_H_
