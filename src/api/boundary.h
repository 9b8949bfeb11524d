// Where calls end: a Status becomes a code and the thread's message, and no exception passes.
#ifndef TILELOSS_API_BOUNDARY_H_
#define TILELOSS_API_BOUNDARY_H_

#include <exception>
#include <new>

#include "schema/status.h"

namespace tileloss::impl::api {

// Keeps the message for tileloss_last_error, returns the code.
tileloss_status report(Status status) noexcept;

// Runs a function that returns Status at the boundary: no exception passes.
template <class F>
tileloss_status guarded(F&& body) noexcept {
  try {
    return report(body());
  } catch (const std::bad_alloc&) {
    return report({TILELOSS_OUT_OF_MEMORY, {}});
  } catch (const std::exception& e) {
    try {
      return report({TILELOSS_INTERNAL, e.what()});
    } catch (...) {
      return report({TILELOSS_INTERNAL, {}});
    }
  }
}

}  // namespace tileloss::impl::api

#endif  // TILELOSS_API_BOUNDARY_H_
