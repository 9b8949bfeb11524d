// Options structs through their field tables: defaults, ranges, identity.
#include "schema/options.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include "core/enumerators.h"

namespace tileloss::impl {
namespace {

std::string range(const tileloss_field& f) {
  if (f.type == TILELOSS_FIELD_CHOICE) return "one of " + std::string(f.choices) + " (0 to " + text_of(f.maximum) + ")";
  const bool has_upper = f.maximum < 0x1p62;
  std::string s = std::string("a number ") + (f.exclusive_minimum != 0 ? "> " : ">= ") + text_of(f.minimum);
  if (has_upper) s += " and <= " + text_of(f.maximum);
  if (f.has_absent != 0 && !std::isnan(f.default_value)) s += ", or " + text_of(f.default_value);
  return s;
}

// The same for a number that is refused.
std::string range(const tileloss_field& f, double x) {
  const bool is_float32s = std::isfinite(x) && (x > kUnbounded || x < -kUnbounded || (x > f.minimum && x < smallest(f)));
  return range(f) + (is_float32s ? " within float32's normal range, 1.18e-38 to 3.4e+38" : "");
}

template <class T>
T read(const void* options, std::size_t offset) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(options) + offset, sizeof value);
  return value;
}

template <class T>
void write(void* options, std::size_t offset, T value) {
  std::memcpy(static_cast<std::byte*>(options) + offset, &value, sizeof value);
}

double number_of(const tileloss_field& f, const void* options) {
  switch (as_enum<TILELOSS_FIELD_DOUBLE>(f.type)) {
    case TILELOSS_FIELD_INT64: return static_cast<double>(read<std::int64_t>(options, f.offset));
    case TILELOSS_FIELD_CHOICE: return read<std::int32_t>(options, f.offset);
    case TILELOSS_FIELD_SCALAR: return scalar_value(read<tileloss_scalar>(options, f.offset));
    case TILELOSS_FIELD_DOUBLE: break;
  }
  return read<double>(options, f.offset);
}

// Whether a field has a number other than its default, or takes it from behind a pointer.
bool is_given(const tileloss_field& f, const void* options) {
  if (pointer_of(f, options) != nullptr) return true;
  const double x = number_of(f, options);
  return x != f.default_value && !(std::isnan(x) && std::isnan(f.default_value));
}

std::string choice_name(const tileloss_field& f, std::int32_t index) {
  std::string_view left = f.choices;
  for (; index > 0; --index) left.remove_prefix(left.find('|') + 1);
  return std::string(left.substr(0, left.find('|')));
}

}  // namespace

void fill_defaults(Fields fields, void* options, std::size_t options_size) {
  std::memset(options, 0, options_size);
  write(options, 0, options_size);
  for (const tileloss_field& f : fields) {
    switch (as_enum<TILELOSS_FIELD_DOUBLE>(f.type)) {
      case TILELOSS_FIELD_DOUBLE: write(options, f.offset, f.default_value); break;
      case TILELOSS_FIELD_INT64: write(options, f.offset, static_cast<std::int64_t>(f.default_value)); break;
      case TILELOSS_FIELD_CHOICE: write(options, f.offset, static_cast<std::int32_t>(f.default_value)); break;
      case TILELOSS_FIELD_SCALAR: write(options, f.offset, tileloss_scalar{f.default_value, nullptr}); break;
    }
  }
}

const float* pointer_of(const tileloss_field& f, const void* options) {
  return f.type == TILELOSS_FIELD_SCALAR ? read<tileloss_scalar>(options, f.offset).pointer : nullptr;
}

Status out_of_range(const tileloss_field& f, double x) { return expected(f.name, range(f, x), text_of(x)); }

Status check_options(Fields fields, const void* options, bool with_pointers) {
  for (const tileloss_field& f : fields) {
    if (pointer_of(f, options) != nullptr && !with_pointers) continue;
    const double x = number_of(f, options);
    if (!in_range(f, x)) return out_of_range(f, x);
  }
  return {};
}

