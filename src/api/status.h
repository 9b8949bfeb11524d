// A failed call's code and message on their way to the boundary.
#ifndef TILELOSS_API_STATUS_H_
#define TILELOSS_API_STATUS_H_

#include <tileloss/tileloss.h>

#include <exception>
#include <new>
#include <string>
#include <utility>

namespace tileloss::api {

struct Status {
  tileloss_status code = TILELOSS_OK;
  std::string message;
  bool ok() const { return code == TILELOSS_OK; }
};

inline Status invalid(std::string message) { return {TILELOSS_INVALID_ARGUMENT, std::move(message)}; }

// "name: expected X, got Y".
inline Status expected(const std::string& name, const std::string& wanted, const std::string& given) {
  return invalid(name + ": expected " + wanted + ", got " + given);
}

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

}  // namespace tileloss::api

#endif  // TILELOSS_API_STATUS_H_
