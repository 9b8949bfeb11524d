// The fields of options structs: what validation, the plan's fingerprint, introspection and every front end know of an option.
// The library's own are in option_fields.h; registry.cpp puts those that all losses have in front.
#pragma once

#include <tileloss/tileloss.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/host_device.h"

namespace tileloss::impl {

// A number read where the caller keeps it.
TILELOSS_HOST_DEVICE inline double scalar_value(const tileloss_scalar& s) {
  return s.pointer != nullptr ? static_cast<double>(*s.pointer) : s.value;
}

// Whether it can be other than `off`: only the call knows what a pointer points to.
TILELOSS_HOST_DEVICE inline bool may_differ(const tileloss_scalar& s, double off) {
  return s.pointer != nullptr || s.value != off;
}

// For numbers whose NaN means "not given".
TILELOSS_HOST_DEVICE inline bool is_given(const tileloss_scalar& s) { return s.pointer != nullptr || !std::isnan(s.value); }

inline constexpr double kNotGiven = std::numeric_limits<double>::quiet_NaN();
// The arithmetic is float32's: no number may leave its range, nor what has to be above 0 its normal numbers.
inline constexpr double kUnbounded = std::numeric_limits<float>::max();

// What has to be above 0 is divided by.
TILELOSS_HOST_DEVICE inline double smallest(const tileloss_field& f) {
  return f.exclusive_minimum != 0 && f.minimum == 0 ? static_cast<double>(std::numeric_limits<float>::min()) : f.minimum;
}
TILELOSS_HOST_DEVICE inline bool is_absent(const tileloss_field& f, double x) {
  return f.has_absent != 0 && (std::isnan(f.default_value) ? std::isnan(x) : x == f.default_value);
}
TILELOSS_HOST_DEVICE inline bool in_range(const tileloss_field& f, double x) {
  if (is_absent(f, x)) return true;
  if (!std::isfinite(x)) return false;
  return (f.exclusive_minimum != 0 ? x > f.minimum : x >= f.minimum) && x >= smallest(f) && x <= f.maximum;
}

// For losses that live outside the library.
constexpr tileloss_field double_field(const char* name, std::size_t offset, double value, double minimum, double maximum) {
  return {name, TILELOSS_FIELD_DOUBLE, 0, offset, value, minimum, maximum, 0, 0, nullptr, nullptr, 0};
}
constexpr tileloss_field choice_field(const char* name, std::size_t offset, int value, int count, const char* choices) {
  return {name, TILELOSS_FIELD_CHOICE, 0, offset, static_cast<double>(value), 0, count - 1.0, 0, 0, choices, nullptr, 0};
}

}  // namespace tileloss::impl