Status check_effects(Fields fields, const void* options) {
  for (const tileloss_field& f : fields) {
    if (f.only_with == nullptr || !is_given(f, options)) continue;
    const std::string name = f.only_with;
    const tileloss_field& other = *std::ranges::find_if(fields, [&](const tileloss_field& o) { return o.name == name; });
    const auto chosen = read<std::int32_t>(options, other.offset);
    if ((f.only_with_choices >> chosen & 1) != 0) continue;
    std::string users;
    for (std::int32_t i = 0; i <= static_cast<std::int32_t>(other.maximum); ++i) {
      if ((f.only_with_choices >> i & 1) != 0) users += (users.empty() ? "" : " or ") + choice_name(other, i);
    }
    return expected(f.name, "none with " + name + " = " + choice_name(other, chosen) + ", only with " + users,
                    f.type == TILELOSS_FIELD_CHOICE ? choice_name(f, read<std::int32_t>(options, f.offset)) : "a number");
  }
  return {};
}

void hash_options(Fields fields, const void* options, Fingerprint& hash) {
  for (const tileloss_field& f : fields) {
    switch (as_enum<TILELOSS_FIELD_DOUBLE>(f.type)) {
      case TILELOSS_FIELD_DOUBLE: hash.add(read<double>(options, f.offset)); break;
      case TILELOSS_FIELD_INT64: hash.add(read<std::int64_t>(options, f.offset)); break;
      case TILELOSS_FIELD_CHOICE: hash.add(read<std::int32_t>(options, f.offset)); break;
      case TILELOSS_FIELD_SCALAR: {
        const auto scalar = read<tileloss_scalar>(options, f.offset);
        hash.add(scalar.pointer == nullptr && is_absent(f, scalar.value));
        break;
      }
    }
  }
}

namespace {

Status find_field(Fields fields, const char* function, const char* name, const tileloss_field** found) {
  std::string names;
  for (const tileloss_field& f : fields) {
    if (name != nullptr && std::string_view(f.name) == name) {
      *found = &f;
      return {};
    }
    names += (names.empty() ? "" : ", ") + std::string(f.name);
  }
  return expected("name", std::string("an option of ") + function + ": " + names, name == nullptr ? "null" : name);
}

}  // namespace

Status set_number(Fields fields, const char* function, const char* name, double value, void* options) {
  const tileloss_field* f = nullptr;
  if (Status s = find_field(fields, function, name, &f); !s.ok()) return s;
  switch (as_enum<TILELOSS_FIELD_DOUBLE>(f->type)) {
    case TILELOSS_FIELD_SCALAR: write(options, f->offset, tileloss_scalar{value, nullptr}); return {};
    case TILELOSS_FIELD_DOUBLE: write(options, f->offset, value); return {};
    case TILELOSS_FIELD_INT64:
    case TILELOSS_FIELD_CHOICE: break;
  }
  const bool is_whole = std::fabs(value) < 0x1p62 && value == std::trunc(value);
  if (!is_whole || (f->type == TILELOSS_FIELD_CHOICE && !in_range(*f, value))) return expected(name, range(*f), text_of(value));
  if (f->type == TILELOSS_FIELD_INT64) write(options, f->offset, static_cast<std::int64_t>(value));
  if (f->type == TILELOSS_FIELD_CHOICE) write(options, f->offset, static_cast<std::int32_t>(value));
  return {};
}

Status set_choice(Fields fields, const char* function, const char* name, const char* choice, void* options) {
  const tileloss_field* f = nullptr;
  if (Status s = find_field(fields, function, name, &f); !s.ok()) return s;
  if (f->type != TILELOSS_FIELD_CHOICE) return expected(name, "a number", choice == nullptr ? "null" : choice);
  std::int32_t index = 0;
  for (std::string_view left = f->choices; choice != nullptr; ++index) {
    const std::string_view one = left.substr(0, left.find('|'));
    if (one == choice) {
      write(options, f->offset, index);
      return {};
    }
    if (one.size() == left.size()) break;
    left.remove_prefix(one.size() + 1);
  }
  return expected(name, "one of " + std::string(f->choices), choice == nullptr ? "null" : choice);
}

Status set_pointer(Fields fields, const char* function, const char* name, const float* pointer, void* options) {
  const tileloss_field* f = nullptr;
  if (Status s = find_field(fields, function, name, &f); !s.ok()) return s;
  if (f->type != TILELOSS_FIELD_SCALAR) return expected(name, "an option that may lie behind a pointer", "another");
  auto scalar = read<tileloss_scalar>(options, f->offset);
  scalar.pointer = pointer;
  write(options, f->offset, scalar);
  return {};
}

}  // namespace tileloss::impl
