// A failed call's code and message on their way to the boundary (api/boundary.h).
#pragma once

#include <tileloss/tileloss.h>

#include <charconv>
#include <string>
#include <utility>

namespace tileloss::impl {

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

// The shortest digits that say which double it is.
inline std::string text_of(double x) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, x).ptr};
}

}  // namespace tileloss::impl
