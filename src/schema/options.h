// Options structs through their field tables: defaults, ranges, identity.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include "schema/fields.h"
#include "schema/status.h"

namespace tileloss::impl {

// FNV-1a over plain values.
class Fingerprint {
 public:
  template <class T>
  requires std::is_arithmetic_v<T>
  void add(T value) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    for (std::size_t i = 0; i < sizeof value; ++i) hash_ = (hash_ ^ bytes[i]) * 0x100000001b3u;
  }
  void add(const char* text) {
    for (; *text != '\0'; ++text) add(*text);
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

using Fields = std::span<const tileloss_field>;

// `options_size` bytes: the size, then every field's default.
void fill_defaults(Fields fields, void* options, std::size_t options_size);
// Every field in its range; numbers behind pointers only if `with_pointers`.
Status check_options(Fields fields, const void* options, bool with_pointers);
// No option that is given beside a choice with which it has no effect.
Status check_effects(Fields fields, const void* options);
// What is said of a number that is not in its range.
Status out_of_range(const tileloss_field& field, double number);
// Everything but the values that may change from step to step.
void hash_options(Fields fields, const void* options, Fingerprint& hash);

// Where a number lies that is given by a pointer; null: it is in the options.
const float* pointer_of(const tileloss_field& field, const void* options);

// One field by its name: a number, a choice by its name, the place of a scalar's number. `function` is for the message.
Status set_number(Fields fields, const char* function, const char* name, double value, void* options);
Status set_choice(Fields fields, const char* function, const char* name, const char* choice, void* options);
Status set_pointer(Fields fields, const char* function, const char* name, const float* pointer, void* options);

}  // namespace tileloss::impl
