// From a call's arguments to a problem that is known to be sound.
#pragma once

#include <tileloss/tileloss.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "backends/problem.h"
#include "schema/status.h"

namespace tileloss::impl::api {

// A struct that may end before fields that were added later, whole: what it lacks is zero.
template <class T>
Status take_struct(const char* name, const T* given, T* whole) {
  std::memset(static_cast<void*>(whole), 0, sizeof *whole);
  whole->struct_size = sizeof *whole;
  if (given == nullptr) return {};
  if (given->struct_size < sizeof(std::size_t) || given->struct_size > sizeof *whole) {
    return expected(std::string(name) + ".struct_size", "that of its init function, at most " + std::to_string(sizeof *whole),
                    std::to_string(given->struct_size));
  }
  const std::size_t head = sizeof(std::size_t);
  std::memcpy(reinterpret_cast<std::byte*>(whole) + head, reinterpret_cast<const std::byte*>(given) + head,
              given->struct_size - head);
  return {};
}

// The other way round, for structs that the library fills: as much of `whole` as the caller's struct holds.
template <class T>
void fill_struct(const T& whole, T* given) {
  const std::size_t head = sizeof(std::size_t);
  std::memcpy(reinterpret_cast<std::byte*>(given) + head, reinterpret_cast<const std::byte*>(&whole) + head,
              given->struct_size - head);
}
template <class T>
Status check_filled(const char* name, const T* given, std::size_t least = sizeof(std::size_t)) {
  if (given == nullptr) return expected(name, "a struct from its init function", "null");
  if (given->struct_size >= least && given->struct_size <= sizeof *given) return {};
  return expected(std::string(name) + ".struct_size",
                  "that of its init function, " + std::to_string(least) + " to " + std::to_string(sizeof *given),
                  std::to_string(given->struct_size));
}

// Looks at shapes, dtypes, strides, options and which tensors are there; touches no data. Pointers may be null.
Status make_problem(const char* function, tileloss_pass pass, const tileloss_args* args, const void* options, Problem* problem);

// The row state as given: its struct, its arrays and its device.
Status check_row_state_struct(const char* name, const tileloss_row_state* given, tileloss_row_state* whole);

// The plan's identity: shapes, dtypes, strides, presence and options, but not the numbers that may change from step to step.
std::uint64_t fingerprint(const Problem& problem);

}  // namespace tileloss::impl::api
