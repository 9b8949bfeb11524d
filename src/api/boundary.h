// Where calls end: a Status becomes a code and the thread's message, and no exception passes.
#pragma once

#include <exception>
#include <new>

#include "schema/status.h"

namespace tileloss::impl::api {

// Keeps the message for tileloss_last_error, returns the code. Where no memory is left the message is "out of memory".
tileloss_status report(tileloss_status code, const char* message) noexcept;
const char* last_error() noexcept;

// Runs a function that returns Status at the boundary: no exception passes.
template <class F>
tileloss_status guarded(F&& body) noexcept {
  try {
    const Status status = body();
    return report(status.code, status.message.c_str());
  } catch (const std::bad_alloc&) {
    return report(TILELOSS_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return report(TILELOSS_INTERNAL, e.what());
  }
}

}  // namespace tileloss::impl::api
